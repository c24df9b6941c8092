"""A second TCP port of a served pool, for clients' messages with file data: TLS in a thread of its own.

A client gets the certificate and a token over its ZeroMQ link, where both sides have proved their keys. A token can be
used once, within a few seconds. A connection without a token is closed after a few seconds; when there are too many,
the oldest are closed first. The thread passes messages to the loop one by one, and reads no more from a connection
while too many of its requests are open.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import msgspec

from sgpu_magic.pool.clients import ConnectedClient
from sgpu_magic.system.bulk_stream import MAX_PART_BYTES, BulkStream, server_context
from sgpu_magic.system.processes import write_log
from sgpu_magic.wire import codec
from sgpu_magic.wire.files import BULK_CHUNK_BYTES, FileRequest
from sgpu_magic.wire.pool_status import BulkOffered, BulkOpened, OpenBulk

TOKEN_S = 10.0
GREETING_S = 5.0
MOST_UNKNOWN = 100
# limit per connection for chunks that the loop is handling or that are queued for sending
_MOST_OPEN = 16
# excess connections stay in the kernel's accept queue
_ACCEPTED_PER_S = 200
_GREETING_BYTES = 256
_TICK_MS = 500
_PORTS_BETWEEN = 1000
_CLOSE_S = 5.0
_OVER = select.POLLERR | select.POLLHUP

RequestHandler = Callable[[ConnectedClient, FileRequest, Sequence[bytes]], None]


class _Peer(msgspec.Struct, eq=False):
    """A connection.

    Args:
        stream: The connection; used in the thread only.
        since: Monotonic time at which it was accepted.
        client: The client that it belongs to, None before its token.
        open: Number of requests without a reply; changed in the thread only.
        requests: Their numbers; used in the loop only.
        is_closed: Whether it was closed; set in the thread.
    """

    stream: BulkStream
    since: float
    client: ConnectedClient | None = None
    open: int = 0
    requests: set[int] = msgspec.field(default_factory=set[int])
    is_closed: bool = False

    @property
    def room(self) -> int:
        """The number of further messages that are read from it for now."""
        unsent = -(-self.stream.unsent_bytes // BULK_CHUNK_BYTES)
        return max(0, _MOST_OPEN - self.open - unsent)


class BulkPort:
    """The port. All methods are for the loop's thread.

    Args:
        link: The address of the ZeroMQ socket, `tcp://host:port`.
        port: The port; 0 is the link's + 1000, or any free one if that is taken.
        on_request: Called with a client, its message and the raw frames.

    Attributes:
        port: The port.

    Raises:
        OSError: The port can't be bound.
    """

    def __init__(self, link: str, port: int, on_request: RequestHandler) -> None:
        self._on_request = on_request
        self._loop = asyncio.get_running_loop()
        self._context, self._certificate = server_context()
        self._listener = _listener(link, port)
        self.port: int = self._listener.getsockname()[1]
        # (client, expiry time) by the token's digest; both threads access it under the lock
        self._tokens: dict[bytes, tuple[ConnectedClient, float]] = {}
        self._lock = threading.Lock()
        self._of_client: dict[ConnectedClient, _Peer] = {}
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._wake, self._waker = socket.socketpair()
        for each in (self._listener, self._wake, self._waker):
            each.setblocking(False)
        self._closing = False
        # used in the thread only
        self._peers: dict[int, _Peer] = {}
        self._accepted: tuple[int, int] = (0, 0)
        self._thread = threading.Thread(target=self._work, name="sgpu-bulk", daemon=True)
        self._thread.start()

    def offer(self, client: ConnectedClient) -> BulkOffered:
        """Return what the client needs to connect once. Its earlier tokens become invalid."""
        token = secrets.token_hex(32)
        now = time.monotonic()
        with self._lock:
            others = ((digest, one) for digest, one in self._tokens.items() if one[0] is not client and one[1] > now)
            self._tokens = {**dict(others), _digest(token): (client, now + TOKEN_S)}
        return BulkOffered(port=self.port, certificate=self._certificate, token=token)

    def answered(self, client: ConnectedClient, request: int, parts: Sequence[bytes]) -> bool:
        """Send the reply to a request that came over the client's connection here; return False for any other."""
        if (peer := self._of_client.get(client)) is None or request not in peer.requests:
            return False
        peer.requests.discard(request)
        self._call(lambda: self._reply(peer, parts))
        return True

    def cut(self, client: ConnectedClient) -> None:
        """Close the client's connection and invalidate its tokens."""
        with self._lock:
            self._tokens = {digest: entry for digest, entry in self._tokens.items() if entry[0] is not client}
        if (peer := self._of_client.pop(client, None)) is not None:
            self._call(lambda: self._end(peer))

    def close(self) -> None:
        self._closing = True
        # wake the thread with a no-op
        self._call(bool)
        self._thread.join(_CLOSE_S)

    # ------------------------------------------------------------ in the event loop

    def _call(self, call: Callable[[], object]) -> None:
        self._calls.put(call)
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def _receive(self, peer: _Peer, message: FileRequest, parts: Sequence[bytes]) -> None:
        if (client := peer.client) is None or peer.is_closed or self._of_client.get(client) is not peer:
            return
        if not message.request or message.request in peer.requests:
            # request numbers must be nonzero and unique, otherwise replies would be ambiguous
            self.cut(client)
            return
        peer.requests.add(message.request)
        self._on_request(client, message, parts)

    def _on_connected(self, peer: _Peer, client: ConnectedClient) -> None:
        """Assign a connection to the client whose token it has sent; it replaces an earlier one."""
        earlier = self._of_client.get(client)
        self._of_client[client] = peer
        if earlier is not None:
            self._call(lambda: self._end(earlier))

    def _went(self, peer: _Peer) -> None:
        if peer.client is not None and self._of_client.get(peer.client) is peer:
            del self._of_client[peer.client]

    # ------------------------------------------------------------ in the thread

    def _work(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:  # noqa: BLE001
            # from now on file data is sent over the links
            write_log("a fault in thread sgpu-bulk: ", error)
        finally:
            for peer in list(self._peers.values()):
                self._end(peer)
            for each in (self._listener, self._wake, self._waker):
                each.close()

    def _turn(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        now = time.monotonic()
        if self._accepted != (int(now), _ACCEPTED_PER_S):
            poller.register(self._listener, select.POLLIN)
        waiting = False
        for descriptor, peer in self._peers.items():
            poller.register(descriptor, peer.stream.events(reads=peer.room > 0))
            waiting |= peer.room > 0 and peer.stream.has_more
        ready = dict(poller.poll(0 if waiting else _TICK_MS))
        if self._wake.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake.recv(4096)
            with contextlib.suppress(queue.Empty):
                while True:
                    self._calls.get_nowait()()
        if self._listener.fileno() in ready:
            self._accept(now)
        for descriptor, peer in list(self._peers.items()):
            if ready.get(descriptor, 0) & _OVER and not peer.room:
                # the connection has ended, which goes unnoticed because it is not being read
                self._end(peer)
            elif descriptor in ready or peer.stream.has_more:
                self._exchange(peer)
        self._end_strangers(now)

    def _accept(self, now: float) -> None:
        second, count = self._accepted
        self._accepted = (int(now), count + 1 if second == int(now) else 1)
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            stream = BulkStream(connection, self._context)
            stream.most_bytes = _GREETING_BYTES
            self._peers[stream.fileno()] = _Peer(stream, now)

    def _end_strangers(self, now: float) -> None:
        strangers = [peer for peer in self._peers.values() if peer.client is None]
        for number, peer in enumerate(strangers):
            if len(strangers) - number > MOST_UNKNOWN or now - peer.since > GREETING_S:
                self._end(peer)

    def _exchange(self, peer: _Peer) -> None:
        if peer.is_closed:
            return
        try:
            for parts in peer.stream.turn(peer.room):
                message = codec.to_bulk.decode(parts[0])
                if isinstance(message, OpenBulk):
                    self._greet(peer, message.token)
                elif peer.client is None:
                    raise ConnectionError("no token")
                else:
                    peer.open += 1
                    self._loop.call_soon_threadsafe(self._receive, peer, message, parts[1:])
        except (OSError, ValueError, MemoryError, RuntimeError):
            # the connection has ended, its data is not our protocol or too large, or the loop is closed
            self._end(peer)

    def _greet(self, peer: _Peer, token: str) -> None:
        """Check a connection's token.

        Raises:
            ConnectionError: It is not valid, or the connection already has a client.
        """
        with self._lock:
            client, until = self._tokens.pop(_digest(token), (None, 0.0))
        if client is None or time.monotonic() > until or peer.client is not None:
            raise ConnectionError("no valid token")
        peer.client = client
        peer.stream.most_bytes = MAX_PART_BYTES
        # must be scheduled before the client's first request
        self._loop.call_soon_threadsafe(self._on_connected, peer, client)
        peer.stream.put([codec.encode(BulkOpened())])

    def _reply(self, peer: _Peer, parts: Sequence[bytes]) -> None:
        if not peer.is_closed:
            peer.open -= 1
            peer.stream.put(parts)
            self._exchange(peer)

    def _end(self, peer: _Peer) -> None:
        if not peer.is_closed:
            peer.is_closed = True
            self._peers.pop(peer.stream.fileno(), None)
            peer.stream.close()
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._went, peer)


def _digest(token: str) -> bytes:
    # look up a digest, so that the time of the lookup reveals nothing about the token
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def _listener(link: str, port: int) -> socket.socket:
    """Return a listening socket at the address of the link, on the given port, the link's + 1000, or any."""
    url = urlsplit(link)
    host = url.hostname or ""
    if port:
        return _bound(host, port)
    # a predictable port, for firewall rules; not the adjacent one, where another pool may listen
    try:
        return _bound(host, (url.port or 0) + _PORTS_BETWEEN)
    except (OSError, OverflowError):
        return _bound(host, 0)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, backlog=MOST_UNKNOWN, dualstack_ipv6=both)
