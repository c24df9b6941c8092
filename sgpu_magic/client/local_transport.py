"""The transport to the local pool's socket."""

from __future__ import annotations

import contextlib
from pathlib import Path

import zmq

from sgpu_magic.client.pool_socket import PoolSocket
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
        with PoolSocket(self._path, _LINGER_MS) as pool:
            pool.dealer.rcvhwm = 0
            pool.connect()
            poller = zmq.Poller()
            for waits in (pool.dealer, outgoing.fileno(), pool.ended):
                poller.register(waits, zmq.POLLIN)
            with contextlib.suppress(OSError):
                self._exchange(pool, poller, outgoing, link)

    def _exchange(self, pool: PoolSocket, poller: zmq.Poller, outgoing: SendQueue, link: LinkEnd) -> None:
        while True:
            ready = dict(poller.poll())
            if pool.ended in ready:
                self._receive(pool.dealer, link)
                return
            if outgoing.fileno() in ready:
                for message in outgoing.drain():
                    pool.dealer.send_multipart(message.parts, copy=True)
                if outgoing.closed:
                    return
            if pool.dealer in ready:
                self._receive(pool.dealer, link)

    def _receive(self, dealer: zmq.Socket[bytes], link: LinkEnd) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                link.received(dealer.recv_multipart(zmq.NOBLOCK, copy=True))
