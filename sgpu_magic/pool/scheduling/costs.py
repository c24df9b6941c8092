"""Prices of devices, and the limits at which runs end: `--max-cost` and the pool's budget. Pure.

- A run with `max_cost`, and every run with a price in a pool with a budget, is warned at 80 % and stopped at 100 %.
- A pool whose budget is used up refuses runs with a price; those in its queue end.
- Runs in a session have no cost of their own: the session is warned and stopped.

`wire.costs` has the rules that views share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from sgpu_magic.config import Settings
from sgpu_magic.config.pool_terms import read_prices
from sgpu_magic.pool.scheduling.capacity import ResourceRequest
from sgpu_magic.pool.scheduling.end_reason import (
    BudgetExhausted,
    BudgetNear,
    BudgetUsedUp,
    CostLimitNear,
    CostLimitReached,
)
from sgpu_magic.pool.scheduling.placement_refusal import NoPrice, PlacementRefusal
from sgpu_magic.pool.scheduling.run import WARN_SHARE, Meter, ScheduledRun
from sgpu_magic.pool.scheduling.run_table import RunTable
from sgpu_magic.pool.scheduling.stimuli import Instruction, PublishWarning
from sgpu_magic.wire.base import ErrorKind, RunLimit, RunState
from sgpu_magic.wire.costs import HOUR_S, Prices, device_count
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.run import RunSpec

_NONE = Prices()
DAY_S = 24 * 3600.0
# tolerance for rounding errors in sums of many prices
_EXACT = 1 - 1e-9


class Tariff(msgspec.Struct, frozen=True):
    """The prices of a pool's devices.

    Args:
        prices: The price table of the settings.
        pool: The pool's name.
        currency: The prices' currency.
    """

    prices: Prices = _NONE
    pool: str = "local"
    currency: str = "USD"

    def __bool__(self) -> bool:
        return bool(self.prices)

    def price_of(self, device_type: str) -> float | None:
        """Return the price of one device for an hour, None without one."""
        return self.prices.price_of(self.pool, device_type)

    def hourly(self, lease: Lease) -> float | None:
        """Return the price of all of a lease's devices for an hour, None without one."""
        price = self.price_of(lease.device_type)
        return None if price is None else price * device_count(lease)

    def metered(self, meter: Meter, lease: Lease) -> Meter:
        """Return a run's meter for its new lease."""
        return replace(meter, lease=lease, hourly=self.hourly(lease))

    def priced(self) -> Sequence[str]:
        """Return the types with a price."""
        return self.prices.types(self.pool)


def tariff_of(settings: Settings, pool: str = "local") -> Tariff:
    """Return the prices of a pool."""
    return Tariff(read_prices(settings.prices), pool, settings.currency)


class Budget:
    """A limit on spending in the last `days`.

    Args:
        limit: In the settings' currency; more than 0.
        days: How far back spending counts; more than 0.
        spent: (time, cost) of ended runs, in any order.
    """

    def __init__(self, limit: float, days: float, spent: Iterable[tuple[float, float]] = ()) -> None:
        self.limit = limit
        self.days = days
        self._spent = sorted(spent)
        # recomputed only when an entry expires, not at each query
        self._total = math.fsum(cost for _, cost in self._spent)

    def add(self, at: float, cost: float) -> None:
        """Add the cost of a run whose meter stopped at `at`, the newest time so far."""
        self._spent.append((at, cost))
        self._total += cost

    def spent(self, now: float) -> float:
        """Return the spending in the last `days`."""
        since = now - self.days * DAY_S
        if self._spent and self._spent[0][0] <= since:
            self._spent = [entry for entry in self._spent if entry[0] > since]
            self._total = math.fsum(cost for _, cost in self._spent)
        return self._total

    def frees_at(self, now: float, more: float = 0.0) -> float | None:
        """Return when enough spending has expired for new runs; None when that is not known.

        Args:
            now: The present.
            more: The cost of active runs so far, which can't expire before they end.
        """
        left = self.spent(now) + more
        for at, cost in self._spent:
            left -= cost
            if left < self.limit * _EXACT:
                return at + self.days * DAY_S
        return None


class CostRules:
    """Decides which runs to warn and to stop.

    Args:
        table: The scheduler's runs.
        tariff: The pool's prices.
        budget: The pool's budget, None without one.

    Attributes:
        tariff: As given.
    """

    def __init__(self, table: RunTable, tariff: Tariff, budget: Budget | None) -> None:
        self._table = table
        self.tariff = tariff
        self._budget = budget if tariff else None

    def refusal(self, spec: RunSpec, request: ResourceRequest) -> PlacementRefusal | None:
        """Return why a run's cost limit can't be enforced; None when it can, or the run has none."""
        if spec.max_cost is None or spec.session or self.tariff.price_of(request.device_type) is not None:
            return None
        priced = tuple(self.tariff.priced())
        return PlacementRefusal(ErrorKind.USAGE, NoPrice(spec.max_cost, request.device_type, priced))

    def adopted(self, run: ScheduledRun) -> None:
        """Don't repeat the warning of an adopted run, which an earlier service has sent."""
        if run.cost_warning is not None and self._table.now >= run.cost_warning:
            self._table.change(run, cost_reported=True)

    def exhausted_budget(self, request: ResourceRequest) -> BudgetExhausted | None:
        """Return why the budget keeps a request from starting now; None when it can start."""
        if (budget := self._budget) is None or self.tariff.price_of(request.device_type) is None:
            return None
        now, live = self._table.now, self._table.live_cost()
        spent = budget.spent(now) + live
        if spent < budget.limit * _EXACT:
            return None
        frees_at = budget.frees_at(now, live)
        frees_in_s = None if frees_at is None else frees_at - now
        return BudgetExhausted(budget.limit, budget.days, self.tariff.currency, spent, frees_in_s)

    def apply_limits(self) -> list[Instruction]:
        """Warn the runs that are near a cost limit or the budget, and stop those that reached it."""
        if not self.tariff:
            return []
        by_max_cost = [instruction for run in self._table.on_meter() for instruction in self._by_max_cost(run)]
        return by_max_cost + self._by_budget()

    def next_deadline(self) -> float | None:
        """Return when `settle` has something to do; None when only events can change anything."""
        if not self.tariff:
            return None
        on_meter = self._table.on_meter()
        due_at = [run.cost_limit if run.cost_reported else run.cost_warning for run in on_meter]
        times = [due for due in due_at if due is not None]
        per_s = sum(run.meter.hourly or 0.0 for run in on_meter) / HOUR_S
        if self._budget is not None and per_s > 0:
            now = self._table.now
            spent = self._budget.spent(now) + self._table.live_cost()
            share = 1.0 if all(run.budget_reported for run in on_meter) else WARN_SHARE
            times.append(now + max(0.0, share * self._budget.limit - spent) / per_s)
        return min(times, default=None)

    # ------------------------------------------------------------ internals

    def _by_max_cost(self, run: ScheduledRun) -> list[Instruction]:
        limit, max_cost, meter, now = run.cost_limit, run.spec.max_cost, run.meter, self._table.now
        if limit is None or max_cost is None or meter.since is None or meter.hourly is None:
            return []
        currency = self.tariff.currency
        if now >= limit:
            reason = CostLimitReached(
                max_cost=max_cost,
                cost=meter.stopped_copy(now).spent,
                hourly=meter.hourly,
                currency=currency,
                ran_s=now - meter.since,
                lease=run.lease,
            )
            return self._table.stop(run, RunState.TIMED_OUT, reason, RunLimit.COST)
        warning = run.cost_warning
        if run.cost_reported or warning is None or now < warning:
            return []
        self._table.change(run, cost_reported=True)
        return [PublishWarning(run.run_id, CostLimitNear(max_cost, currency, limit - now))]

    def _by_budget(self) -> list[Instruction]:
        if (budget := self._budget) is None:
            return []
        # `live_cost` includes runs that were just stopped by their own limit
        runs, now, currency = self._table.on_meter(), self._table.now, self.tariff.currency
        spent = budget.spent(now) + self._table.live_cost()
        out: list[Instruction] = []
        if spent >= budget.limit * _EXACT:
            for run in runs:
                own = run.meter.running_cost(now)
                reason = BudgetUsedUp(budget.limit, budget.days, currency, spent, own)
                out += self._table.stop(run, RunState.TIMED_OUT, reason, RunLimit.BUDGET)
        elif spent >= WARN_SHARE * budget.limit * _EXACT:
            for run in runs:
                if not run.budget_reported:
                    self._table.change(run, budget_reported=True)
                    out.append(PublishWarning(run.run_id, BudgetNear(budget.limit, budget.days, currency)))
        return out
