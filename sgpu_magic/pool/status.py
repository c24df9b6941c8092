"""The pool's status for clients: devices, queue, runs and budget; what has changed, for a client that asked before."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from sgpu_magic import __version__
from sgpu_magic.config import Settings
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.billing import budget_state
from sgpu_magic.pool.device_history import DeviceHistories
from sgpu_magic.pool.format_queue import format_remaining, format_wait
from sgpu_magic.pool.health import Health
from sgpu_magic.pool.inventory import FreshInventory
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.lifecycle import Idleness
from sgpu_magic.pool.permissions import Permissions
from sgpu_magic.pool.scheduling.scheduler import Scheduler
from sgpu_magic.pool.server import ConnectedClient, Server
from sgpu_magic.wire.pool_status import AskStatus, PoolStatus, RunSummary, changes_between

# a larger difference between the clocks means that the wall clock was set
_STEP_S = 1.0

_Waiting = tuple[int | None, str]
_Added = tuple[_Waiting | None, float | None, float | None, tuple[int, ...]]
_NOTHING: _Added = (None, None, None, ())


class StatusReports:
    """Answers questions about the status.

    Args:
        settings: The pool's settings.
        server: Where the clients are connected.
        ledger: The rows of all runs.
        scheduler: Decides which run gets which devices.
        active: The submitted runs whose ranks are not gone.
        engine: Knows the agent of this machine.
        stock: The newest inventory of the nodes.
        histories: The use of the devices in the last minutes.
        health: Why no new run is started.
        permissions: What each client may see.
        idleness: Knows when the idle pool ends.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        server: Server,
        ledger: Ledger,
        scheduler: Scheduler,
        active: ActiveRuns,
        engine: Engine,
        stock: FreshInventory,
        histories: DeviceHistories,
        health: Health,
        permissions: Permissions,
        idleness: Idleness,
    ) -> None:
        self._settings = settings
        self._server = server
        self._ledger = ledger
        self._scheduler = scheduler
        self._active = active
        self._engine = engine
        self._stock = stock
        self._histories = histories
        self._health = health
        self._permissions = permissions
        self._idleness = idleness
        self._started_at = time.time()
        self._versions = itertools.count(1)
        self._rows = RowsWithTimes()

    def answer(self, client: ConnectedClient, question: AskStatus) -> None:
        """Send a client the status, or its changes since the last one if it still has that."""
        last = client.status
        status = client.status = self._permissions.visible_status(client, self._status(question))
        reply = changes_between(last, status) if last is not None and question.known == last.version else status
        if question.history > 0:
            # added last, as it is not part of what the next status is compared with
            reply = replace(reply, history=self._histories.all_histories(question.history, time.monotonic()))
        self._server.send(client, reply)

    def _status(self, question: AskStatus) -> PoolStatus:
        """Return the status, newest runs first, with queue positions and the end times of idle sessions."""
        scheduler = self._scheduler
        waiting: dict[str, _Waiting] = {
            run_id: (None, format_remaining(ranks)) for run_id, ranks in scheduler.remaining_ranks().items()
        }
        waiting |= {run_id: (at.position, format_wait(at.reason)) for run_id, at in scheduler.statuses().items()}
        rows = self._ledger.recent(question.recent)
        if question.recent:
            # active runs are shown even if more recent runs exceed the limit
            listed = {row.run_id for row in rows}
            rows += self._ledger.summaries([run.run_id for run in reversed(scheduler.runs) if run.run_id not in listed])
        # rounded to the second, so that converting between the clocks yields the same time in each status
        wall = time.time() - time.monotonic()
        quiet = {run.run_id: scheduler.quiet_until(run) for run in scheduler.runs if run.quiet_since is not None}
        ends = {session: float(round(wall + until)) for session, until in quiet.items() if until is not None}
        nodes = "" if self._stock.is_known else "its nodes have not answered yet"
        began = {run.run_id: wall + run.meter.since for run in scheduler.runs if run.meter.since is not None}
        logs = {run.run_id: run.log for run in self._active.going}
        dead = {run_id: log.dead_ranks for run_id, log in logs.items() if log is not None}
        return PoolStatus(
            request=question.request,
            pool=self._settings.pool or "local",
            pid=os.getpid(),
            agent_pid=self._engine.agent_pid,
            package_version=__version__,
            started_at=self._started_at,
            inventory=self._stock.inventory,
            cpu_slots_free=scheduler.cpu_slots_free,
            runs=self._rows.complete(rows, waiting, ends, began, dead),
            clients=len(self._server.clients),
            problem="; ".join(text for text in (self._health.problem, self._ledger.problem, nodes) if text) or None,
            idle_ends_at=self._idleness.ends_at,
            budget=budget_state(scheduler.budget, scheduler.runs, self._settings.currency, time.monotonic()),
            version=str(next(self._versions)),
        )


class RowsWithTimes:
    """Adds to rows of the ledger what only the scheduler knows. Rows with the same additions stay the same objects."""

    def __init__(self) -> None:
        # (ledger's row, what was added to it, result) by run
        self._made: dict[str, tuple[RunSummary, _Added, RunSummary]] = {}

    def complete(
        self,
        rows: Iterable[RunSummary],
        waiting: Mapping[str, _Waiting],
        ends: Mapping[str, float],
        began: Mapping[str, float],
        dead: Mapping[str, tuple[int, ...]],
    ) -> tuple[RunSummary, ...]:
        """Return the rows, in the same order.

        Args:
            rows: Rows of the ledger.
            waiting: Queue position and reason, by run; for a run whose ranks do not end, which those are.
            ends: When idle sessions end, seconds since the epoch, by run.
            began: When metering began by the clock of now, seconds since the epoch, by run.
            dead: Dead ranks of sessions, by run.
        """
        made: dict[str, tuple[RunSummary, _Added, RunSummary]] = {}
        out: list[RunSummary] = []
        for row in rows:
            run_id = row.run_id
            metered = began.get(run_id)
            # the wall clock was set: with this time, the duration up to now is the billed one
            moved = metered is not None and row.metered_at is not None and abs(metered - row.metered_at) > _STEP_S
            added = waiting.get(run_id), ends.get(run_id), metered if moved else None, dead.get(run_id, ())
            if added != _NOTHING:
                if (last := self._made.get(run_id)) is None or last[0] is not row or last[1] != added:
                    last = (row, added, _with(row, *added))
                made[run_id] = last
                row = last[2]
            out.append(row)
        self._made = made
        return tuple(out)


def _with(
    row: RunSummary,
    waiting: _Waiting | None,
    idle_ends_at: float | None,
    metered_at: float | None,
    dead_ranks: tuple[int, ...],
) -> RunSummary:
    position, waiting_for = waiting or (None, "")
    return replace(
        row,
        metered_at=row.metered_at if metered_at is None else metered_at,
        position=position,
        waiting_for=waiting_for,
        idle_ends_at=idle_ends_at,
        dead_ranks=dead_ranks,
    )
