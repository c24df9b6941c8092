"""The pool's status for clients: devices, queue, runs and budget; what has changed, for a client that asked before."""

from __future__ import annotations

import itertools
import os
import time

from msgspec.structs import replace

from sgpu_magic import __version__
from sgpu_magic.pool.billing import budget_state
from sgpu_magic.pool.lifecycle import Idleness
from sgpu_magic.pool.parts import PoolParts
from sgpu_magic.pool.permissions import Permissions
from sgpu_magic.pool.server import ConnectedClient
from sgpu_magic.wire.devices import Inventory
from sgpu_magic.wire.pool_status import AskStatus, PoolStatus, RunSummary, changes_between

# a larger difference between the clocks means that the wall clock was set
_STEP_S = 1.0


class StatusReports:
    """Answers questions about the status.

    Args:
        pool: The service's shared parts.
        permissions: What each client may see.
        idleness: Knows when the idle pool ends.
    """

    def __init__(self, pool: PoolParts, permissions: Permissions, idleness: Idleness) -> None:
        self._pool = pool
        self._permissions = permissions
        self._idleness = idleness
        self._started_at = time.time()
        self._versions = itertools.count(1)

    def tell(self, client: ConnectedClient, question: AskStatus) -> None:
        """Send a client the status, or its changes since the last one if it still has that."""
        last = client.status
        status = client.status = self._permissions.shown(client, self._status(question))
        knows = last is not None and question.known == last.version
        self._pool.server.send(client, changes_between(last, status) if last is not None and knows else status)

    def _status(self, question: AskStatus) -> PoolStatus:
        """Return the status, newest runs first, with queue positions and the end times of idle sessions."""
        pool, scheduler = self._pool, self._pool.scheduler
        waiting = scheduler.waiting()
        rows = pool.ledger.recent(question.recent)
        if question.recent:
            # active runs are shown even if more recent runs exceed the limit
            listed = {row.run_id for row in rows}
            rows += pool.ledger.summaries([run.run_id for run in reversed(scheduler.runs) if run.run_id not in listed])
        # rounded to the second, so that converting between the clocks yields the same time in each status
        wall = time.time() - time.monotonic()
        quiet = {run.run_id: scheduler.quiet_until(run.run_id) for run in scheduler.runs if run.quiet_since is not None}
        ends = {session: round(wall + until) for session, until in quiet.items() if until is not None}
        began = {run.run_id: wall + run.meter.since for run in scheduler.runs if run.meter.since is not None}
        return PoolStatus(
            request=question.request,
            pool=pool.settings.pool or "local",
            pid=os.getpid(),
            package_version=__version__,
            started_at=self._started_at,
            inventory=pool.stock.inventory or Inventory(host=""),
            cpu_slots_free=scheduler.cpu_slots_free,
            runs=tuple(
                _with_times(row, waiting.get(row.run_id), ends.get(row.run_id), began.get(row.run_id)) for row in rows
            ),
            clients=len(pool.server.clients),
            problem=pool.ledger.problem,
            idle_ends_at=self._idleness.ends_at,
            budget=budget_state(scheduler.budget, scheduler.runs, pool.settings.currency, time.monotonic()),
            version=str(next(self._versions)),
        )


def _with_times(
    row: RunSummary, told: tuple[int, str] | None, idle_ends_at: float | None, metered_at: float | None
) -> RunSummary:
    changes: dict[str, object] = {}
    if metered_at is not None and row.metered_at is not None and abs(metered_at - row.metered_at) > _STEP_S:
        # the wall clock was set: with this time, the duration up to now is the billed one
        changes["metered_at"] = metered_at
    if told is not None:
        changes["position"], changes["waiting_for"] = told
    if idle_ends_at is not None:
        changes["idle_ends_at"] = float(idle_ends_at)
    return replace(row, **changes) if changes else row
