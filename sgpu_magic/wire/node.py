"""Messages between the pool service and its nodes' agents. Descriptors of device locks are sent along."""

from __future__ import annotations

from sgpu_magic.wire.attachments import CodeBundle, Environment, Payload, Upload
from sgpu_magic.wire.base import Numbered, OfRun, Record, RunLimit, RunState
from sgpu_magic.wire.client import ReclaimPayload, ResultsReceived, SendComms
from sgpu_magic.wire.devices import Inventory, Lease
from sgpu_magic.wire.events import EventBody
from sgpu_magic.wire.files import FromStream, NodeFileReply, NodeFileRequest, RunFile, ToStream
from sgpu_magic.wire.option_text import Text
from sgpu_magic.wire.rank_events import RankStack
from sgpu_magic.wire.run import Interpreter, RankAnswer, RankContext, RankQuestion, RunSpec
from sgpu_magic.wire.tracking import TrackedRun, Tracking


class WarmZygote(Record, frozen=True, tag="warm-zygote", kw_only=True):
    """Start an interpreter's zygote, and a standby group of `ranks` ranks (0 for none)."""

    interpreter: Interpreter
    ranks: int = 0


class NodePart(Record, frozen=True, kw_only=True):
    """A node's part of a multi-node run.

    Args:
        index: Index of the node among the run's nodes: torchrun's `GROUP_RANK`.
        nodes: Number of nodes.
        first_rank: Global rank of the node's first rank.
        ranks: Number of ranks on the node: `LOCAL_WORLD_SIZE`.
        address: Address at which the other nodes reach this one.
    """

    index: int
    nodes: int
    first_rank: int
    ranks: int
    address: str


class Launch(Record, frozen=True, tag="launch", kw_only=True):
    """Start a run's ranks on this node. An inline payload is the first raw frame.

    For a session (`spec.kind`), the ranks are started and stay. For a run in a session (`spec.in_session`), the
    session's ranks execute it, and the lease is the session's.

    Args:
        attempt: 0, incremented each time the group is started again; also torchrun's restart count.
        number: Number of the run's newest event so far; the agent's next event has the following number.
        locks: Number of descriptors sent along: the device locks, held until the ranks are gone.
        environment: As in `Submit`.
        code: As in `Submit`.
        tracking: As in `Submit`; an agent that outlives its pool service passes it to the next one.
        part: The node's part of a multi-node run; None if the whole run is on this node.
        store: Name of the user's blob store at the pool; "" if no blobs are needed.
        far: The node is not the pool's machine: it cannot access `run_dir` and the store. It reads blobs with
            `FetchBlob` and sends the run's files with `StoreRunFile`.
        checkpoints: Files that earlier attempts left in the run's directory at the pool. A node that is `far` fetches
            them by `FetchRunFile` before its ranks start.
        uploads: As in `Submit`.
        over_line: The cell came over its session's line, and the agent has made this message of it.
    """

    spec: RunSpec
    interpreter: Interpreter
    context: RankContext
    payload: Payload
    lease: Lease
    run_dir: str
    attempt: int = 0
    number: int = 0
    locks: int = 0
    environment: Environment | None = None
    code: tuple[CodeBundle, ...] = ()
    tracking: Tracking | None = None
    part: NodePart | None = None
    store: str = ""
    far: bool = False
    uploads: tuple[Upload, ...] = ()
    checkpoints: tuple[RunFile, ...] = ()
    over_line: bool = False


class BuildEnvironment(OfRun, frozen=True, tag="build-environment", kw_only=True):
    """A queued run will need this environment: start building it, if this node has to build it."""

    interpreter: Interpreter
    environment: Environment


class TrackingKnown(OfRun, frozen=True, tag="tracking-known", kw_only=True):
    """The run's MLflow run. None if there is none; `problem` says why."""

    tracked: TrackedRun | None = None
    problem: str | None = None


class MasterKnown(OfRun, frozen=True, tag="master-known", kw_only=True):
    """The rendezvous address of a multi-node run, on the node of rank 0."""

    address: str
    port: int


class PeerFailed(OfRun, frozen=True, tag="peer-failed", kw_only=True):
    """A rank of the run failed on another node: release the ranks that wait for it in a collective."""


class PartsEnded(OfRun, frozen=True, tag="parts-over", kw_only=True):
    """Every node's part of the run has ended: the ranks may exit."""


class EndRun(OfRun, frozen=True, tag="end-run", kw_only=True):
    """Stop this run's ranks. `state` is the run's final state; `limit` is the limit that was reached, if any."""

    state: RunState
    reason: Text
    limit: RunLimit | None = None


class KillRanks(OfRun, frozen=True, tag="kill-ranks", kw_only=True):
    """KILL the ranks that `EndRun` has not stopped."""


class RestartSessionRanks(Numbered, frozen=True, tag="restart-session-ranks", kw_only=True):
    """Replace ranks of a session (all if empty) with new processes. Answered by `SessionRanksRestarted`."""

    session: str
    ranks: tuple[int, ...] = ()


class Question(Numbered, frozen=True, tag="question", kw_only=True):
    """Ask a rank of a session. Answered by `Answered`, at once if the rank is busy."""

    session: str
    question: RankQuestion


class OfferLine(Record, frozen=True, tag="offer-line", kw_only=True):
    """Admit one connection that presents this token: its cells are the session's (`wire.session_line`)."""

    session: str
    token: bytes


class TakeInventory(Record, frozen=True, tag="take-inventory", kw_only=True):
    """Query the node's devices again. Answered by `InventoryTaken`."""


class TakeStacks(Numbered, frozen=True, tag="take-stacks", kw_only=True):
    """Take the stack of each of the run's ranks. Answered by `StacksTaken`."""

    run_id: str


class EventsKept(OfRun, frozen=True, tag="events-kept", kw_only=True):
    """The pool service has stored the run's events up to `number`: the agent need not send them again."""

    number: int


class Adopt(OfRun, frozen=True, tag="adopt", kw_only=True):
    """A new pool service takes over the run: resend its events after `number`, then continue."""

    number: int


class DetachRun(OfRun, frozen=True, tag="detach-run", kw_only=True):
    """The run was detached: it continues after its notebook exits."""


class EndAgent(Record, frozen=True, tag="end-agent", kw_only=True):
    """Stop every run by its stop path, with its grace, and exit.

    Without this message, an agent whose pool service is gone waits for the next one.
    """


class RelaySignal(Record, frozen=True, tag="relay-signal", kw_only=True):
    """Send a signal to the ranks that handle it. The pool service has received it."""

    number: int


StartOrder = WarmZygote | Launch | BuildEnvironment
RanksOrder = TrackingKnown | MasterKnown | PeerFailed | PartsEnded | EndRun | KillRanks
SessionOrder = RestartSessionRanks | Question | OfferLine
ClientNews = ReclaimPayload | ResultsReceived
PoolOrder = TakeInventory | TakeStacks | EventsKept | Adopt | DetachRun | SendComms
ToAgent = (
    StartOrder | RanksOrder | SessionOrder | ClientNews | PoolOrder | NodeFileReply | ToStream | EndAgent | RelaySignal
)


class HeldRun(Record, frozen=True, kw_only=True):
    """A run that an agent holds when a pool service connects.

    Args:
        launch: The `Launch` message, without raw frames.
        state: `PREPARING` or later; a final state once `RunEnded` was sent.
        started_s: Seconds since its launch.
        have_ranks_exited: Its ranks are gone; only events, or results that have not been fetched, remain.
        locks: Number of device-lock descriptors sent along for it.
    """

    launch: Launch
    state: RunState
    started_s: float
    have_ranks_exited: bool = False
    locks: int = 0


class AgentReady(Record, frozen=True, tag="agent-ready", kw_only=True):
    """The first message of an agent to a pool service.

    Args:
        runs: Runs that it holds from an earlier service.
    """

    pid: int
    protocol_version: int
    inventory: Inventory
    runs: tuple[HeldRun, ...] = ()


class InventoryTaken(Record, frozen=True, tag="inventory-taken", kw_only=True):
    """The node's devices, sent on request and after a change."""

    inventory: Inventory


class CellTaken(Record, frozen=True, tag="cell-taken", kw_only=True):
    """The agent got this cell over its session's line and has started it. The cell's events follow.

    Args:
        launch: What it made of the submission, as `Launch` for a cell that comes from the pool.
        started_s: Seconds since then.
    """

    launch: Launch
    started_s: float


class RunEvent(OfRun, frozen=True, tag="run-event", kw_only=True):
    """An event of a run on this node, for the pool service to store.

    Args:
        number: 1, 2, 3 ... per run, counted by the agent.
        part: Index of the node among the run's nodes.
        joined: As in `Event`; never set by an agent.
    """

    number: int
    at: float
    body: EventBody
    part: int = 0
    joined: tuple[tuple[int, int], ...] = ()


class PartEnded(OfRun, frozen=True, tag="part-ended", kw_only=True):
    """This node's part of a multi-node run has ended. `RunEnded` follows once the results are at the pool."""


class DevicesFree(OfRun, frozen=True, tag="devices-free", kw_only=True):
    """Every process of the run is dead and reaped; files of it are still being sent to the pool.

    `RanksGone` follows when they have arrived; `RunEnded` may come in between. Not sent for runs in a session.
    """


class RanksGone(OfRun, frozen=True, tag="ranks-gone", kw_only=True):
    """Every process of the run is dead and reaped, and nothing more of it will arrive: its lease is free.

    For a run in a session: its ranks are idle again and can execute the next cell.
    """


class StacksTaken(Numbered, frozen=True, tag="stacks-taken", kw_only=True):
    """Where each of the run's ranks on this node is."""

    run_id: str
    stacks: tuple[RankStack, ...]


class SessionRanksRestarted(Numbered, frozen=True, tag="session-ranks-restarted", kw_only=True):
    """The new ranks have joined. `problem` says why they have not; None if they have."""

    session: str
    problem: str | None = None


class Answered(Numbered, frozen=True, tag="answered", kw_only=True):
    """A rank's answer to `Question`."""

    answer: RankAnswer


class MasterBound(OfRun, frozen=True, tag="master-bound", kw_only=True):
    """This node's ranks of a multi-node run are ready for the rendezvous. All nodes then get `MasterKnown`.

    Args:
        address: Address where the node of rank 0 listens for the others; "" from other nodes.
        port: Port of that address; 0 from other nodes.
    """

    address: str
    port: int


class TrackingAsked(OfRun, frozen=True, tag="tracking-asked", kw_only=True):
    """A rank's own code uses MLflow and waits for the run's MLflow run. Answered by `TrackingKnown`."""


RanksReport = RunEvent | PartEnded | DevicesFree | RanksGone
AgentReply = StacksTaken | SessionRanksRestarted | Answered
RanksRequest = TrackingAsked | MasterBound
RunsReport = AgentReady | CellTaken | RanksReport
FromAgent = RunsReport | InventoryTaken | AgentReply | RanksRequest | NodeFileRequest | FromStream
