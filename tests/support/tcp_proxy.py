"""A line between two programs that can be cut, silenced and listened to."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time


class Proxy:
    """Passes TCP connections on to a port of 127.0.0.1.

    Args:
        target: The port.
        keeps: What clients send is kept in `sent`.

    Attributes:
        port: Where it listens.
        address: The same as clients take it.
        connections: How many it has had.
        sent: Of each connection, what its client has sent, in pieces as they came.
        sent_bytes: How much clients have sent together.
    """

    def __init__(self, target: int, *, keeps: bool = True) -> None:
        self._target = target
        self._keeps = keeps
        self.sent_bytes = 0
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._held = False
        self._answers_held = False
        self._refusing = False
        self._bytes_per_s = 0
        self.connections = 0
        self.sent: list[list[bytes]] = []
        self._listener = self._listen(0)
        self.port: int = self._listener.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="proxy", daemon=True)
        self._thread.start()

    @staticmethod
    def _listen(port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(16)
        return listener

    def hold(self) -> None:
        """Pass nothing on any more, and end nothing: a line that swallows everything."""
        with self._lock:
            self._held = True

    def slow(self, bytes_per_s: int) -> None:
        """Pass on no more than so much of what the client says."""
        self._bytes_per_s = bytes_per_s

    def hold_answers(self) -> None:
        """Pass on what the client says, and swallow what it is answered."""
        with self._lock:
            self._answers_held = True

    def cut(self) -> None:
        """End all connections, and pass nothing on of new ones until `mend`."""
        with self._lock:
            self._held = self._refusing = True
        self._waker.send(b"x")

    def reset(self) -> None:
        """End all connections; new ones are passed on."""
        with self._lock:
            self._refusing = True
        self._waker.send(b"r")

    def mend(self) -> None:
        """Pass on again what comes. What was swallowed stays lost, as its connections are ended."""
        with self._lock:
            self._held, self._answers_held, self._refusing = False, False, True
        self._waker.send(b"r")

    def close(self) -> None:
        self._closing = True
        self._waker.send(b"x")
        self._thread.join(10)
        for each in (self._listener, self._wake, self._waker):
            each.close()
        self._selector.close()

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake:
                    self._wake.recv(4096)
                    with self._lock:
                        drop, self._refusing = self._refusing, False
                    if drop:
                        self._drop_all()
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.data is not None:
                    self._pass_on(key.fileobj, *key.data)  # type: ignore[arg-type]
        self._drop_all()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self.connections += 1
        record: list[bytes] = []
        self.sent.append(record)
        if self._held:
            # it hangs, as one to a machine that is away
            self._pairs.append((connection, connection))
            return
        try:
            onward = socket.create_connection(("127.0.0.1", self._target), timeout=5)
        except OSError:
            connection.close()
            return
        self._pairs.append((connection, onward))
        self._selector.register(connection, selectors.EVENT_READ, (onward, record))
        self._selector.register(onward, selectors.EVENT_READ, (connection, None))

    def _pass_on(self, source: socket.socket, sink: socket.socket, record: list[bytes] | None) -> None:
        try:
            data = source.recv(65536)
            if data:
                if record is not None:
                    self.sent_bytes += len(data)
                    if self._bytes_per_s:
                        time.sleep(len(data) / self._bytes_per_s)
                    if self._keeps:
                        record.append(data)
                if not (self._held or (self._answers_held and record is None)):
                    sink.sendall(data)
                return
        except OSError:
            pass
        # none when it was dropped a moment ago
        for pair in [pair for pair in self._pairs if source in pair]:
            self._drop(pair)

    def _drop_all(self) -> None:
        for pair in list(self._pairs):
            self._drop(pair)

    def _drop(self, pair: tuple[socket.socket, socket.socket]) -> None:
        self._pairs.remove(pair)
        for each in set(pair):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(each)
            each.close()
