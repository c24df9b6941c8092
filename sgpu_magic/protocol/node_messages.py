"""Commands and replies within a node, and between the pool service and its nodes; each link has its own union.

pool <-> agent      ToAgent / FromAgent             Unix stream socket, descriptors of device locks beside
agent <-> zygote    ToZygote / FromZygote           socketpair, descriptors beside
agent <-> rank      ToRank / FromRank               socketpair, descriptors beside
"""

from __future__ import annotations

from sgpu_magic.protocol.events import EventBody
from sgpu_magic.protocol.messages import ReclaimPayload, ResultsReceived
from sgpu_magic.protocol.records import (
    CellSource,
    Collective,
    Failure,
    Interpreter,
    Inventory,
    Lease,
    OutputName,
    PackedLayout,
    Payload,
    RankContext,
    RankResult,
    RankStack,
    Record,
    RunSpec,
)
from sgpu_magic.protocol.states import RunState

# ---------------------------------------------------------------- pool <-> agent


class WarmZygote(Record, frozen=True, tag="warm-zygote", kw_only=True):
    interpreter: Interpreter
    ranks: int = 0


class Launch(Record, frozen=True, tag="launch", kw_only=True):
    """Start a run's ranks on this node. An inline payload is the first raw frame.

    Args:
        attempt: 0, and one more each time that the group is started again; also torchrun's restart count.
        number: The newest number of the run's events so far; the agent's next is one more.
        locks: Descriptors that come along: the device locks, held until the ranks are gone.
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


class EndRun(Record, frozen=True, tag="end-run", kw_only=True):
    """Take the stop path with this run; `state` is what it ends as."""

    run_id: str
    state: RunState
    reason: str


class TakeInventory(Record, frozen=True, tag="take-inventory", kw_only=True):
    pass


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


ToAgent = (
    WarmZygote
    | Launch
    | EndRun
    | ReclaimPayload
    | ResultsReceived
    | TakeInventory
    | TakeStacks
    | EventsKept
    | Adopt
    | DetachRun
    | EndAgent
)


class HeldRun(Record, frozen=True, kw_only=True):
    """A run that an agent has when a pool service comes to it.

    Args:
        launch: As it was ordered, without raw frames.
        state: `STARTING` or later; final when its last word was said.
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
    inventory: Inventory


class RunEvent(Record, frozen=True, tag="run-event", kw_only=True):
    """An event of a run on this node; the pool keeps it.

    Args:
        number: 1, 2, 3 ... by run, as the agent counts its own.
    """

    run_id: str
    number: int
    at: float
    body: EventBody


class RanksGone(Record, frozen=True, tag="ranks-gone", kw_only=True):
    """Every process of the run is dead and reaped: its lease is free."""

    run_id: str


class StacksTaken(Record, frozen=True, tag="stacks-taken", kw_only=True):
    request: int
    run_id: str
    stacks: tuple[RankStack, ...]


FromAgent = AgentReady | InventoryTaken | RunEvent | RanksGone | StacksTaken

# ---------------------------------------------------------------- agent <-> zygote


class Fork(Record, frozen=True, tag="fork", kw_only=True):
    """Fork one rank of a group. Its descriptors come along: control socket, output pipe, error pipe, stack file,
    store file.

    Args:
        store_path: The store's file where memory files do not exist; "" when its descriptor comes along.
        join_early: Join the process group before `Execute` arrives.
        rehearse: Also run a small cell before it does: there is time. All ranks of a group do, or none.
    """

    group_id: str
    rank: int
    ranks: int
    join_early: bool
    rehearse: bool = False
    store_path: str = ""


class Forked(Record, frozen=True, tag="forked", kw_only=True):
    group_id: str
    rank: int
    pid: int


class ForkRefused(Record, frozen=True, tag="fork-refused", kw_only=True):
    """The zygote has more than one thread, or the machine has no process left."""

    group_id: str
    rank: int
    message: str


class ZygoteReady(Record, frozen=True, tag="zygote-ready", kw_only=True):
    """Its interpreter may have another sgpu-magic than the pool; stable across versions."""

    pid: int
    torch_version: str
    protocol_version: int


class ZygoteFailed(Record, frozen=True, tag="zygote-failed", kw_only=True):
    """The interpreter can't be preloaded; the zygote exits after this."""

    message: str


class Exited(Record, frozen=True, tag="exited", kw_only=True):
    """A child of the zygote ended.

    Args:
        status: The exit code, negative for a signal.
        peak_bytes: The most memory that it ever held; 0 when unknown.
    """

    pid: int
    status: int
    peak_bytes: int = 0


ToZygote = Fork
FromZygote = Forked | ForkRefused | ZygoteReady | ZygoteFailed | Exited

# ---------------------------------------------------------------- agent <-> rank


class Execute(Record, frozen=True, tag="execute", kw_only=True):
    """Run a cell in this rank. The payload's descriptor comes along unless it is inline (the first raw frame).

    Args:
        run_dir: Where a result goes that memory has no room for.
        device: `cpu`, or `cuda` when the rank has a GPU of its own.
        rank_variables: torchrun's variables for this rank. `MASTER_PORT` is a bound loopback socket kept for user
            code that rendezvouses again; rank 0 gets its listening descriptor.
    """

    run_id: str
    cell: CellSource
    context: RankContext
    layout: PackedLayout
    inline: bool
    outputs: tuple[OutputName, ...]
    run_dir: str
    device: str
    rank_variables: dict[str, str]


class Release(Record, frozen=True, tag="release", kw_only=True):
    """Shut these connected sockets down (numbers in the rank), which frees it from a collective."""

    fds: tuple[int, ...]


class Leave(Record, frozen=True, tag="leave", kw_only=True):
    """All ranks have finished: exit."""


class InPlace(Record, frozen=True, tag="in-place", kw_only=True):
    """The rank's last display or clearing has its place: what is written from now on comes after it."""


class TellCollectives(Record, frozen=True, tag="tell-collectives", kw_only=True):
    """Look into torch's flight recorder; answered by `Collectives` with the same number."""

    request: int


ToRank = Execute | Release | Leave | InPlace | TellCollectives


class Joined(Record, frozen=True, tag="joined", kw_only=True):
    """The rank is in the process group."""


class Displayed(Record, frozen=True, tag="displayed", kw_only=True):
    """Something rich; the agent adds the rank."""

    bundle: bytes
    metadata: bytes = b"{}"
    display_id: str = ""
    update: bool = False


class Cleared(Record, frozen=True, tag="cleared", kw_only=True):
    wait: bool = False


class Finished(Record, frozen=True, tag="finished", kw_only=True):
    """The cell is done. The result's descriptor comes along unless it is inline (the first raw frame).

    Args:
        result: Without `lines` and `output_bytes`, which the agent counts.
    """

    result: RankResult


class Failed(Record, frozen=True, tag="failed", kw_only=True):
    """The cell raised. The pickled exception, if any, is the first raw frame."""

    failure: Failure


class Collectives(Record, frozen=True, tag="collectives", kw_only=True):
    """What the flight recorder has: the collective that the rank is in, or its last one.

    Args:
        current: None when it has recorded none, or this torch has no recorder for the backend.
        entered_at: When the rank called it, seconds since the epoch; 0.0 when unknown.
    """

    request: int
    current: Collective | None = None
    entered_at: float = 0.0


FromRank = Joined | Displayed | Cleared | Finished | Failed | Collectives
