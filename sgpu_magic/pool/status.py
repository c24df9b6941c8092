"""The newest inventory of the nodes, and the pool's status for those who ask."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import msgspec

from sgpu_magic import __version__
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.scheduling.scheduler import Scheduler
from sgpu_magic.wire.devices import Inventory
from sgpu_magic.wire.pool_status import AskStatus, BudgetState, PoolStatus, RunSummary

# an inventory older than this is taken anew before a run is placed on real devices
_FRESH_S = 2.0
# what two clocks differ by that were not set
_STEP_S = 1.0


class FreshInventory:
    """Of one pool.

    Args:
        take: Asks the nodes; the answer comes by `taken`.

    Attributes:
        inventory: The newest; None before the first.
    """

    def __init__(self, take: Callable[[], None]) -> None:
        self._take = take
        self.inventory: Inventory | None = None
        self._at = 0.0
        self._waiting: list[Callable[[], None]] = []

    @property
    def host(self) -> str:
        """The machine, or the name of the cluster; "" before it is known."""
        return self.inventory.host if self.inventory is not None else ""

    def taken(self, inventory: Inventory) -> list[Callable[[], None]]:
        """This is the newest. Returns whom it is to be told by a call."""
        self.inventory = inventory
        self._at = time.monotonic()
        waiting, self._waiting = self._waiting, []
        return waiting

    def when_fresh(self, call: Callable[[], None]) -> None:
        """Call at once where nothing can have changed, else once the nodes have been asked again.

        Real devices may be in use outside the pool since the last look.
        """
        inventory = self.inventory
        if inventory is not None and (
            all(device.simulated for device in inventory.devices) or time.monotonic() - self._at < _FRESH_S
        ):
            call()
            return
        if inventory is not None and not self._waiting:
            self._take()
        self._waiting.append(call)


def pool_status(
    question: AskStatus,
    inventory: Inventory,
    scheduler: Scheduler,
    ledger: Ledger,
    *,
    name: str,
    started_at: float,
    clients: int,
    idle_ends_at: float | None,
    budget: BudgetState | None,
) -> PoolStatus:
    """Newest runs first; those that wait carry their position and what they wait for, idle sessions when they end."""
    waiting = scheduler.waiting()
    rows = ledger.recent(question.recent)
    if question.recent:
        # a run that goes on is shown however many have come after it
        listed = {row.run_id for row in rows}
        rows += ledger.summaries([run.run_id for run in reversed(scheduler.runs) if run.run_id not in listed])
    # to the second: the scheduler's clock is another one, and the time is not to change from look to look
    wall = time.time() - time.monotonic()
    quiet = {run.run_id: scheduler.quiet_until(run.run_id) for run in scheduler.runs if run.quiet_since is not None}
    ends = {session: round(wall + until) for session, until in quiet.items() if until is not None}
    began = {run.run_id: wall + run.meter.since for run in scheduler.runs if run.meter.since is not None}
    runs = tuple(_with_times(row, waiting.get(row.run_id), ends.get(row.run_id), began.get(row.run_id)) for row in rows)
    return PoolStatus(
        request=question.request,
        pool=name,
        pid=os.getpid(),
        package_version=__version__,
        started_at=started_at,
        inventory=inventory,
        cpu_slots_free=scheduler.cpu_slots_free,
        runs=runs,
        clients=clients,
        problem=ledger.problem,
        idle_ends_at=idle_ends_at,
        budget=budget,
    )


def _with_times(
    row: RunSummary, told: tuple[int, str] | None, idle_ends_at: float | None, metered_at: float | None
) -> RunSummary:
    if metered_at is not None and row.metered_at is not None and abs(metered_at - row.metered_at) > _STEP_S:
        # the wall clock was set anew: what a reader counts up to now is what is billed
        row = msgspec.structs.replace(row, metered_at=metered_at)
    if told is not None:
        row = msgspec.structs.replace(row, position=told[0], waiting_for=told[1])
    return row if idle_ends_at is None else msgspec.structs.replace(row, idle_ends_at=float(idle_ends_at))
