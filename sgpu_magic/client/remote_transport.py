"""Transport to a served pool on another machine, over TCP connections that both sides authenticate."""

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
from sgpu_magic.client.network_transport import NetworkTransport
from sgpu_magic.client.send_queue import SendQueue
from sgpu_magic.client.transport import LinkEnd
from sgpu_magic.errors import KeyRefused, PoolError
from sgpu_magic.system.secure_sockets import Endpoint, KeyPair, secure_client
from sgpu_magic.wire.pool_status import Hello

_MADE_S = 6.0
_LOOK_MS = 100
_OVER = (zmq.Event.DISCONNECTED, zmq.Event.CLOSED)
_NOT_OURS = (zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, zmq.Event.HANDSHAKE_FAILED_PROTOCOL)


class RemoteTransport(NetworkTransport):
    """Transport to a served pool.

    Args:
        name: The pool's name in `pools.toml`.
        endpoint: The pool's address and public key.
        own: The user's key pair.
        hello: The greeting, sent first on each connection.
        timeout_s: Silence after which the pool counts as lost, in seconds.
    """

    def __init__(self, name: str, endpoint: Endpoint, own: KeyPair, hello: Hello, timeout_s: float) -> None:
        super().__init__(name, f"the pool {name} ({endpoint.address})", hello, timeout_s)
        self._endpoint = endpoint
        self._own = own
        self._context: zmq.Context[zmq.Socket[bytes]]

    def carry(self, outgoing: SendQueue, link: LinkEnd) -> None:
        self._context = zmq.Context()
        try:
            super().carry(outgoing, link)
        finally:
            self._context.term()

    def _connected(self, outgoing: SendQueue) -> RemoteConnection:
        """Connect, and complete the mutual authentication.

        Raises:
            KeyRefused: The pool does not admit this user's key, or can't prove that it has its own.
            PoolError: No pool answers at the address.
        """
        problem = PoolError(f"{self.title} has no address.")
        for address in self._addresses():
            connection = RemoteConnection(self._context, self._endpoint, self._own, address)
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

    def send_bulk(self, parts: Sequence[bytes]) -> None:
        self.send(parts)

    def received(self) -> Iterator[Sequence[bytes]]:
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
