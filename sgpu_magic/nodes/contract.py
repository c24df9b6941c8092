"""The interfaces of an engine: what it reports to the pool service, and its channel to a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sgpu_magic.wire.devices import Inventory, Lease
from sgpu_magic.wire.files import FromStream
from sgpu_magic.wire.node import HeldRun, RunEvent, ToAgent
from sgpu_magic.wire.rank_events import RankStack
from sgpu_magic.wire.run import RankAnswer


class EngineListener(Protocol):
    """The pool service, as an engine sees it."""

    def node_found(self, inventory: Inventory, held: Sequence[HeldRun]) -> None:
        """The nodes are known. Answer each run that they hold from an earlier service with `adopt`."""
        ...

    def inventory_taken(self, inventory: Inventory) -> None: ...
    def run_happened(self, event: RunEvent, frames: Sequence[bytes]) -> None: ...

    def devices_free(self, run_id: str) -> None:
        """All processes of the run have exited, but files are still being transferred: `ranks_gone` follows.

        May be called repeatedly. Answer with `Engine.give_back` if the run does not need the devices again.
        """
        ...

    def ranks_gone(self, run_id: str) -> None:
        """All processes of the run have exited on every node, and its files have arrived."""
        ...

    def stacks_taken(self, request: int, stacks: tuple[RankStack, ...]) -> None: ...

    def session_ranks_restarted(self, request: int, session: str, problem: str) -> None:
        """The new ranks have joined the session; otherwise `problem` says why not ("" on success)."""
        ...

    def answered(self, request: int, answer: RankAnswer) -> None: ...

    def forwarded(self, message: FromStream, frames: Sequence[bytes]) -> None:
        """A node sent a message of a stream that `Engine.forward` opened there."""
        ...

    def tracking_asked(self, run_id: str) -> None:
        """A rank waits for the run's MLflow target. Answer with `Engine.tracking_known`."""
        ...

    def lease_granted(self, run_id: str, lease: Lease) -> None:
        """The engine acquired devices for the run, maybe others than the scheduler proposed. Its ranks start."""
        ...

    def lease_refused(self, run_id: str, uuids: tuple[str, ...], why: str) -> None:
        """The engine can't acquire the devices.

        Args:
            uuids: The devices that are unavailable.
            why: The reason, a sentence.
        """
        ...

    def runs_lost(self, run_ids: Sequence[str], why: str, host: str) -> None:
        """A node died or is unreachable for good, so these runs lost all or some of their ranks.

        Their ranks on other nodes are being ended: `ranks_gone` of each run follows.

        Args:
            run_ids: The runs.
            why: A sentence that names the node, without a full stop.
            host: The node's host name.
        """
        ...

    def nodes_lost(self, why: str) -> None:
        """All ranks died with their agent. A new agent accepts launches from now on."""
        ...

    def broken(self, why: str) -> None:
        """The engine has failed: no agent stays alive, or the cluster can't be reached."""
        ...


class NodeChannel(Protocol):
    """A link to an agent. Messages sent while it is interrupted are lost; the engine resends what matters."""

    node: str
    """The node's id, as in `NodeShare.node`."""

    def send(self, message: ToAgent, frames: Sequence[bytes] = ()) -> None:
        """Send a message, or do nothing if the link is closed."""
        ...

    def close(self) -> None:
        """Close the link."""
        ...
