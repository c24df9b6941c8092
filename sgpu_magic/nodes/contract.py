"""What the pool service asks of an engine: get nodes, start runs on them, end them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sgpu_magic.wire.attachments import Environment
from sgpu_magic.wire.client import TellComms, Warm
from sgpu_magic.wire.devices import Inventory, Lease
from sgpu_magic.wire.failures import RankStack
from sgpu_magic.wire.node import HeldRun, Launch, RunEvent, ToAgent
from sgpu_magic.wire.rank import RankAnswer, RankQuestion
from sgpu_magic.wire.run import Interpreter
from sgpu_magic.wire.states import RunState
from sgpu_magic.wire.tcp_streams import OpenStream, StreamMessage, StreamOpened
from sgpu_magic.wire.tracking import TrackedRun


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

    def forwarded(self, message: StreamOpened | StreamMessage, frames: Sequence[bytes]) -> None:
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


class Engine(Protocol):
    """One contract for every backend.

    Attributes:
        far: Its nodes do not see the files and the memory of the pool's machine.
    """

    far: bool

    def start(self, listener: EngineListener) -> None:
        """Begin to listen to what the nodes say."""
        ...

    def warm(self, order: Warm) -> None: ...
    def take_inventory(self) -> None: ...

    def prepare(self, run_id: str, interpreter: Interpreter, environment: Environment) -> None:
        """A run that waits will need this environment: begin to build it where it has to be built."""
        ...

    def builds(self, interpreter: Interpreter, environment: Environment) -> bool:
        """Whether the nodes build this environment; else the kernel's own interpreter is used there."""
        ...

    def tracking_known(self, run_id: str, tracked: TrackedRun | None, problem: str) -> None:
        """Tell a run's ranks its place in MLflow, or that it has none and why."""
        ...

    def launch(self, launch: Launch, frames: Sequence[bytes]) -> None:
        """Take the lease's devices and start the ranks; those of a run in a session are the session's already.

        The lease is a proposal: answered by `EngineListener.lease_granted` or `lease_refused`.
        """
        ...

    def adopt(self, run_id: str, numbers: Mapping[int, int]) -> None:
        """Take a held run over.

        Args:
            numbers: By part (0 where the run has only one) the number of the newest event that is kept already.
        """
        ...

    def events_kept(self, run_id: str, numbers: Mapping[int, int]) -> None:
        """Events are on disk. `numbers` as in `adopt`."""
        ...

    def detach_run(self, run_id: str) -> None: ...
    def take_stacks(self, request: int, run_id: str) -> None: ...
    def end_run(self, run_id: str, state: RunState, reason: str) -> None: ...

    def kill_ranks(self, run_id: str) -> None:
        """KILL the ranks that `end_run` has not stopped."""
        ...

    def restart_session_ranks(self, request: int, session: str, ranks: tuple[int, ...]) -> None:
        """Replace ranks of a session by new processes, all of them when `ranks` is empty."""
        ...

    def ask_rank(self, request: int, session: str, question: RankQuestion) -> None:
        """Ask an idle rank of a session."""
        ...

    def tell_comms(self, message: TellComms, frames: Sequence[bytes]) -> None:
        """Pass on what a front end says to widgets of a rank."""
        ...

    def forward(self, run_id: str, rank: int, message: OpenStream | StreamMessage, frames: Sequence[bytes]) -> None:
        """Pass on what a client says of a stream to the node of a run's rank; answered by `forwarded`."""
        ...

    def give_back(self, run_id: str) -> None:
        """The run, of which `devices_free` was said, needs its devices no more."""
        ...

    def reclaim_payload(self, run_id: str) -> None: ...
    def results_received(self, run_id: str) -> None: ...

    def close(self) -> None:
        """End every rank and give the nodes back."""
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
