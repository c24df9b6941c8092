"""The answer to `AskStatus`, put together from the scheduler's view and the ledger's rows."""

from __future__ import annotations

import os
import time

import msgspec

from sgpu_magic import __version__
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.scheduler import Scheduler
from sgpu_magic.wire.devices import Inventory
from sgpu_magic.wire.messages import AskStatus
from sgpu_magic.wire.pool_status import BudgetState, PoolStatus, RunSummary

# what two clocks differ by that were not set
_STEP_S = 1.0


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
    began = {run.run_id: wall + run.metered_at for run in scheduler.runs if run.metered_at is not None}
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
