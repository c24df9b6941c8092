"""What every view of a pool says of its devices, its budget and its runs, from the pool's own status."""

from __future__ import annotations

from sgpu_magic.views import ansi
from sgpu_magic.views.units import format_seconds
from sgpu_magic.wire.devices import Device
from sgpu_magic.wire.pool_status import PoolStatus, RunSummary
from sgpu_magic.wire.prices import format_money
from sgpu_magic.wire.states import RunState

HOLDING = (RunState.PREPARING, RunState.STARTING, RunState.RUNNING, RunState.CANCELLING)
"""States in which a run has devices."""

# only then is it worth a line
_SOON_S = 900.0
_MAX_FAILURE = 100
# of a budget: then it is loud
_LITTLE_LEFT = 0.8


def device_holders(status: PoolStatus) -> dict[str, tuple[RunSummary, int]]:
    """Return by a device's uuid the run that holds it and the rank that it belongs to."""
    # a session's devices are its own, whatever runs on them
    holding = sorted((run for run in status.runs if run.state in HOLDING), key=lambda run: not run.session)
    return {uuid: (run, rank) for run in holding for rank, uuid in enumerate(run.uuids)}


def device_name(device: Device) -> str:
    """Return `A10 · 0`."""
    return f"{device.type.upper()} · {device.index}"


def outside_words(device: Device) -> str:
    """Return why nobody in the pool gets it, "" when it may be given away."""
    return f"in use outside the pool: {device.outside_use}" if device.outside_use else ""


def problem_words(status: PoolStatus) -> list[str]:
    """Return what is wrong with the node's driver and the pool's ledger."""
    return [problem for problem in (status.inventory.problem, status.problem) if problem]


def budget_words(status: PoolStatus, *, nearly_used: bool) -> list[str]:
    """Return `budget: $12.40 of $50.00 in 30 d`, among what is loud when little is left of it."""
    budget = status.budget
    if budget is None or nearly_used != (budget.spent >= _LITTLE_LEFT * budget.limit):
        return []
    spent, limit = (format_money(amount, budget.currency) for amount in (budget.spent, budget.limit))
    return [f"budget: {spent} of {limit} in {budget.days:g} d"]


def idle_words(status: PoolStatus, now: float) -> list[str]:
    """Return when the idle pool gives its processes back, if that is soon; `now` in seconds since the epoch."""
    if status.idle_ends_at is None or status.idle_ends_at - now > _SOON_S:
        return []
    return [f"idle: gives its processes back in {_rough(status.idle_ends_at - now)}"]


def failure_line(run: RunSummary) -> str:
    """Return the first line of why a run ended, not too long, "" for nothing."""
    failure = ansi.plain(run.failure.strip().split("\n", 1)[0])
    return failure if len(failure) <= _MAX_FAILURE else failure[:_MAX_FAILURE] + " ..."


def _rough(seconds: float) -> str:
    """Return whole minutes where there are some: nobody waits for the second."""
    return f"{round(seconds / 60)} min" if seconds >= 90 else format_seconds(max(seconds, 0.0))
