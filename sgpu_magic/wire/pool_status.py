"""What a pool says of itself: its devices, its runs, its budget."""

from __future__ import annotations

from sgpu_magic.wire.devices import Inventory
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.states import RunKind, RunState


class RunSummary(Record, frozen=True, kw_only=True):
    """One row of the ledger.

    Args:
        metered_at: When its meter began, seconds since the epoch; None before, and for what a session pays for.
        hourly: What all its devices cost in an hour, None without a price.
        currency: Of `hourly` and `cost`.
        gpu_s: Seconds of devices that were billed; None while it goes on, and where none were.
        cost: Theirs; None while it goes on, and without a price.
        idle_s: Of a session that has ended: for how long no cell ran in it.
        idle_ends_at: Of a session in which nothing runs: wall-clock time at which it ends by itself; None else.
    """

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
    kind: RunKind = RunKind.CELL
    session: str = ""
    kernel: str = ""
    user: str = ""
    metered_at: float | None = None
    hourly: float | None = None
    currency: str = ""
    gpu_s: float | None = None
    cost: float | None = None
    idle_s: float | None = None
    idle_ends_at: float | None = None


class BudgetState(Record, frozen=True, kw_only=True):
    """A pool's budget and what is used of it.

    Args:
        limit: In `currency`.
        days: How far back spending counts.
        spent: In that time, with what runs that go on have cost so far.
    """

    limit: float
    days: float
    spent: float
    currency: str


class PoolStatus(Record, frozen=True, tag="status", kw_only=True):
    """What `%sgpu_status` and `sgpu pool status` show.

    Args:
        problem: The ledger's, "" when it has none.
        idle_ends_at: Wall-clock time at which the idle pool gives its processes back; None while it is in use.
        budget: None without one.
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
    budget: BudgetState | None = None
