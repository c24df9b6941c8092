"""The meters of a pool's runs: when they begin, what is written down of them, what they come to; and the pool's budget.

What is billed is counted on the monotonic clock, which all processes of a machine share until it starts anew: no step
of the wall clock changes a cost. Wall-clock times are written down for people.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.pool.ledger import Ledger, Metered
from sgpu_magic.pool.scheduling import costs
from sgpu_magic.pool.scheduling.costs import DAY_S, Budget, IdleMeter, Tariff
from sgpu_magic.pool.scheduling.scheduled_run import ScheduledRun
from sgpu_magic.wire.costs import idle_seconds
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.events import Placed, RunEnded
from sgpu_magic.wire.pool_status import BudgetState
from sgpu_magic.wire.states import RunKind, RunState

if TYPE_CHECKING:
    from sgpu_magic.pool.pool_run import PoolRun


class Billing:
    """Keeps the meters. What runs in a session has none: the session pays.

    Args:
        ledger: Where they are written down.
        tariff: What devices cost.
    """

    def __init__(self, ledger: Ledger, tariff: Tariff) -> None:
        self._ledger = ledger
        self._tariff = tariff
        # of sessions that are connected
        self._idle: dict[str, IdleMeter] = {}

    def placed(self, run: PoolRun, lease: Lease) -> Metered | None:
        """The run has this lease. Returns what is to be written down."""
        run.lease = lease
        run.hourly = None if run.spec.session else self._tariff.hourly(lease)
        return None if run.hourly is None else Metered(hourly=run.hourly, currency=self._tariff.currency)

    def told(self, lease: Lease, host: str, labels: tuple[str, ...]) -> Placed:
        """Return what the run's followers are told of its lease; of a cell in a session what the session pays."""
        hourly = self._tariff.hourly(lease)
        currency = "" if hourly is None else self._tariff.currency
        return Placed(lease=lease, host=host, labels=labels, hourly=hourly, currency=currency)

    def begun(self, run: PoolRun, state: RunState, wall: float, now: float) -> Metered | None:
        """The run moved to `state`. Returns what is to be written down: that its meter begins, if it does.

        Args:
            run: The run.
            state: Its new state.
            wall: Wall-clock time, seconds since the epoch.
            now: Monotonic time.
        """
        if state is not RunState.STARTING or run.metered_clock is not None or run.spec.session:
            return None
        run.metered_at, run.metered_clock = wall, now
        return Metered(metered_at=wall, metered_clock=now)

    def ranks_started(self, run: PoolRun, now: float) -> None:
        """The run's ranks are there: a session is idle from now on, or no longer."""
        if run.spec.kind is RunKind.SESSION:
            self._idle[run.run_id] = IdleMeter(now)
            self._write_idle(run.run_id, now)
        elif run.spec.session in self._idle:
            self._idle[run.spec.session].began(run.run_id, now)
            self._write_idle(run.spec.session, now)

    def paused(self, run: PoolRun, now: float) -> None:
        """The run has lost its devices and waits for others: that costs nothing."""
        if run.metered_clock is not None:
            run.metered_s += now - run.metered_clock
            run.metered_at = run.metered_clock = None

    def adopted(self, run: PoolRun, lease: Lease, started_at: float, state: RunState, now: float) -> None:
        """Go on with the meter that an earlier service began.

        Args:
            run: A run that goes on.
            lease: What it has.
            started_at: When its ranks were launched, where the ledger does not say when its meter began.
            state: Where it is.
            now: Monotonic time.
        """
        price = self.placed(run, lease)
        row = self._ledger.summary(run.run_id)
        if row is None:
            return
        # of an earlier version, or of before the machine was started anew: all that is known is the wall clock
        wall = time.time()
        clock, idle_clock = self._ledger.clocks(run.run_id)
        if run.spec.session:
            if state is RunState.RUNNING:
                self.ranks_started(run, now)
            return
        if run.spec.kind is RunKind.SESSION and row.started_at is not None:
            cells = self._ledger.cell_times(run.run_id)
            if row.idle_s is None or idle_clock is None or idle_clock > now:
                idle = IdleMeter(now, idle_seconds(row.started_at, wall, cells))
            else:
                # in a cell it was not idle since that began
                in_cell = any(ended is None for _, ended in cells)
                idle = IdleMeter(now if in_cell else idle_clock, row.idle_s)
            self._idle[run.run_id] = idle
        if row.hourly is not None:
            run.hourly = row.hourly
        elif price is not None:
            self._ledger.update(run.run_id, meter=price)
        run.metered_at = row.metered_at
        if run.metered_at is not None:
            run.metered_clock = clock if clock is not None and clock <= now else now - max(0.0, wall - run.metered_at)
        elif state is not RunState.PREPARING:
            launched = now - max(0.0, wall - started_at)
            self._ledger.update(run.run_id, meter=self.begun(run, RunState.STARTING, started_at, launched))

    def ended(self, run: PoolRun, ended: RunEnded, now: float) -> tuple[RunEnded, Metered | None]:
        """Return a run's last word with what it was billed, and what is to be written down of that.

        Args:
            run: The run.
            ended: Its last word.
            now: Monotonic time.
        """
        if run.spec.session in self._idle:
            self._idle[run.spec.session].ended(run.run_id, now)
            self._write_idle(run.spec.session, now)
        idle = self._idle.pop(run.run_id, None)
        on_meter_s = 0.0 if run.metered_clock is None else now - run.metered_clock
        seconds = run.metered_s + on_meter_s
        if run.lease is None or (run.metered_clock is None and not seconds):
            return ended, None
        due = costs.bill(run.lease, run.hourly, seconds)
        currency = "" if due.cost is None else self._tariff.currency
        ended = msgspec.structs.replace(ended, gpu_s=due.gpu_s, cost=due.cost, currency=currency)
        # one that was never connected had no time for cells
        idle_s = None if run.spec.kind is not RunKind.SESSION else 0.0 if idle is None else idle.seconds(now)
        return ended, Metered(gpu_s=due.gpu_s, cost=due.cost, idle_s=idle_s)

    def _write_idle(self, session: str, now: float) -> None:
        written = Metered(idle_s=self._idle[session].seconds(now), idle_clock=now)
        self._ledger.update(session, meter=written)


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
