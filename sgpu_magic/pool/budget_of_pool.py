"""The budget that a pool's settings name, with what its ledger says was spent of it."""

from __future__ import annotations

from collections.abc import Iterable

from sgpu_magic.config import Settings
from sgpu_magic.pool.budget import DAY_S, Budget
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.scheduled_run import ScheduledRun
from sgpu_magic.wire.pool_status import BudgetState


def budget_of(settings: Settings, ledger: Ledger, now: float, wall: float) -> Budget | None:
    """Return the pool's budget, None where the settings name none.

    Args:
        settings: `budget` and `budget_days`.
        ledger: What the pool's runs have cost.
        now: The present on the scheduler's clock.
        wall: The present, seconds since the epoch.
    """
    if not settings.budget:
        return None
    spent = ledger.costs_since(wall - settings.budget_days * DAY_S, settings.currency)
    return Budget(settings.budget, settings.budget_days, [(now - (wall - at), cost) for at, cost in spent])


def budget_state(budget: Budget | None, runs: Iterable[ScheduledRun], currency: str, now: float) -> BudgetState | None:
    """Return what is used of it; `runs` are those that go on."""
    if budget is None:
        return None
    live = sum(run.cost(now) or 0.0 for run in runs if not run.state.is_final)
    return BudgetState(limit=budget.limit, days=budget.days, spent=budget.spent(now) + live, currency=currency)
