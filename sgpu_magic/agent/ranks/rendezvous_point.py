"""Where the ranks of a run meet: on this node's loopback, or at the first node of a run of several."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from sgpu_magic.wire.node import MasterBound, MasterKnown, Part

_BACKLOG = 1024
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True, slots=True)
class RendezvousPoint:
    """What a run's ranks are told of it.

    Args:
        port: `MASTER_PORT`.
        address: `MASTER_ADDR`.
        interface: The network interface for the groups' own connections; "" leaves that to torch.
        listening: The descriptor of the listening socket, for rank 0; empty elsewhere, or when it has it.
    """

    port: int
    address: str = "127.0.0.1"
    interface: str = LOOPBACK
    listening: Sequence[int] = ()


class Rendezvous:
    """Of one part of a run of several nodes. The first node's part listens and says where; the others say that they
    are ready, as their packages may take long.

    Args:
        run_id: The run.
        part: This node's.
        say: Tells the pool service, if there is one.
        known: Called once with the point, when it is known.

    Raises:
        OSError: Nothing can listen at the node's address.
    """

    def __init__(
        self,
        run_id: str,
        part: Part,
        say: Callable[[MasterBound], None],
        known: Callable[[RendezvousPoint], None],
    ) -> None:
        self._part = part
        self._say = say
        self._known = known
        self._bound = MasterBound(run_id=run_id, address="", port=0)
        self._socket: socket.socket | None = None
        self._over = False
        if part.index == 0:
            family = socket.AF_INET6 if ":" in part.address else socket.AF_INET
            self._socket = socket.create_server((part.address, 0), family=family, backlog=_BACKLOG)
            port = self._socket.getsockname()[1]
            self._bound = MasterBound(run_id=run_id, address=part.address, port=port)

    def begin(self) -> None:
        """Say so, also to a pool service that has come since: it may be for the others that it has to know."""
        self._say(self._bound)

    def heard(self, message: MasterKnown) -> None:
        """The pool service has heard all nodes, and tells them."""
        if self._over:
            return
        self._over = True
        listening = () if self._socket is None else (self._socket.fileno(),)
        interface = interface_of(self._part.address)
        self._known(RendezvousPoint(message.port, message.address, interface, listening))
        self.close()

    def close(self) -> None:
        """Rank 0 has its own descriptor, or nobody needs one."""
        self._over = True
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def interface_of(address: str) -> str:
    """Return the interface's name, "" when none of this machine has the address."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if wanted.is_loopback:
        # all of 127.0.0.0/8 is there, whatever is written down
        return LOOPBACK
    for name, addresses in psutil.net_if_addrs().items():
        for found in addresses:
            # link-local ones end with `%eth0`
            if found.family in _FAMILIES and ipaddress.ip_address(found.address.partition("%")[0]) == wanted:
                return name
    return ""
