"""What the pool service asks of an engine: get nodes, start runs on them, end them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sgpu_magic.protocol.messages import Warm
from sgpu_magic.protocol.node_messages import HeldRun, Launch, RunEvent
from sgpu_magic.protocol.records import Inventory, RankStack
from sgpu_magic.protocol.states import RunState


class LeaseUnavailable(Exception):
    """The engine could not take the devices that the scheduler granted.

    Args:
        uuids: The ones in the way.
        why: A sentence.
    """

    def __init__(self, uuids: tuple[str, ...], why: str) -> None:
        super().__init__(why)
        self.uuids = uuids
        self.why = why


class EngineListener(Protocol):
    """The pool service."""

    def node_found(self, inventory: Inventory, held: Sequence[HeldRun]) -> None:
        """A node is there; it holds these runs of an earlier service. Answer each with `adopt`."""
        ...

    def inventory_taken(self, inventory: Inventory) -> None: ...
    def run_happened(self, event: RunEvent, frames: Sequence[bytes]) -> None: ...
    def ranks_gone(self, run_id: str) -> None: ...
    def stacks_taken(self, request: int, stacks: tuple[RankStack, ...]) -> None: ...

    def nodes_lost(self, why: str) -> None:
        """All ranks died with their agent; another one takes launches from now on."""
        ...

    def broken(self, why: str) -> None:
        """No agent can be kept alive."""
        ...


class Engine(Protocol):
    """One contract for every backend."""

    def start(self, listener: EngineListener) -> None:
        """Begin to listen to what the nodes say."""
        ...

    def warm(self, order: Warm) -> None: ...
    def take_inventory(self) -> None: ...

    def launch(self, launch: Launch, frames: Sequence[bytes]) -> None:
        """Take the lease's devices and start the ranks.

        Raises:
            LeaseUnavailable: A device is in use outside the pool.
        """
        ...

    def adopt(self, run_id: str, number: int) -> None:
        """Take a held run over; its events up to `number` are kept already."""
        ...

    def events_kept(self, run_id: str, number: int) -> None: ...
    def detach_run(self, run_id: str) -> None: ...
    def take_stacks(self, request: int, run_id: str) -> None: ...
    def end_run(self, run_id: str, state: RunState, reason: str) -> None: ...
    def reclaim_payload(self, run_id: str) -> None: ...
    def results_received(self, run_id: str) -> None: ...

    def close(self) -> None:
        """End every rank and give the nodes back."""
        ...
