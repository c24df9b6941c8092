"""The meters of a pool's runs: when they begin, what is written down of them, what they come to."""

from __future__ import annotations

from typing import Protocol

import msgspec

from sgpu_magic.pool import meter
from sgpu_magic.pool.ledger import Ledger, Metered
from sgpu_magic.pool.prices import Tariff
from sgpu_magic.protocol.devices import Lease
from sgpu_magic.protocol.events import Placed, RunEnded
from sgpu_magic.protocol.metering import idle_seconds
from sgpu_magic.protocol.records import RunSpec
from sgpu_magic.protocol.states import RunKind, RunState


class OnMeter(Protocol):
    """A run of the pool, as `PoolRun` has it."""

    lease: Lease | None
    hourly: float | None
    metered_at: float | None
    metered_s: float

    @property
    def run_id(self) -> str: ...
    @property
    def spec(self) -> RunSpec: ...


class Billing:
    """Keeps the meters. What runs in a session has none: the session pays.

    Args:
        ledger: Where they are written down.
        tariff: What devices cost.
    """

    def __init__(self, ledger: Ledger, tariff: Tariff) -> None:
        self._ledger = ledger
        self._tariff = tariff

    def placed(self, run: OnMeter, lease: Lease) -> Metered | None:
        """The run has this lease. Returns what is to be written down."""
        run.lease = lease
        run.hourly = None if run.spec.session else self._tariff.hourly(lease)
        return None if run.hourly is None else Metered(hourly=run.hourly, currency=self._tariff.currency)

    def told(self, lease: Lease, host: str, labels: tuple[str, ...]) -> Placed:
        """Return what the run's followers are told of its lease; of a cell in a session what the session pays."""
        hourly = self._tariff.hourly(lease)
        currency = "" if hourly is None else self._tariff.currency
        return Placed(lease=lease, host=host, labels=labels, hourly=hourly, currency=currency)

    def begun(self, run: OnMeter, state: RunState, now: float) -> Metered | None:
        """The run moved to `state`. Returns what is to be written down: that its meter begins, if it does.

        Args:
            run: The run.
            state: Its new state.
            now: Wall-clock time, seconds since the epoch.
        """
        if state is not RunState.STARTING or run.metered_at is not None or run.spec.session:
            return None
        run.metered_at = now
        return Metered(metered_at=now)

    def paused(self, run: OnMeter, now: float) -> None:
        """The run has lost its devices and waits for others: that costs nothing."""
        if run.metered_at is not None:
            run.metered_s += now - run.metered_at
            run.metered_at = None

    def adopted(self, run: OnMeter, lease: Lease, started_at: float, state: RunState) -> None:
        """Go on with the meter that an earlier service began.

        Args:
            run: A run that goes on.
            lease: What it has.
            started_at: When its ranks were launched, where the ledger does not say when its meter began.
            state: Where it is.
        """
        price = self.placed(run, lease)
        row = self._ledger.summary(run.run_id)
        if run.spec.session or row is None:
            return
        if row.hourly is not None:
            run.hourly = row.hourly
        elif price is not None:
            self._ledger.update(run.run_id, meter=price)
        run.metered_at = row.metered_at
        if run.metered_at is None and state is not RunState.PREPARING:
            self._ledger.update(run.run_id, meter=self.begun(run, RunState.STARTING, started_at))

    def ended(self, run: OnMeter, ended: RunEnded, at: float) -> tuple[RunEnded, Metered | None]:
        """Return a run's last word with what it was billed, and what is to be written down of that.

        Args:
            run: The run.
            ended: Its last word.
            at: When it ended, seconds since the epoch.
        """
        seconds = run.metered_s + (0.0 if run.metered_at is None else at - run.metered_at)
        if run.lease is None or (run.metered_at is None and not seconds):
            return ended, None
        due = meter.bill(run.lease, run.hourly, seconds)
        currency = "" if due.cost is None else self._tariff.currency
        ended = msgspec.structs.replace(ended, gpu_s=due.gpu_s, cost=due.cost, currency=currency)
        idle_s = self._idle_s(run.run_id, at) if run.spec.kind is RunKind.SESSION else None
        return ended, Metered(gpu_s=due.gpu_s, cost=due.cost, idle_s=idle_s)

    def _idle_s(self, session: str, at: float) -> float:
        row = self._ledger.summary(session)
        if row is None or row.started_at is None:
            # never connected: it had no time for cells
            return 0.0
        return idle_seconds(row.started_at, at, self._ledger.cell_times(session))
