"""Commands and replies between the four kinds of process, each link with its own union.

client <-> pool     ClientMessage / PoolMessage     ZeroMQ, raw frames beside
pool <-> agent      ToAgent / FromAgent             socketpair
agent <-> zygote    ToZygote / FromZygote           socketpair, descriptors beside
agent <-> rank      ToRank / FromRank               socketpair, descriptors beside
"""

from __future__ import annotations

from sgpu_magic.protocol.events import Event, EventBody
from sgpu_magic.protocol.records import (
    CellSource,
    Failure,
    Interpreter,
    Inventory,
    Lease,
    OutputName,
    PackedLayout,
    Payload,
    RankContext,
    RankResult,
    Record,
    RunSpec,
)
from sgpu_magic.protocol.states import RunState

PROTOCOL_VERSION = 1
OLDEST_PROTOCOL_VERSION = 1

# ---------------------------------------------------------------- client -> pool


class Hello(Record, frozen=True, tag="hello", kw_only=True):
    """The first message of a client. Stable across versions."""

    protocol_version: int
    package_version: str
    pid: int


class Warm(Record, frozen=True, tag="warm", kw_only=True):
    """Start this interpreter's zygote in the background, and a standby group of `ranks` (0 for none)."""

    interpreter: Interpreter
    ranks: int = 0


class Submit(Record, frozen=True, tag="submit", kw_only=True):
    """Run this. An inline payload is the first raw frame."""

    request: int
    spec: RunSpec
    interpreter: Interpreter
    context: RankContext
    payload: Payload


class Cancel(Record, frozen=True, tag="cancel", kw_only=True):
    """Stop a run by the one stop path. `run` may be a unique prefix of its id."""

    request: int
    run: str
    reason: str = ""


class ReclaimPayload(Record, frozen=True, tag="reclaim", kw_only=True):
    """The client wants to write its memory file again: stop copying it; answered by `PayloadReleased`."""

    run_id: str


class ResultsReceived(Record, frozen=True, tag="results-received", kw_only=True):
    """The client has mapped the results: the agent may close its own descriptors."""

    run_id: str


class AskStatus(Record, frozen=True, tag="ask-status", kw_only=True):
    request: int
    recent: int = 20


class Goodbye(Record, frozen=True, tag="goodbye", kw_only=True):
    """The client unloads; its runs that it does not wait for are cancelled."""


class StopPool(Record, frozen=True, tag="stop-pool", kw_only=True):
    """End the service; refused while runs go on unless `force`."""

    request: int
    force: bool = False


ClientMessage = Hello | Warm | Submit | Cancel | ReclaimPayload | ResultsReceived | AskStatus | Goodbye | StopPool

# ---------------------------------------------------------------- pool -> client


class Welcome(Record, frozen=True, tag="welcome", kw_only=True):
    """The answer to `Hello`. Stable across versions."""

    protocol_version: int
    package_version: str
    pid: int
    oldest_protocol_version: int = OLDEST_PROTOCOL_VERSION
    busy: bool = False


class Accepted(Record, frozen=True, tag="accepted", kw_only=True):
    """A request was taken; its events follow. `text` is for a person."""

    request: int
    run_id: str = ""
    text: str = ""


class Refused(Record, frozen=True, tag="refused", kw_only=True):
    """A request was not taken. `error` names the class in `errors`."""

    request: int
    error: str
    message: str


class RunSummary(Record, frozen=True, kw_only=True):
    """One row of the ledger."""

    run_id: str
    name: str
    ranks: int
    device_type: str
    simulated: bool
    state: RunState
    submitted_at: float
    started_at: float | None = None
    ended_at: float | None = None
    position: int | None = None
    waiting_for: str = ""
    failure: str = ""
    uuids: tuple[str, ...] = ()
    owner_pid: int = 0
    notebook: str = ""


class PoolStatus(Record, frozen=True, tag="status", kw_only=True):
    """What `%sgpu_status` and `sgpu pool status` show. `problem` is the ledger's, "" when it has none."""

    request: int
    pool: str
    pid: int
    package_version: str
    started_at: float
    inventory: Inventory
    cpu_slots_free: int
    runs: tuple[RunSummary, ...]
    clients: int
    problem: str = ""


PoolMessage = Welcome | Accepted | Refused | PoolStatus | Event

# ---------------------------------------------------------------- pool <-> agent


class WarmZygote(Record, frozen=True, tag="warm-zygote", kw_only=True):
    interpreter: Interpreter
    ranks: int = 0


class Launch(Record, frozen=True, tag="launch", kw_only=True):
    """Start a run's ranks on this node. An inline payload is the first raw frame."""

    spec: RunSpec
    interpreter: Interpreter
    context: RankContext
    payload: Payload
    lease: Lease
    run_dir: str


class EndRun(Record, frozen=True, tag="end-run", kw_only=True):
    """Take the stop path with this run; `state` is what it ends as."""

    run_id: str
    state: RunState
    reason: str


class TakeInventory(Record, frozen=True, tag="take-inventory", kw_only=True):
    pass


ToAgent = WarmZygote | Launch | EndRun | ReclaimPayload | ResultsReceived | TakeInventory


class AgentReady(Record, frozen=True, tag="agent-ready", kw_only=True):
    pid: int
    inventory: Inventory


class InventoryTaken(Record, frozen=True, tag="inventory-taken", kw_only=True):
    inventory: Inventory


class RunEvent(Record, frozen=True, tag="run-event", kw_only=True):
    """An event of a run on this node; the pool numbers and keeps it."""

    run_id: str
    at: float
    body: EventBody


class RanksGone(Record, frozen=True, tag="ranks-gone", kw_only=True):
    """Every process of the run is dead and reaped: its lease is free."""

    run_id: str


FromAgent = AgentReady | InventoryTaken | RunEvent | RanksGone

# ---------------------------------------------------------------- agent <-> zygote


class Fork(Record, frozen=True, tag="fork", kw_only=True):
    """Fork one rank of a group. Its descriptors come along: control socket, output pipe, error pipe, store file.

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
    """A child of the zygote ended. `status` is the exit code, negative for a signal."""

    pid: int
    status: int


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


ToRank = Execute | Release | Leave | InPlace


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


FromRank = Joined | Displayed | Cleared | Finished | Failed
