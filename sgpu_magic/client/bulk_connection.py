"""The second connection to a remote pool, for messages with file data. Without it they go over the link.

The pool sends the port, its certificate and a token over the link. If a firewall blocks the port or the connection
breaks, unanswered requests are sent over the link again.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import msgspec
import zmq

from sgpu_magic.client.send_queue import OutboundMessage
from sgpu_magic.system.bulk_stream import BulkStream, client_context
from sgpu_magic.wire import codec
from sgpu_magic.wire.pool_status import AskBulk, BulkOffered, BulkOpened, OpenBulk

_OPEN_S = 6.0
# after this long without any reply, pending requests are sent over the link
_SILENT_S = 30.0
_FIRST_PAUSE_S = 30.0
_LONGEST_PAUSE_S = 600.0
_MOST_MESSAGES = 16
_POLLED = ((select.POLLIN, zmq.POLLIN), (select.POLLOUT, zmq.POLLOUT))

Send = Callable[[Sequence[bytes]], None]


class BulkConnection:
    """The second connection, and the file data that is in flight. Used by the link's thread only.

    Args:
        pool: The pool's name.

    Attributes:
        problem: Why file data goes over the link although the pool has a port for it; "" if it does not.
        is_open: Whether messages go over the connection.
        sent_bytes: Bytes of the messages that were put on it.
        port: The pool's port for file data, from its welcome; 0 if it has none.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self.problem = ""
        self.is_open = False
        self.sent_bytes = 0
        self.port = 0
        self._asked_at: float | None = None
        self._retry_at = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._connecting: socket.socket | None = None
        self._offer: BulkOffered | None = None
        self._stream: BulkStream | None = None
        self._received_at = 0.0
        # pending requests by number: those sent over the link, and those of this connection
        self._over_link: set[int] = set()
        self._here: dict[int, OutboundMessage] = {}
        # messages held back until the replies over the link have arrived: chunks of a blob must arrive in order
        self._held: list[OutboundMessage] = []

    # ------------------------------------------------------------ the link

    def carries(self, request: int) -> bool:
        """Whether a request is under way over the connection."""
        return request in self._here

    def on_reconnect(self, requests: Sequence[int]) -> None:
        """Note the requests with file data that are still awaited; those not carried here went over the link again."""
        self._over_link = {number for number in requests if number not in self._here}

    def send(self, message: OutboundMessage, over_link: Send) -> None:
        """Send a request with file data over the connection if it is open, else over the link.

        If the pool has a port for file data, also ask it for a connection, unless that was tried recently.
        """
        if self.is_open:
            self._here[message.request] = message
            self._held.append(message)
            self._release()
            return
        now = time.monotonic()
        if self.port and self._asked_at is None and now >= self._retry_at:
            self._asked_at = now
            over_link([codec.encode(AskBulk())])
        self._over_link.add(message.request)
        over_link(message.parts)

    def answered(self, request: int) -> None:
        self._here.pop(request, None)
        self._over_link.discard(request)
        self._release()

    def offered(self, offer: BulkOffered, address: str, over_link: Send) -> None:
        """Connect to the port of an offer.

        Args:
            offer: What the pool offers.
            address: The link's numeric address, `tcp://host:port`.
            over_link: As for `turn`.
        """
        if self._asked_at is None or self._connecting is not None or self._stream is not None:
            return
        host = urlsplit(address).hostname or ""
        self._offer = offer
        try:
            self._connecting = connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            connection.setblocking(False)
            found = connection.connect_ex((host, offer.port))
            if found not in (0, errno.EINPROGRESS):
                raise OSError(found, os.strerror(found))
        except (OSError, OverflowError) as error:
            self._failed(_describe(error), over_link)

    def register(self, poller: zmq.Poller) -> None:
        """Add the connection to a poller."""
        if self._connecting is not None:
            poller.register(self._connecting.fileno(), zmq.POLLOUT)
        elif self._stream is not None:
            wanted = self._stream.events()
            poller.register(self._stream.fileno(), sum(flag for event, flag in _POLLED if wanted & event))

    @property
    def has_more(self) -> bool:
        """Whether `turn` has work although nothing becomes ready."""
        return self._stream is not None and self._stream.has_more

    def turn(self, received: Callable[[Sequence[bytes]], object], over_link: Send) -> bool:
        """Send and receive what is possible now.

        Args:
            received: Called with each message.
            over_link: Sends over the link what this connection did not deliver.

        Returns:
            Whether a message came.
        """
        any_received = False
        try:
            if self._connecting is not None:
                self._connected(self._connecting)
            if self._stream is not None:
                for parts in self._stream.turn(_MOST_MESSAGES):
                    any_received = True
                    if self.is_open:
                        received(parts)
                    else:
                        if not isinstance(codec.from_bulk.decode(parts[0]), BulkOpened):
                            raise ConnectionError("it did not accept the token")
                        self.is_open = True
                        self._asked_at = None
                        self._pause_s = _FIRST_PAUSE_S
                        self.problem = ""
            now = time.monotonic()
            if any_received:
                self._received_at = now
            if self._asked_at is not None and now - self._asked_at > _OPEN_S:
                raise TimeoutError(errno.ETIMEDOUT, "it does not answer")
            if self._here and not self._held and now - self._received_at > _SILENT_S:
                raise TimeoutError(errno.ETIMEDOUT, f"it has been silent for {_SILENT_S:.0f} s")
        except (OSError, ValueError, msgspec.DecodeError) as error:
            self._failed(_describe(error), over_link)
        return any_received

    def close(self) -> None:
        """Close the connection; the link repeats what was not answered."""
        for each in (self._connecting, self._stream):
            if each is not None:
                each.close()
        self._connecting = self._stream = self._asked_at = None
        self.is_open = False
        self._here.clear()
        self._held.clear()
        self._over_link.clear()

    # ------------------------------------------------------------ internals

    def _connected(self, connection: socket.socket) -> None:
        """Begin the handshake, once the TCP connection is established.

        Raises:
            OSError: It can't be established.
            ValueError: The offer is not usable.
        """
        if found := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(found, os.strerror(found))
        try:
            connection.getpeername()
        except OSError:
            # not connected yet
            return
        offer, self._offer = self._offer, None
        if offer is not None:
            self._stream = BulkStream(connection, client_context(offer.certificate), offer.certificate)
            self._connecting = None
            self._stream.put([codec.encode(OpenBulk(token=offer.token))])

    def _release(self) -> None:
        """Send the held messages once no file data is in flight over the link."""
        if self._held and not self._over_link and self._stream is not None:
            if len(self._held) == len(self._here):
                # no request was in flight on this connection, so the silence begins now
                self._received_at = time.monotonic()
            for message in self._held:
                self._stream.put(message.parts)
                self.sent_bytes += sum(map(len, message.parts))
            self._held.clear()

    def _failed(self, why: str, over_link: Send) -> None:
        begun = list(self._here.values())
        over_link_now = self._over_link | self._here.keys()
        self.close()
        self._over_link = over_link_now
        self.problem = f"port {self.port} of the pool {self._pool} can't be used: {why}"
        self._retry_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        for message in begun:
            over_link(message.parts)


def _describe(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
