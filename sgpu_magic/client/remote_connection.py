"""One TCP connection to a pool of another machine, and why there is none."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from sgpu_magic.client.outgoing import Outgoing
from sgpu_magic.errors import KeyRefused, PoolError
from sgpu_magic.system.secure_sockets import Endpoint, KeyPair, secure_client

_MADE_S = 6.0
_LOOK_MS = 100
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_OVER = (zmq.Event.DISCONNECTED, zmq.Event.CLOSED)
_NOT_OURS = (zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, zmq.Event.HANDSHAKE_FAILED_PROTOCOL)


class RemoteConnection:
    """Used by the link's thread.

    Args:
        context: ZeroMQ's.
        name: The pool's name.
        endpoint: Where it listens, and its key.
        own: This user's keys.
        proven: The pool has shown its key before: what goes wrong now is the network.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], name: str, endpoint: Endpoint, own: KeyPair, *, proven: bool
    ) -> None:
        self._context = context
        self._name = name
        self._endpoint = endpoint
        self._own = own
        self._proven = proven
        self._dealer: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    def make(self, is_over: Callable[[], bool]) -> None:
        """Connect, and prove to each other who we are.

        Args:
            is_over: Asked every tenth of a second whether to break off.

        Raises:
            KeyRefused: The pool does not admit us, or is not the one whose key we have.
            PoolError: Nothing answers there.
        """
        problem: PoolError | None = None
        for address in self._addresses():
            self._open(address)
            problem = self._problem(address, is_over)
            if problem is None or isinstance(problem, KeyRefused):
                break
        if problem is not None:
            raise problem

    def send(self, parts: Sequence[bytes]) -> None:
        """Send, unless the connection is gone: what is not answered is sent again on the next one."""
        if self._dealer is not None:
            try:
                self._dealer.send_multipart(parts, zmq.NOBLOCK, copy=True)
            except zmq.Again:
                return

    def received(self) -> Iterator[list[bytes]]:
        while self._dealer is not None:
            try:
                yield self._dealer.recv_multipart(zmq.NOBLOCK, copy=True)
            except zmq.Again:
                return

    def wait(self, outgoing: Outgoing, timeout_ms: int) -> tuple[bool, bool]:
        """Wait until there is something to do. Returns whether the connection lives, and has something to read."""
        dealer, monitor = self._dealer, self._monitor
        if dealer is None or monitor is None:
            return False, False
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        poller.register(outgoing.fileno(), zmq.POLLIN)
        ready = dict(poller.poll(timeout_ms))
        alive = True
        while monitor.poll(0):
            alive &= recv_monitor_message(monitor)["event"] not in _OVER
        return alive, dealer in ready

    def close(self, linger_ms: int = 0) -> None:
        """Close; `linger_ms` is how long what was sent may still take."""
        dealer, monitor, self._dealer, self._monitor = self._dealer, self._monitor, None, None
        if dealer is not None:
            dealer.disable_monitor()
            dealer.close(linger_ms)
        if monitor is not None:
            monitor.close(0)

    # ------------------------------------------------------------ within

    def _addresses(self) -> list[str]:
        """Look the name up here, where a failure can be told: ZeroMQ would be silent."""
        place = urlsplit(self._endpoint.address)
        host, port = place.hostname or "", place.port or 0
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise PoolError(
                f"the pool {self._name} can't be reached: this machine can't find the address of {host!r} "
                f"({error.strerror}). Look at the name in `sgpu pool list`, and whether the network or VPN is up."
            ) from None
        numeric = [str(entry[4][0]) for entry in found]
        return [f"tcp://[{each}]:{port}" if ":" in each else f"tcp://{each}:{port}" for each in dict.fromkeys(numeric)]

    def _open(self, address: str) -> None:
        self.close()
        self._dealer = dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 0
        # what is under way is bounded by who sends
        dealer.sndhwm = dealer.rcvhwm = 0
        secure_client(dealer, self._endpoint, self._own)
        self._monitor = dealer.get_monitor_socket(_EVENTS)
        dealer.connect(address)

    def _problem(self, address: str, is_over: Callable[[], bool]) -> PoolError | None:
        """Wait for the handshake. None when it is done."""
        monitor, until = self._monitor, time.monotonic() + _MADE_S
        connected = False
        while monitor is not None and time.monotonic() < until and not is_over():
            if not monitor.poll(_LOOK_MS):
                continue
            told = recv_monitor_message(monitor)
            event = told["event"]
            if event == zmq.Event.CONNECTED:
                connected = True
            elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                return None
            elif event == zmq.Event.HANDSHAKE_FAILED_AUTH:
                return KeyRefused(
                    f"the pool {self._name} does not admit your key. Send your public key\n    {self._own.public}\n"
                    f"to who runs the pool: they let you in with `sgpu pool authorize NAME 'KEY'`."
                )
            elif event in _NOT_OURS and not self._proven and told["value"] != errno.EAGAIN:
                return KeyRefused(
                    f"what listens at {self._endpoint.address} is not the pool {self._name} whose key you have: it "
                    "could not prove that. Ask who runs the pool for its address and key, which `sgpu pool serve` "
                    f"prints; then `sgpu pool remove {self._name}` and `sgpu pool add {self._name} ADDRESS --key KEY`."
                )
            elif event in _NOT_OURS or event in _OVER:
                break
        if connected:
            return PoolError(
                f"the pool {self._name} can't be reached: something listens at {self._endpoint.address}, but does not "
                "answer as a pool in time. Try again, and ask who runs the pool to look at its log."
            )
        where = self._endpoint.address if address == self._endpoint.address else f"{self._endpoint.address}, {address}"
        return PoolError(
            f"the pool {self._name} can't be reached: nothing answers at {where}. Is it running there (`sgpu pool "
            "serve`), and does the network or a firewall let you through? Runs that go on there are not harmed."
        )
