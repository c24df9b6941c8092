"""Transport to a pool on another machine, over connections that may break.

The first message on each TCP connection identifies the client to the pool; the client then requests what may have been
lost. Requests are resent until they are answered; the pool executes each one once.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from sgpu_magic.client.bulk_connection import BulkConnection
from sgpu_magic.client.send_queue import OutboundMessage, SendQueue
from sgpu_magic.client.transport import LinkEnd, Transport
from sgpu_magic.errors import KeyRefused, PoolError
from sgpu_magic.system.secure_sockets import Endpoint, KeyPair, secure_client
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
_MADE_S = 6.0
_LOOK_MS = 100
_OVER = (zmq.Event.DISCONNECTED, zmq.Event.CLOSED)
_NOT_OURS = (zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, zmq.Event.HANDSHAKE_FAILED_PROTOCOL)


class RemoteTransport(Transport):
    """Transport to a pool on another machine, over successive connections.

    Args:
        name: The pool's name in `pools.toml`.
        endpoint: The pool's address and public key.
        own: The user's key pair.
        hello: The greeting, sent first on each connection.
        timeout_s: Silence after which the pool counts as lost, in seconds.
    """

    is_network = True

    def __init__(self, name: str, endpoint: Endpoint, own: KeyPair, hello: Hello, timeout_s: float) -> None:
        self.title = f"the pool {name} ({endpoint.address})"
        self._name = name
        self._endpoint = endpoint
        self._own = own
        self._hello = [codec.encode(hello)]
        self._timeout_s = timeout_s
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
        context = zmq.Context()
        pause_s = _FIRST_PAUSE_S
        try:
            while not outgoing.closed:
                connection: RemoteConnection | None = None
                try:
                    connection = self._connected(context, outgoing)
                    if not self._talk(connection, outgoing, link):
                        return
                    pause_s = _FIRST_PAUSE_S
                except PoolError as error:
                    link.failed(error)
                    if not self._service or isinstance(error, KeyRefused):
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
        finally:
            context.term()

    def _talk(self, connection: RemoteConnection, outgoing: SendQueue, link: LinkEnd) -> bool:
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
                    self._bulk.send(outbound, connection.send)
                elif welcomed:
                    connection.send(outbound.parts)
                    self._others.clear()
            now = time.monotonic()
            self._silent_s = now - self._received_at
            if outgoing.closed or self._silent_s > self._timeout_s:
                return False
            if not alive:
                return True
            if not welcomed:
                if now - began_at > _WELCOME_S:
                    raise self.mute()
            elif now - self._pinged_at >= _PING_S:
                self._pinged_at = now
                connection.send([codec.encode(Ping())])

    def _send_again(self, connection: RemoteConnection, link: LinkEnd) -> None:
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

    # ------------------------------------------------------------ a connection

    def _connected(self, context: zmq.Context[zmq.Socket[bytes]], outgoing: SendQueue) -> RemoteConnection:
        """Connect, and complete the mutual authentication.

        Raises:
            KeyRefused: The pool does not admit this user's key, or can't prove that it has its own.
            PoolError: No pool answers at the address.
        """
        problem = PoolError(f"{self.title} has no address.")
        for address in self._addresses():
            connection = RemoteConnection(context, self._endpoint, self._own, address)
            try:
                found = self._problem(connection, address, outgoing)
            except BaseException:
                connection.close()
                raise
            if found is None:
                return connection
            connection.close()
            problem = found
            if isinstance(found, KeyRefused):
                break
        raise problem

    def _addresses(self) -> list[str]:
        """Resolve the host name here, because ZeroMQ would not report a failure."""
        target = urlsplit(self._endpoint.address)
        host, port = target.hostname or "", target.port or 0
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise PoolError(
                f"the pool {self._name} can't be reached: this machine can't find the address of {host!r} "
                f"({error.strerror}). Check the name in `sgpu pool list`, and whether the network or VPN is up."
            ) from None
        numeric = [str(entry[4][0]) for entry in found]
        return [f"tcp://[{each}]:{port}" if ":" in each else f"tcp://{each}:{port}" for each in dict.fromkeys(numeric)]

    def _problem(self, connection: RemoteConnection, address: str, outgoing: SendQueue) -> PoolError | None:
        """Wait for the handshake. Returns None on success, else the error."""
        until = time.monotonic() + _MADE_S
        connected = False
        while time.monotonic() < until and not self._has_ended(outgoing):
            if not connection.monitor.poll(_LOOK_MS):
                continue
            report = recv_monitor_message(connection.monitor)
            event = report["event"]
            if event == zmq.Event.CONNECTED:
                connected = True
            elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                return None
            elif event == zmq.Event.HANDSHAKE_FAILED_AUTH:
                return KeyRefused(
                    f"the pool {self._name} does not admit your key. Send your public key\n    {self._own.public}\n"
                    f"to the pool's operator, who admits you with `sgpu pool authorize NAME 'KEY'`."
                )
            elif event in _NOT_OURS and not self._service and report["value"] != errno.EAGAIN:
                return KeyRefused(
                    f"the server at {self._endpoint.address} could not prove that it is the pool {self._name} whose "
                    "key you have. Ask the pool's operator for its address and key, which `sgpu pool serve` "
                    f"prints; then `sgpu pool remove {self._name}` and `sgpu pool add {self._name} ADDRESS --key KEY`."
                )
            elif event in _NOT_OURS or event in _OVER:
                break
        if connected:
            return PoolError(
                f"the pool {self._name} can't be reached: something listens at {self._endpoint.address}, but does not "
                "answer as a pool in time. Try again, and ask the pool's operator to check its log."
            )
        where = self._endpoint.address if address == self._endpoint.address else f"{self._endpoint.address}, {address}"
        return PoolError(
            f"the pool {self._name} can't be reached: nothing answers at {where}. Is it running there (`sgpu pool "
            "serve`), and does the network or a firewall let you through? Active runs there are not affected."
        )


class RemoteConnection:
    """One connection to a pool. Used by the link's thread only.

    Args:
        context: The ZeroMQ context.
        endpoint: The pool's address and public key.
        own: The user's key pair.
        address: Numeric address to connect to.

    Attributes:
        monitor: Socket with ZeroMQ's events of the connection.
        address: The address.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, own: KeyPair, address: str) -> None:
        self.address = address
        self._dealer = dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        # no limit here: senders bound what is in flight
        dealer.sndhwm = dealer.rcvhwm = 0
        secure_client(dealer, endpoint, own)
        self.monitor = dealer.get_monitor_socket()
        dealer.connect(address)

    def send(self, parts: Sequence[bytes]) -> None:
        """Send, or drop the message if the connection is gone: unanswered requests are resent on the next one."""
        with contextlib.suppress(zmq.Again):
            self._dealer.send_multipart(parts, zmq.NOBLOCK, copy=True)

    def received(self) -> Iterator[list[bytes]]:
        with contextlib.suppress(zmq.Again):
            while True:
                yield self._dealer.recv_multipart(zmq.NOBLOCK, copy=True)

    def wait(self, outgoing: SendQueue, bulk: BulkConnection, timeout_ms: int) -> tuple[bool, bool]:
        """Wait for an event. Returns whether the connection is alive, and whether it has something to read."""
        poller = zmq.Poller()
        for each in (self._dealer, self.monitor, outgoing.fileno()):
            poller.register(each, zmq.POLLIN)
        bulk.register(poller)
        ready = dict(poller.poll(timeout_ms))
        alive = True
        while self.monitor.poll(0):
            alive &= recv_monitor_message(self.monitor)["event"] not in _OVER
        return alive, self._dealer in ready

    def close(self, linger_ms: int = 0) -> None:
        """Close the connection; unsent messages are sent for at most `linger_ms` milliseconds."""
        self._dealer.disable_monitor()
        self._dealer.close(linger_ms)
        self.monitor.close(0)
