"""Records the runs' meters and bills in the ledger, and computes the pool's budget.

Billed time is measured on the monotonic clock, which all processes of a machine share until it reboots: setting the
wall clock changes no cost. Wall-clock times are recorded for people.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.pool.ledger import Ledger, Metered
from sgpu_magic.pool.scheduling.costs import DAY_S, Budget, Tariff
from sgpu_magic.pool.scheduling.run import ScheduledRun
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.costs import idle_seconds
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.events import Placed, RunEnded
from sgpu_magic.wire.pool_status import BudgetState


class IdleMeter:
    """Measures how long no cell ran in a session, in seconds. All times passed to it must be from the same clock.

    Args:
        since: When it starts to count.
        seconds: The seconds counted before.
    """

    def __init__(self, since: float, seconds: float = 0.0) -> None:
        self._since = since
        self._seconds = seconds
        self._running: set[str] = set()

    def began(self, cell: str, now: float) -> None:
        """Note that a cell begins."""
        self._seconds = self.seconds(now)
        self._running.add(cell)

    def ended(self, cell: str, now: float) -> None:
        """Note that a cell ends."""
        if cell in self._running:
            self._running.discard(cell)
            self._since = now

    def seconds(self, now: float) -> float:
        """Return the idle seconds until now."""
        return self._seconds if self._running else self._seconds + max(0.0, now - self._since)


class Billing:
    """Computes the ledger's entries for the runs' meters, which the scheduler starts and stops.

    Runs in a session are not billed, since the session itself is.

    Args:
        ledger: Where the entries are recorded.
        tariff: The prices of devices.
    """

    def __init__(self, ledger: Ledger, tariff: Tariff) -> None:
        self._ledger = ledger
        self._tariff = tariff
        # idle meters of started sessions, by run ID
        self._idle: dict[str, IdleMeter] = {}

    def price_lease(self, run: ScheduledRun, lease: Lease) -> Metered | None:
        """Return the ledger's entry for the price of a run's lease; None without a price or in a session."""
        hourly = None if run.spec.session else self._tariff.hourly(lease)
        return None if hourly is None else Metered(hourly=hourly, currency=self._tariff.currency)

    def placed_event(self, lease: Lease, host: str, labels: tuple[str, ...]) -> Placed:
        """Return the event for a run's lease; for a cell in a session, with the session's price."""
        hourly = self._tariff.hourly(lease)
        currency = "" if hourly is None else self._tariff.currency
        return Placed(lease=lease, host=host, labels=labels, hourly=hourly, currency=currency)

    def start_meter(self, run: ScheduledRun, state: RunState, wall: float, now: float) -> Metered | None:
        """Return the ledger's entry if the run's meter starts with its move to `state`, else None.

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

    def ranks_started(self, run: ScheduledRun, now: float) -> None:
        """Start a session's idle meter when its ranks have started; pause it when a cell starts in the session."""
        if run.is_session:
            self._idle[run.run_id] = IdleMeter(now)
            self._write_idle(run.run_id, now)
        elif run.spec.session in self._idle:
            self._idle[run.spec.session].began(run.run_id, now)
            self._write_idle(run.spec.session, now)

    def adopted(self, run: ScheduledRun, lease: Lease, launched_at: float, now: float) -> tuple[float, float | None]:
        """Continue the meter that an earlier service started. Returns its start, and its hourly price.

        Args:
            run: An adopted run.
            lease: Its lease.
            launched_at: When its ranks were launched, used if the ledger has no start of the meter.
            now: Monotonic time.
        """
        wall = time.time()
        launched = now - max(0.0, wall - launched_at)
        price = self.price_lease(run, lease)
        hourly = None if price is None else price.hourly
        if (row := self._ledger.summary(run.run_id)) is None:
            return launched, hourly
        if run.spec.session:
            if run.state is RunState.RUNNING:
                self.ranks_started(run, now)
            return launched, None
        # after a reboot only the wall-clock times are valid
        clock, idle_clock = self._ledger.clocks(run.run_id)
        if run.is_session and row.started_at is not None:
            cells = self._ledger.cell_times(run.run_id)
            if row.idle_s is None or idle_clock is None or idle_clock > now:
                idle = IdleMeter(now, idle_seconds(row.started_at, wall, cells))
            else:
                # a session is not idle while a cell runs
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

    def ended(self, run: ScheduledRun, ended: RunEnded, now: float) -> tuple[RunEnded, Metered | None]:
        """Return a run's final event with its bill, and the ledger's entry for it.

        Args:
            run: The run.
            ended: Its final event.
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
        # a session that never started was never idle
        idle_s = 0.0 if idle is None else idle.seconds(now)
        if not run.is_session:
            idle_s = None
        return ended, Metered(gpu_s=due.gpu_s, cost=due.cost, idle_s=idle_s)

    def _write_idle(self, session: str, now: float) -> None:
        self._ledger.update(session, meter=Metered(idle_s=self._idle[session].seconds(now), idle_clock=now))


def budget_of(settings: Settings, ledger: Ledger, now: float, wall: float) -> Budget | None:
    """Return the pool's budget, None if the settings have none.

    Args:
        settings: `budget` and `budget_days`.
        ledger: Has the costs of the pool's runs.
        now: The present on the scheduler's clock.
        wall: The present, seconds since the epoch.
    """
    if not settings.budget:
        return None
    spent = ledger.costs_since(wall - settings.budget_days * DAY_S, settings.currency)
    return Budget(settings.budget, settings.budget_days, [(now - (wall - at), cost) for at, cost in spent])


def budget_state(budget: Budget | None, runs: Iterable[ScheduledRun], currency: str, now: float) -> BudgetState | None:
    """Return the budget's state, including the running cost of the active `runs`."""
    if budget is None:
        return None
    live = sum(run.meter.running_cost(now) for run in runs)
    return BudgetState(limit=budget.limit, days=budget.days, spent=budget.spent(now) + live, currency=currency)
