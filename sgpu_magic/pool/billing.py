"""What is written down of the runs' meters and what they come to; and the pool's budget.

What is billed is counted on the monotonic clock, which all processes of a machine share until it starts anew: no step
of the wall clock changes a cost. Wall-clock times are written down for people.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.pool.ledger import Ledger, Metered
from sgpu_magic.pool.scheduling.costs import DAY_S, Budget, Tariff
from sgpu_magic.pool.scheduling.run import Run
from sgpu_magic.wire.costs import idle_seconds
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.events import Placed, RunEnded
from sgpu_magic.wire.pool_status import BudgetState
from sgpu_magic.wire.states import RunKind, RunState


class IdleMeter:
    """For how long no cell ran in a session; seconds of any one clock.

    Args:
        since: From when on it counts.
        seconds: What was counted before.
    """

    def __init__(self, since: float, seconds: float = 0.0) -> None:
        self._since = since
        self._seconds = seconds
        self._running: set[str] = set()

    def began(self, cell: str, now: float) -> None:
        """A cell begins."""
        self._seconds = self.seconds(now)
        self._running.add(cell)

    def ended(self, cell: str, now: float) -> None:
        """A cell ends."""
        if cell in self._running:
            self._running.discard(cell)
            self._since = now

    def seconds(self, now: float) -> float:
        """Return what was counted until now."""
        return self._seconds if self._running else self._seconds + max(0.0, now - self._since)


class Billing:
    """Says what is written down of the runs' meters, which the scheduler starts and stops.

    What runs in a session is not billed: the session pays.

    Args:
        ledger: Where it is written down.
        tariff: What devices cost.
    """

    def __init__(self, ledger: Ledger, tariff: Tariff) -> None:
        self._ledger = ledger
        self._tariff = tariff
        # of sessions that are connected
        self._idle: dict[str, IdleMeter] = {}

    def placed(self, run: Run, lease: Lease) -> Metered | None:
        """The run has this lease. Returns what is to be written down of its price."""
        hourly = None if run.spec.session else self._tariff.hourly(lease)
        return None if hourly is None else Metered(hourly=hourly, currency=self._tariff.currency)

    def told(self, lease: Lease, host: str, labels: tuple[str, ...]) -> Placed:
        """Return what the run's followers are told of its lease; of a cell in a session what the session pays."""
        hourly = self._tariff.hourly(lease)
        currency = "" if hourly is None else self._tariff.currency
        return Placed(lease=lease, host=host, labels=labels, hourly=hourly, currency=currency)

    def begun(self, run: Run, state: RunState, wall: float, now: float) -> Metered | None:
        """The run moved to `state`. Returns what is to be written down: when its meter began, if it just did.

        Args:
            run: The run.
            state: Its new state.
            wall: Wall-clock time, seconds since the epoch.
            now: Monotonic time.
        """
        since = run.meter.since
        if state is not RunState.STARTING or since is None or run.spec.session:
            return None
        return Metered(metered_at=wall - (now - since), metered_clock=since)

    def ranks_started(self, run: Run, now: float) -> None:
        """The run's ranks are there: a session is idle from now on, or no longer."""
        if run.spec.kind is RunKind.SESSION:
            self._idle[run.run_id] = IdleMeter(now)
            self._write_idle(run.run_id, now)
        elif run.spec.session in self._idle:
            self._idle[run.spec.session].began(run.run_id, now)
            self._write_idle(run.spec.session, now)

    def adopted(self, run: Run, lease: Lease, launched_at: float, now: float) -> tuple[float, float | None]:
        """Go on with the meter that an earlier service began. Returns since when it counts, and at which hourly price.

        Args:
            run: A run that goes on.
            lease: What it has.
            launched_at: When its ranks were launched, where the ledger does not say when its meter began.
            now: Monotonic time.
        """
        wall = time.time()
        launched = now - max(0.0, wall - launched_at)
        price = self.placed(run, lease)
        hourly = None if price is None else price.hourly
        row = self._ledger.summary(run.run_id)
        if row is None:
            return launched, hourly
        if run.spec.session:
            if run.state is RunState.RUNNING:
                self.ranks_started(run, now)
            return launched, None
        # of an earlier version, or of before the machine was started anew: all that is known is the wall clock
        clock, idle_clock = self._ledger.clocks(run.run_id)
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
            hourly = row.hourly
        elif price is not None:
            self._ledger.update(run.run_id, meter=price)
        if row.metered_at is not None:
            return (clock if clock is not None and clock <= now else now - max(0.0, wall - row.metered_at)), hourly
        if run.state is not RunState.PREPARING:
            self._ledger.update(run.run_id, meter=Metered(metered_at=launched_at, metered_clock=launched))
        return launched, hourly

    def ended(self, run: Run, ended: RunEnded, now: float) -> tuple[RunEnded, Metered | None]:
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
        due = None if run.spec.session else run.meter.bill(now)
        if due is None:
            return ended, None
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


def budget_state(budget: Budget | None, runs: Iterable[Run], currency: str, now: float) -> BudgetState | None:
    """Return what is used of it; `runs` are those that go on."""
    if budget is None:
        return None
    live = sum(run.meter.running_cost(now) for run in runs)
    return BudgetState(limit=budget.limit, days=budget.days, spent=budget.spent(now) + live, currency=currency)
