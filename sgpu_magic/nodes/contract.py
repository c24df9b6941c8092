"""What an engine tells the pool service, and what it asks of the way to a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sgpu_magic.wire.devices import Inventory, Lease
from sgpu_magic.wire.failures import RankStack
from sgpu_magic.wire.files import FromStream
from sgpu_magic.wire.node import HeldRun, RunEvent, ToAgent
from sgpu_magic.wire.rank import RankAnswer


class EngineListener(Protocol):
    """The pool service."""

    def node_found(self, inventory: Inventory, held: Sequence[HeldRun]) -> None:
        """A node is there; it holds these runs of an earlier service. Answer each with `adopt`."""
        ...

    def inventory_taken(self, inventory: Inventory) -> None: ...
    def run_happened(self, event: RunEvent, frames: Sequence[bytes]) -> None: ...

    def devices_free(self, run_id: str) -> None:
        """No process of the run is left, and files of it are still on their way: `ranks_gone` follows. May be repeated.

        Answer with `Engine.give_back` where the run does not need the devices again.
        """
        ...

    def ranks_gone(self, run_id: str) -> None:
        """Nothing of the run is left on any node."""
        ...

    def stacks_taken(self, request: int, stacks: tuple[RankStack, ...]) -> None: ...

    def session_ranks_restarted(self, request: int, session: str, problem: str) -> None:
        """The new ranks are in the session; `problem` says why not, "" when they are."""
        ...

    def answered(self, request: int, answer: RankAnswer) -> None: ...

    def forwarded(self, message: FromStream, frames: Sequence[bytes]) -> None:
        """A node says something of a stream that `Engine.forward` has opened there."""
        ...

    def tracking_asked(self, run_id: str) -> None:
        """A rank waits for the run's place in MLflow. Answer with `tracking_known`."""
        ...

    def lease_granted(self, run_id: str, lease: Lease) -> None:
        """The engine has the run's devices, which need not be those that the scheduler proposed; its ranks start."""
        ...

    def lease_refused(self, run_id: str, uuids: tuple[str, ...], why: str) -> None:
        """The engine can't have the devices.

        Args:
            uuids: The ones in the way.
            why: A sentence.
        """
        ...

    def runs_lost(self, run_ids: Sequence[str], why: str, host: str) -> None:
        """A node died, or is out of reach for good, and with it all or some ranks of these runs.

        What is left of them on other nodes is being ended: `ranks_gone` of each follows.

        Args:
            why: A sentence that names the node, without a full stop.
            host: The node's name.
        """
        ...

    def nodes_lost(self, why: str) -> None:
        """All ranks died with their agent; another one takes launches from now on."""
        ...

    def broken(self, why: str) -> None:
        """No agent can be kept alive."""
        ...


class NodeChannel(Protocol):
    """A link to an agent. What is sent while it is interrupted is lost: who comes back is told again what matters."""

    node: str
    """The node's id, as in `NodeShare.node`."""

    def send(self, message: ToAgent, frames: Sequence[bytes] = ()) -> None:
        """Send, or do nothing when the link is over."""
        ...

    def close(self) -> None:
        """End the link."""
        ...
