"""Why the scheduler ends, refuses or warns a run. Facts only; `pool.format_end` words them. Pure."""

from __future__ import annotations

import msgspec

from sgpu_magic.pool.scheduling.capacity import QueueKey
from sgpu_magic.pool.scheduling.placement_refusal import RefusalReason
from sgpu_magic.pool.scheduling.wait_reason import DeviceBlocker, HeldByRun, Holders, WaitReason
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.option_text import Text

# ---------------------------------------------------------------- time


class TimeLimitReached(msgspec.Struct, frozen=True):
    """The run has had its devices for as long as it may.

    Args:
        limit_s: Its time limit.
    """

    limit_s: float


class SessionWasIdle(msgspec.Struct, frozen=True):
    """No cell ran in the session for as long as that is allowed.

    Args:
        idle_s: The limit.
    """

    idle_s: float


class NoNodesInTime(msgspec.Struct, frozen=True):
    """The cluster added no node within the run's waiting time.

    Args:
        wait_s: The waiting time.
    """

    wait_s: float


class InUse(msgspec.Struct, frozen=True):
    """What blocks a request in a one-machine pool.

    Args:
        holders: The runs that hold devices.
        blockers: Why others can't be granted.
    """

    holders: Holders
    blockers: tuple[DeviceBlocker, ...] = ()


class WaitLimitReached(msgspec.Struct, frozen=True):
    """The devices did not become free within the run's waiting time.

    Args:
        need: How many devices or slots it needs.
        free: How many it could take now.
        line: What they are.
        wait_s: The waiting time; 0 for a run that does not wait.
        reason: What it waited for.
    """

    need: int
    free: int
    line: QueueKey
    wait_s: float
    reason: WaitReason | InUse


class WaitsForOwnSessions(msgspec.Struct, frozen=True):
    """Only sessions of the process that waits for the run could free its devices, and it can't end them meanwhile.

    Args:
        need: How many devices or slots it needs.
        free: How many it could take now.
        line: What they are.
        sessions: Those sessions, each with what it holds.
    """

    need: int
    free: int
    line: QueueKey
    sessions: tuple[HeldByRun, ...]


class CellWaitLimitReached(msgspec.Struct, frozen=True):
    """The session did not become free within the cell's waiting time.

    Args:
        wait_s: The waiting time; 0 for a cell that does not wait.
        reason: What it waited for.
    """

    wait_s: float
    reason: WaitReason


# ---------------------------------------------------------------- costs


class CostLimitReached(msgspec.Struct, frozen=True):
    """The run has cost as much as its `--max-cost` allows.

    Args:
        max_cost: The limit.
        cost: What the run has cost.
        hourly: What its devices cost in an hour.
        currency: Of all amounts.
        ran_s: Seconds for which it has had its devices.
        lease: Its devices; None if it has none any more.
    """

    max_cost: float
    cost: float
    hourly: float
    currency: str
    ran_s: float
    lease: Lease | None


class BudgetUsedUp(msgspec.Struct, frozen=True):
    """The pool's budget is used up while the run runs.

    Args:
        limit: The budget.
        days: The days in which it may be spent.
        currency: Of all amounts.
        spent: What the pool's runs have cost in that time.
        own: What this run has cost of it.
    """

    limit: float
    days: float
    currency: str
    spent: float
    own: float


class BudgetExhausted(msgspec.Struct, frozen=True):
    """The pool's budget keeps a run from starting.

    Args:
        limit: The budget.
        days: The days in which it may be spent.
        currency: Of all amounts.
        spent: What the pool's runs have cost in that time.
        frees_in_s: Seconds until runs may start again; None when that depends on the active runs.
    """

    limit: float
    days: float
    currency: str
    spent: float
    frees_in_s: float | None


class CostLimitNear(msgspec.Struct, frozen=True):
    """The run has used 80 % of its `--max-cost`.

    Args:
        max_cost: The limit.
        currency: Its currency.
        left_s: Seconds until the run is stopped.
    """

    max_cost: float
    currency: str
    left_s: float


class BudgetNear(msgspec.Struct, frozen=True):
    """The pool has used 80 % of its budget.

    Args:
        limit: The budget.
        days: The days in which it may be spent.
        currency: Its currency.
    """

    limit: float
    days: float
    currency: str


CostWarning = CostLimitNear | BudgetNear
"""What the followers of a running run are warned of."""

# ---------------------------------------------------------------- sessions and submissions


class SessionEnded(msgspec.Struct, frozen=True):
    """The session of a cell ended before the cell.

    Args:
        run_id: The session.
        name: Its name, maybe empty.
        reason: Why it ended; None without a known reason.
        cell_started: Whether the cell has its own processes on the session's devices; otherwise it was waiting.
        fails_cell: Whether the cell fails because of it; otherwise it is cancelled or stopped.
    """

    run_id: str
    name: str
    reason: EndReason | None
    cell_started: bool
    fails_cell: bool = False


class SessionClosed(msgspec.Struct, frozen=True):
    """A cell was submitted to a session that accepts none any more.

    Args:
        run_id: The session.
        name: Its name, maybe empty.
        has_ended: Whether it has ended; otherwise it is ending.
        reason: Why; None without a known reason.
    """

    run_id: str
    name: str
    has_ended: bool
    reason: EndReason | None


class AlreadySubmitted(msgspec.Struct, frozen=True):
    """The run's ID is in use.

    Args:
        run_id: The ID.
    """

    run_id: str


EndReason = (
    Text
    | TimeLimitReached
    | SessionWasIdle
    | NoNodesInTime
    | WaitLimitReached
    | WaitsForOwnSessions
    | CellWaitLimitReached
    | CostLimitReached
    | BudgetUsedUp
    | BudgetExhausted
    | SessionEnded
    | SessionClosed
    | AlreadySubmitted
    | RefusalReason
)
"""Why a run ends or is refused; a text where somebody else has given the reason."""
