"""A connection between two programs that can be cut, silenced and recorded."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque


class Proxy:
    """Forwards TCP connections to a port of 127.0.0.1.

    Args:
        target: The port.
        keeps: Keep the clients' data in `sent`.

    Attributes:
        port: The port that it listens on.
        address: The same as an address for clients.
        connections: Number of connections so far.
        sent: The client's data of each connection, in pieces as received.
        sent_bytes: Number of bytes from all clients.
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
        self._delay_s = 0.0
        # what is forwarded later: when, in seconds of the monotonic clock, to which socket, and what
        self._late: deque[tuple[float, socket.socket, bytes]] = deque()
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
        """Forward nothing any more, and keep the connections open."""
        with self._lock:
            self._held = True

    def slow(self, bytes_per_s: int) -> None:
        """Limit the rate at which the client's data is forwarded."""
        self._bytes_per_s = bytes_per_s

    def delay(self, seconds: float) -> None:
        """Forward everything so much later, in each direction."""
        self._delay_s = seconds

    def hold_answers(self) -> None:
        """Forward the client's data, and drop the replies."""
        with self._lock:
            self._answers_held = True

    def cut(self) -> None:
        """Close all connections, and forward nothing of new ones until `mend`."""
        with self._lock:
            self._held = self._refusing = True
        self._waker.send(b"x")

    def reset(self) -> None:
        """Close all connections; new ones are forwarded."""
        with self._lock:
            self._refusing = True
        self._waker.send(b"r")

    def mend(self) -> None:
        """Forward data again, over new connections. The existing ones, which may have lost data, are closed."""
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
            for key, _ in self._selector.select(self._until_next()):
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
            self._forward_late()
        self._drop_all()

    def _until_next(self) -> float | None:
        return max(self._late[0][0] - time.monotonic(), 0.0) if self._late else None

    def _forward_late(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, sink, data = self._late.popleft()
            with contextlib.suppress(OSError):
                sink.sendall(data)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self.connections += 1
        record: list[bytes] = []
        self.sent.append(record)
        if self._held:
            # hangs, like a connection to an unreachable machine
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
                    self._forward(sink, data)
                return
        except OSError:
            pass
        # none when it was dropped a moment ago
        for pair in [pair for pair in self._pairs if source in pair]:
            self._drop(pair)

    def _forward(self, sink: socket.socket, data: bytes) -> None:
        if self._delay_s:
            self._late.append((time.monotonic() + self._delay_s, sink, data))
        else:
            sink.sendall(data)

    def _drop_all(self) -> None:
        for pair in list(self._pairs):
            self._drop(pair)

    def _drop(self, pair: tuple[socket.socket, socket.socket]) -> None:
        self._pairs.remove(pair)
        for each in set(pair):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(each)
            each.close()
