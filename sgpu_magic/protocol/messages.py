"""Commands and replies between clients and the pool service. What travels within a node: `node_messages`.

client <-> pool     ClientMessage / PoolMessage     ZeroMQ, raw frames beside
pool <-> agent      ToAgent / FromAgent             socketpair
agent <-> zygote    ToZygote / FromZygote           socketpair, descriptors beside
agent <-> rank      ToRank / FromRank               socketpair, descriptors beside
"""

from __future__ import annotations

from sgpu_magic.protocol.events import Event
from sgpu_magic.protocol.records import (
    CellSource,
    Interpreter,
    Inventory,
    Payload,
    RankContext,
    RankStack,
    Record,
    RunSpec,
)
from sgpu_magic.protocol.states import RunState

PROTOCOL_VERSION = 2
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


class Attach(Record, frozen=True, tag="attach", kw_only=True):
    """Follow a run from its beginning, or from where the client lost it. Answered by `Attached`, then its events.

    Args:
        run: A unique prefix of its id; "" is the newest run that goes on without a notebook, else the newest of all.
        after: Number of the last event that the client has; 0 asks for all.
        owns: The client submitted the run: its death ends the run unless that is detached.
    """

    request: int
    run: str = ""
    after: int = 0
    owns: bool = False


class Unfollow(Record, frozen=True, tag="unfollow", kw_only=True):
    """Send this client no more events of the run; it goes on."""

    run_id: str


class Detach(Record, frozen=True, tag="detach", kw_only=True):
    """Let a run go on whatever becomes of its notebook. `run` may be a unique prefix of its id.

    Args:
        run: As in `Cancel`; "" is every run that this client owns.
    """

    request: int
    run: str = ""


class AskStacks(Record, frozen=True, tag="ask-stacks", kw_only=True):
    """Where every rank of a run is now. `run` as in `Attach`, but only of runs that go on."""

    request: int
    run: str = ""


class AskStatus(Record, frozen=True, tag="ask-status", kw_only=True):
    request: int
    recent: int = 20


class Goodbye(Record, frozen=True, tag="goodbye", kw_only=True):
    """The client unloads; its runs that it does not wait for are cancelled."""


class StopPool(Record, frozen=True, tag="stop-pool", kw_only=True):
    """End the service; refused while runs go on unless `force`."""

    request: int
    force: bool = False


ClientMessage = (
    Hello
    | Warm
    | Submit
    | Cancel
    | Attach
    | Unfollow
    | Detach
    | AskStacks
    | ReclaimPayload
    | ResultsReceived
    | AskStatus
    | Goodbye
    | StopPool
)

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


class Attached(Record, frozen=True, tag="attached", kw_only=True):
    """The run that is followed from now on.

    Args:
        spec: What was submitted.
        state: Its state now.
        key: The run's HMAC key, for its results; empty when it is not known any more.
    """

    request: int
    spec: RunSpec
    state: RunState
    key: bytes = b""


class Stacks(Record, frozen=True, tag="stacks", kw_only=True):
    """Where the ranks are. `cell` is the run's, for the lines that the stacks name."""

    request: int
    run_id: str
    stacks: tuple[RankStack, ...]
    cell: CellSource = CellSource(body="")


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
    """What `%sgpu_status` and `sgpu pool status` show.

    Args:
        problem: The ledger's, "" when it has none.
        idle_ends_at: Wall-clock time at which the idle pool gives its processes back; None while it is in use.
    """

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
    idle_ends_at: float | None = None


class Notice(Record, frozen=True, tag="notice", kw_only=True):
    """A sentence for whoever is connected, such as that idle processes are about to be given back. "" takes it back."""

    text: str


PoolMessage = Welcome | Accepted | Attached | Stacks | Refused | Notice | PoolStatus | Event
