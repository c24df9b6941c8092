"""Commands and replies between the pool service and its nodes. Descriptors of device locks travel beside them."""

from __future__ import annotations

from sgpu_magic.wire.attachments import CodeBundle, Environment, Payload, Upload
from sgpu_magic.wire.client import ReclaimPayload, ResultsReceived, TellComms
from sgpu_magic.wire.devices import Inventory, Lease
from sgpu_magic.wire.events import EventBody
from sgpu_magic.wire.failures import RankStack
from sgpu_magic.wire.files import FromStream, NodeFileReply, NodeFileRequest, ToStream
from sgpu_magic.wire.rank import RankAnswer, RankQuestion
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.run import Interpreter, RankContext, RunSpec
from sgpu_magic.wire.states import RunState
from sgpu_magic.wire.tracking import TrackedRun, Tracking


class WarmZygote(Record, frozen=True, tag="warm-zygote", kw_only=True):
    """Start the zygote of an interpreter, and a standby group of so many ranks; 0 for none."""

    interpreter: Interpreter
    ranks: int = 0


class Part(Record, frozen=True, kw_only=True):
    """Which part of a run of several nodes a node has.

    Args:
        index: The node's number among the run's nodes: torchrun's `GROUP_RANK`.
        nodes: How many there are.
        first_rank: The global rank of the node's first rank.
        ranks: How many ranks are on the node: `LOCAL_WORLD_SIZE`.
        address: Where the other nodes reach this one.
    """

    index: int
    nodes: int
    first_rank: int
    ranks: int
    address: str


class Launch(Record, frozen=True, tag="launch", kw_only=True):
    """Start a run's ranks on this node. An inline payload is the first raw frame.

    Of a session (`spec.kind`) the ranks are started and stay; of a run in a session (`spec.in_session`) the session's
    ranks execute it, and the lease is the session's.

    Args:
        attempt: 0, and one more each time that the group is started again; also torchrun's restart count.
        number: The newest number of the run's events so far; the agent's next is one more.
        locks: Descriptors that come along: the device locks, held until the ranks are gone.
        environment: As in `Submit`.
        code: As in `Submit`.
        tracking: As in `Submit`: an agent that outlives its pool service gives it to the next one.
        part: The node's part of a run of several nodes; None where the whole run is on this one.
        store: The user's store of blobs at the pool, by its name; "" where nothing is from there.
        far: The node is not the pool's machine: `run_dir` and the store are not here. Blobs come by `FetchBlob`, and
            the run's files go by `StoreRunFile`.
        uploads: As in `Submit`.
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
    part: Part | None = None
    store: str = ""
    far: bool = False
    uploads: tuple[Upload, ...] = ()


class BuildEnvironment(Record, frozen=True, tag="build-environment", kw_only=True):
    """A run that waits will need this: begin to build it, if it has to be built here."""

    run_id: str
    interpreter: Interpreter
    environment: Environment


class TrackingKnown(Record, frozen=True, tag="tracking-known", kw_only=True):
    """The run's place in MLflow; None when there is none, and `problem` says why."""

    run_id: str
    tracked: TrackedRun | None = None
    problem: str = ""


class MasterKnown(Record, frozen=True, tag="master-known", kw_only=True):
    """Where the ranks of a run of several nodes meet: rank 0's node listens there."""

    run_id: str
    address: str
    port: int


class PeerFailed(Record, frozen=True, tag="peer-failed", kw_only=True):
    """A rank of the run failed on another node: free those that wait for it in a collective."""

    run_id: str


class PartsOver(Record, frozen=True, tag="parts-over", kw_only=True):
    """Every node's part of the run has ended: the ranks may leave."""

    run_id: str


class EndRun(Record, frozen=True, tag="end-run", kw_only=True):
    """Take the stop path with this run; `state` is what it ends as."""

    run_id: str
    state: RunState
    reason: str


class KillRanks(Record, frozen=True, tag="kill-ranks", kw_only=True):
    """KILL the ranks that `EndRun` has not stopped."""

    run_id: str


class RestartSessionRanks(Record, frozen=True, tag="restart-session-ranks", kw_only=True):
    """Replace ranks of a session by new processes; answered by `SessionRanksRestarted`. `ranks`: empty means all."""

    request: int
    session: str
    ranks: tuple[int, ...] = ()


class Question(Record, frozen=True, tag="question", kw_only=True):
    """Ask a rank of a session; answered by `Answered`, at once when the rank is busy."""

    request: int
    session: str
    question: RankQuestion


class TakeInventory(Record, frozen=True, tag="take-inventory", kw_only=True):
    """Look at the devices again; answered by `InventoryTaken`."""


class TakeStacks(Record, frozen=True, tag="take-stacks", kw_only=True):
    """Look where each rank of the run is; answered by `StacksTaken`."""

    request: int
    run_id: str


class EventsKept(Record, frozen=True, tag="events-kept", kw_only=True):
    """The pool has kept the run's events up to this number: the agent need not send them again."""

    run_id: str
    number: int


class Adopt(Record, frozen=True, tag="adopt", kw_only=True):
    """A new pool service takes the run over: send its events after `number` again, then go on."""

    run_id: str
    number: int


class DetachRun(Record, frozen=True, tag="detach-run", kw_only=True):
    """The run goes on when its notebook is gone."""

    run_id: str


class EndAgent(Record, frozen=True, tag="end-agent", kw_only=True):
    """End every rank and exit. Without it an agent whose pool is gone waits for the next one."""


StartOrder = WarmZygote | Launch | BuildEnvironment
RanksOrder = TrackingKnown | MasterKnown | PeerFailed | PartsOver | EndRun | KillRanks
SessionOrder = RestartSessionRanks | Question
ClientNews = ReclaimPayload | ResultsReceived
PoolOrder = TakeInventory | TakeStacks | EventsKept | Adopt | DetachRun | TellComms
ToAgent = StartOrder | RanksOrder | SessionOrder | ClientNews | PoolOrder | NodeFileReply | ToStream | EndAgent


class HeldRun(Record, frozen=True, kw_only=True):
    """A run that an agent has when a pool service comes to it.

    Args:
        launch: As it was ordered, without raw frames.
        state: `PREPARING` or later; final when its last word was said.
        started_s: Seconds since its launch.
        gone: Its ranks are gone; only events, or results that nobody has fetched, are left.
        locks: Descriptors of device locks that come along for it.
    """

    launch: Launch
    state: RunState
    started_s: float
    gone: bool = False
    locks: int = 0


class AgentReady(Record, frozen=True, tag="agent-ready", kw_only=True):
    """The first word of an agent to a pool service.

    Args:
        runs: What it has from an earlier service.
    """

    pid: int
    protocol_version: int
    inventory: Inventory
    runs: tuple[HeldRun, ...] = ()


class InventoryTaken(Record, frozen=True, tag="inventory-taken", kw_only=True):
    """What the node has, when it was asked or something has changed."""

    inventory: Inventory


class RunEvent(Record, frozen=True, tag="run-event", kw_only=True):
    """An event of a run on this node; the pool keeps it.

    Args:
        number: 1, 2, 3 ... by run, as the agent counts its own.
        part: The node's index among those of the run.
        joined: As in `Event`; never said by an agent.
    """

    run_id: str
    number: int
    at: float
    body: EventBody
    part: int = 0
    joined: tuple[tuple[int, int], ...] = ()


class PartEnded(Record, frozen=True, tag="part-ended", kw_only=True):
    """This node's part of a run of several nodes has ended; its last word waits for its results."""

    run_id: str


class DevicesFree(Record, frozen=True, tag="devices-free", kw_only=True):
    """Every process of the run is dead and reaped, and files of it are still on their way to the pool.

    `RanksGone` follows when they are there; the run's last word may come between. Not said of what runs in a session.
    """

    run_id: str


class RanksGone(Record, frozen=True, tag="ranks-gone", kw_only=True):
    """Every process of the run is dead and reaped, and nothing of it is left to come: its lease is free.

    Of a run in a session: its ranks are idle again, and the next cell may have them.
    """

    run_id: str


class StacksTaken(Record, frozen=True, tag="stacks-taken", kw_only=True):
    """Where each rank of the run on this node is."""

    request: int
    run_id: str
    stacks: tuple[RankStack, ...]


class SessionRanksRestarted(Record, frozen=True, tag="session-ranks-restarted", kw_only=True):
    """The new ranks have joined. `problem` says why not, "" when they have."""

    request: int
    session: str
    problem: str = ""


class Answered(Record, frozen=True, tag="answered", kw_only=True):
    """What a rank said to `Question`."""

    request: int
    answer: RankAnswer


class MasterBound(Record, frozen=True, tag="master-bound", kw_only=True):
    """This node's ranks of a run of several nodes are ready to meet; answered to all nodes by `MasterKnown`.

    Args:
        address: Where the node of rank 0 listens for the others; "" of other nodes.
        port: There; 0 of other nodes.
    """

    run_id: str
    address: str
    port: int


class TrackingAsked(Record, frozen=True, tag="tracking-asked", kw_only=True):
    """A rank's own code uses MLflow and waits for the run's place there; answered by `TrackingKnown`."""

    run_id: str


RanksReport = RunEvent | PartEnded | DevicesFree | RanksGone
AgentReply = StacksTaken | SessionRanksRestarted | Answered
RanksRequest = TrackingAsked | MasterBound
FromAgent = AgentReady | InventoryTaken | RanksReport | AgentReply | RanksRequest | NodeFileRequest | FromStream
