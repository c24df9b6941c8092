"""The transport to the local pool's socket.

ZeroMQ's sockets hide a peer's death, so the transport also watches its monitor, which reports the connection's end.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import zmq

from sgpu_magic.client.send_queue import SendQueue
from sgpu_magic.client.transport import LinkEnd, Transport
from sgpu_magic.errors import PoolError

_LINGER_MS = 200


class LocalTransport(Transport):
    """Transport to the local pool. Its connection ends when the pool's process exits.

    Args:
        path: The pool's socket.
        pid: The pool's process id, for messages.
    """

    is_network = False

    def __init__(self, path: Path, pid: int) -> None:
        self._path = path
        self.title = f"the local pool (process {pid})"

    def lost_message(self) -> str:
        return (
            f"{self.title} ended. Run the cell again: the next run starts a new pool; `sgpu doctor` "
            "looks for the reason."
        )

    def mute(self) -> PoolError:
        return PoolError(
            f"{self.title} does not answer. End it with `sgpu pool stop --force`; the next run starts a new one."
        )

    def answered(self, request: int) -> None:
        # nothing is resent here
        pass

    def carry(self, outgoing: SendQueue, link: LinkEnd) -> None:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = _LINGER_MS
        dealer.sndhwm = dealer.rcvhwm = 0
        # ZeroMQ would silently reconnect to another pool that listens at the path
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
                    for message in outgoing.drain():
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

    def _receive(self, dealer: zmq.Socket[bytes], link: LinkEnd) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                link.received(dealer.recv_multipart(zmq.NOBLOCK, copy=True))
