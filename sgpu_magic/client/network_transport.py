"""A transport over successive connections, each of which may break.

The first message on each connection identifies the client to the pool; the client then requests what may have been
lost. Requests are resent until they are answered; the pool executes each one once.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

import zmq

from sgpu_magic.client.bulk_connection import BulkConnection
from sgpu_magic.client.send_queue import OutboundMessage, SendQueue
from sgpu_magic.client.transport import LinkEnd, Transport
from sgpu_magic.errors import KeyRefused, PoolError, PoolIdle
from sgpu_magic.wire import codec
from sgpu_magic.wire.client import Ping, Pong, Refused
from sgpu_magic.wire.files import BULK_CHUNK_BYTES, CHUNK_BYTES
from sgpu_magic.wire.pool_status import BulkOffered, Hello, Welcome

_TICK_MS = 1000
_PING_S = 3.0
# several pings, plus the time that a large frame takes on a slow line
_SILENT_S = 10.0
_WELCOME_S = 10.0
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 3.0
_LINGER_MS = 1000
# messages without a reply that are kept while there is no connection
_MOST_KEPT = 1000


class Connection(Protocol):
    """One connection to a pool. Used by the link's thread only.

    Attributes:
        address: Its numeric address, `tcp://host:port`, for a second connection to the same machine; "" without.
    """

    address: str

    def send(self, parts: Sequence[bytes]) -> None:
        """Send, or drop the message if the connection is gone: unanswered requests are resent on the next one."""
        ...

    def send_bulk(self, parts: Sequence[bytes]) -> None:
        """As `send`, for a message with file data, which others may overtake."""
        ...

    def received(self) -> Iterable[Sequence[bytes]]:
        """Return the messages that have come."""
        ...

    def wait(self, outgoing: SendQueue, bulk: BulkConnection, timeout_ms: int) -> tuple[bool, bool]:
        """Wait for an event. Returns whether the connection is alive, and whether it has something to read."""
        ...

    def close(self, linger_ms: int = 0) -> None:
        """Close the connection; unsent messages are sent for at most `linger_ms` milliseconds."""
        ...


class NetworkTransport(Transport):
    """A transport to a pool on another machine.

    Args:
        name: The pool's name in `pools.toml`.
        title: Its name for use in messages.
        hello: The greeting, sent first on each connection.
        timeout_s: Silence after which the pool counts as lost, in seconds.
        dead_s: Silence after which a connection counts as broken, where it does not notice that itself.
    """

    is_network = True

    def __init__(self, name: str, title: str, hello: Hello, timeout_s: float, dead_s: float = math.inf) -> None:
        self.title = title
        self._name = name
        self._hello = [codec.encode(hello)]
        self._timeout_s = timeout_s
        self._dead_s = dead_s
        self._service = ""
        self._received_at = self._pinged_at = time.monotonic()
        self._silent_s = 0.0
        # unanswered requests by number
        self._requests: dict[int, OutboundMessage] = {}
        self._bulk = BulkConnection(name)
        self._others: list[Sequence[bytes]] = []

    @property
    def chunk_bytes(self) -> int:
        return BULK_CHUNK_BYTES if self._bulk.is_open else CHUNK_BYTES

    @property
    def slow_why(self) -> str:
        return self._bulk.problem

    @property
    def silent_s(self) -> float:
        silent_s = time.monotonic() - self._received_at
        return silent_s if silent_s > _SILENT_S else 0.0

    def lost_message(self) -> str:
        if self._silent_s > self._timeout_s:
            return (
                f"{self.title} has been silent for {self._silent_s / 60:.0f} min, and the link is given up. By now it "
                "has cancelled all runs that were not detached; `sgpu runs` lists them when it can be reached again."
            )
        return (
            f"the link to {self.title} ended: the pool was restarted, or it no longer admits this user's key. Run the "
            "cell again."
        )

    def mute(self) -> PoolError:
        return PoolError(
            f"{self.title} does not answer, although something listens there. Ask its operator to check its log."
        )

    def answered(self, request: int) -> None:
        self._requests.pop(request, None)
        self._bulk.answered(request)

    # ------------------------------------------------------------ the link's thread

    def carry(self, outgoing: SendQueue, link: LinkEnd) -> None:
        pause_s = _FIRST_PAUSE_S
        while not outgoing.closed:
            connection: Connection | None = None
            try:
                connection = self._connected(outgoing)
                if not self._talk(connection, outgoing, link):
                    return
                pause_s = _FIRST_PAUSE_S
            except PoolError as error:
                link.failed(error)
                if not self._service or isinstance(error, KeyRefused | PoolIdle):
                    return
            finally:
                self._bulk.close()
                if connection is not None:
                    connection.close(_LINGER_MS if outgoing.closed else 0)
            self._silent_s = time.monotonic() - self._received_at
            if self._silent_s > self._timeout_s:
                return
            self._pause(outgoing, pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @abstractmethod
    def _connected(self, outgoing: SendQueue) -> Connection:
        """Connect to the pool, unless `outgoing` ends meanwhile.

        Raises:
            KeyRefused: It can't prove who it is, or does not admit this user: it is not asked again.
            PoolIdle: It has ended: it is not asked again.
            PoolError: It can't be reached now.
        """

    def _talk(self, connection: Connection, outgoing: SendQueue, link: LinkEnd) -> bool:
        """Exchange messages over one connection.

        Returns False if no further connection is to be made, because another pool service answers, the pool has been
        silent for too long, or `outgoing` has ended.

        Raises:
            PoolError: The pool does not answer the greeting, or refuses it.
        """
        connection.send(self._hello)
        began_at = time.monotonic()
        welcomed = False
        while True:
            alive, readable = connection.wait(outgoing, self._bulk, 0 if self._bulk.has_more else _TICK_MS)
            if self._bulk.turn(link.received, connection.send):
                self._received_at = time.monotonic()
            if readable:
                for parts in connection.received():
                    self._received_at = time.monotonic()
                    message = link.received(parts)
                    if isinstance(message, Welcome) and not welcomed:
                        welcomed = True
                        if self._service not in ("", message.service):
                            return False
                        self._service = message.service
                        self._bulk.port = message.bulk_port
                        self._send_again(connection, link)
                    elif isinstance(message, Refused) and not welcomed:
                        raise PoolError(f"{self.title} refuses this connection. {message.message}")
                    elif isinstance(message, BulkOffered):
                        self._bulk.offered(message, connection.address, connection.send)
                    elif isinstance(message, Pong) and message.behind:
                        self._send_again(connection, link)
            for outbound in outgoing.drain():
                self._remember(outbound)
                if welcomed and outbound.is_bulk:
                    self._bulk.send(outbound, connection.send_bulk)
                elif welcomed:
                    connection.send(outbound.parts)
                    self._others.clear()
            now = time.monotonic()
            self._silent_s = now - self._received_at
            if outgoing.closed or self._silent_s > self._timeout_s:
                return False
            if not alive or (welcomed and self._silent_s > self._dead_s):
                return True
            if not welcomed:
                if now - began_at > _WELCOME_S:
                    raise self.mute()
            elif now - self._pinged_at >= _PING_S:
                self._pinged_at = now
                connection.send([codec.encode(Ping())])

    def _send_again(self, connection: Connection, link: LinkEnd) -> None:
        """Resend pending requests and request events again, as both may have been lost with the last connection."""
        for question in link.questions_after_gap():
            connection.send([codec.encode(question)])
        wanted = link.awaited()
        self._requests = {number: message for number, message in self._requests.items() if number in wanted}
        for number in sorted(self._requests):
            if not self._bulk.carries(number):
                connection.send(self._requests[number].parts)
        self._bulk.on_reconnect([number for number, message in self._requests.items() if message.is_bulk])
        for parts in self._others:
            connection.send(parts)
        self._others.clear()

    def _has_ended(self, outgoing: SendQueue) -> bool:
        for message in outgoing.drain():
            self._remember(message)
        return outgoing.closed

    def _remember(self, message: OutboundMessage) -> None:
        if message.request:
            self._requests[message.request] = message
        elif len(self._others) < _MOST_KEPT:
            self._others.append(message.parts)

    def _pause(self, outgoing: SendQueue, pause_s: float) -> None:
        until = time.monotonic() + pause_s
        poller = zmq.Poller()
        poller.register(outgoing.fileno(), zmq.POLLIN)
        while (left_s := until - time.monotonic()) > 0 and not self._has_ended(outgoing):
            poller.poll(int(left_s * 1000) + 1)
