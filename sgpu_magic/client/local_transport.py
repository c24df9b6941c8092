"""The queues of a link's thread, and the transport to the local pool's socket.

ZeroMQ's sockets hide a peer's death, so the transport also watches its monitor, which reports the connection's end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from sgpu_magic.client.send_queue import SendQueue
from sgpu_magic.errors import PoolError
from sgpu_magic.wire.files import CHUNK_BYTES

if TYPE_CHECKING:
    from sgpu_magic.client.link import PoolLink

_LINGER_MS = 200

# ---------------------------------------------------------------- queues to and from the link's thread

OnNotice = Callable[[str], None]
"""Takes a sentence for the user, "" to withdraw the last one."""


# ---------------------------------------------------------------- transport to the local pool


class LocalTransport:
    """Transport to the local pool. `carry` runs in the link's thread; the rest is thread-safe.

    Args:
        path: The pool's socket.
        pid: The pool's process id, for messages.

    Attributes:
        title: The pool's name for use in messages.
        says_hello: Whether the wire itself sends the greeting, on each connection that it makes.
        silent_s: Seconds since the pool last sent anything; 0 until the silence is long enough to report.
        chunk_bytes: Size of the chunks of file data.
        slow_why: Why file data takes a slower way than it could; "" if it does not.
    """

    says_hello = False
    silent_s = 0.0
    chunk_bytes = CHUNK_BYTES
    slow_why = ""

    def __init__(self, path: Path, pid: int) -> None:
        self._path = path
        self.title = f"the local pool (process {pid})"

    def lost(self) -> str:
        """Return the error message for a pool that ended while a request was pending."""
        return (
            f"{self.title} ended. Run the cell again: the next run starts a new pool; `sgpu doctor` "
            "looks for the reason."
        )

    def mute(self) -> PoolError:
        """Return the error for a pool that does not answer at all."""
        return PoolError(
            f"{self.title} does not answer. End it with `sgpu pool stop --force`; the next run starts a new one."
        )

    def answered(self, request: int) -> None:
        """Note that a request was answered; called in the link's thread. A no-op here: nothing is resent."""

    def carry(self, outgoing: SendQueue, link: PoolLink) -> None:
        """Transport messages until `outgoing` ends or the connection does, as it does when the pool's process exits."""
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = _LINGER_MS
        dealer.sndhwm = dealer.rcvhwm = 0
        # ZeroMQ would silently reconnect to whatever listens at the path by then
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        dealer.connect(f"ipc://{self._path}")
        poller = zmq.Poller()
        for waits in (dealer, outgoing.fileno(), monitor):
            poller.register(waits, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if monitor in ready:
                    self._receive(dealer, link)
                    return
                if outgoing.fileno() in ready:
                    for message in outgoing.take():
                        dealer.send_multipart(message.parts, copy=True)
                    if outgoing.closed:
                        return
                if dealer in ready:
                    self._receive(dealer, link)
        except OSError:
            return
        finally:
            dealer.disable_monitor()
            monitor.close(0)
            dealer.close()
            context.term()

    def _receive(self, dealer: zmq.Socket[bytes], link: PoolLink) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                link.received(dealer.recv_multipart(zmq.NOBLOCK, copy=True))
