"""The ledger: a row for every run of this pool, in SQLite, so that runs can be listed and resumed later.

It is only a record: a ledger that can't be written does not fail a run, but sets `Ledger.problem`. The thread that
opened it owns it; sqlite3 refuses any other.

A commit takes too long for a cell of a few milliseconds in a session. The cell's events are on disk before followers
get them; its row is written within `_WRITE_S`, together with all other pending rows in one transaction. A service that
is killed in between leaves a run without a row: the service that adopts it, or gets it resubmitted, records it. Rows
that a full disk rejects stay pending too. Queries include pending rows and changes.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from sgpu_magic.pool.ledger_database import LedgerDatabase, Statement
from sgpu_magic.system.processes import write_log
from sgpu_magic.wire.base import RunState, check_id
from sgpu_magic.wire.decoding import convert, load_json
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.pool_status import RunSummary
from sgpu_magic.wire.run import RunSpec

# known only while the run is active, and not recorded
_PASSING = ("position", "waiting_for", "idle_ends_at", "dead_ranks")
_NAMES = [name for name in RunSummary.__struct_fields__ if name not in _PASSING]
_COLUMNS = ", ".join(_NAMES)
FINAL = tuple(state.value for state in RunState if state.is_final)
_PREFIX = re.compile(r"[0-9a-f]{1,8}")

_WRITE_S = 0.05
_CACHED_ROWS = 5000
# retry interval after a failed write
_WRITE_AGAIN_S = 1.0
# columns that each cell changes in its session's row
_OF_EACH_CELL = {"idle_s", "idle_clock"}

RowChanges = dict[str, Any]
"""Values (str, int, float, None) by column; other columns stay as they are."""


class Metered(msgspec.Struct, frozen=True):
    """Changes to a run's meter; None leaves a value as it is. Fields as in `RunSummary`.

    Args:
        idle_s: Idle seconds; of an active session up to `idle_clock`, when a cell last began or ended in it.
        metered_clock: `metered_at` on the monotonic clock.
        idle_clock: Monotonic time.
    """

    metered_at: float | None = None
    hourly: float | None = None
    currency: str | None = None
    gpu_s: float | None = None
    cost: float | None = None
    idle_s: float | None = None
    metered_clock: float | None = None
    idle_clock: float | None = None


class Ledger:
    """The ledger in the file `path`.

    Args:
        path: As for `LedgerDatabase`.
        loop: Event loop in which rows of cells in sessions are written with a delay; None writes them at once.
        cached_rows: Number of rows in the cache, which is cleared when it has more.

    Raises:
        PoolError: The file can't be created or opened.
    """

    def __init__(
        self, path: Path, loop: asyncio.AbstractEventLoop | None = None, *, cached_rows: int = _CACHED_ROWS
    ) -> None:
        self._cached_rows = cached_rows
        self._database = LedgerDatabase(path)
        self._loop = loop
        # new rows and row changes that are not in the database yet
        self._new: dict[str, RowChanges] = {}
        self._changes: dict[str, RowChanges] = {}
        # cached rows; an entry is dropped when its row changes
        self._known: dict[str, RunSummary] = {}
        self._timer: asyncio.TimerHandle | None = None
        # runs in sessions whose rows may still change: their changes are delayed
        self._later: set[str] = set()

    @property
    def problem(self) -> str:
        """What is wrong with the database, for a person; "" when nothing is."""
        return self._database.problem

    def record(self, spec: RunSpec, state: RunState) -> None:
        """Record a new run.

        Raises:
            ValueError: Its ID is invalid, or is already in the ledger.
        """
        row = _new_row(spec, state)
        if self.has(spec.run_id):
            raise ValueError(f"run {spec.run_id} is in the ledger already")
        waits = spec.in_session and self._loop is not None
        if waits:
            self._later.add(spec.run_id)
        elif self._database.write(_insertion(row)):
            return
        self._new[spec.run_id] = row
        self._write_in(_WRITE_S if waits else _WRITE_AGAIN_S)

    def update(
        self, run_id: str, *, lease: Lease | None = None, meter: Metered | None = None, **values: str | float | None
    ) -> None:
        """Update a run's row with the given values, except those that are None. Does nothing for an unknown run.

        Args:
            run_id: The run.
            lease: Its lease.
            meter: Changes to its meter.
            values: `state`, `started_at`, `ended_at` and `failure`, as in `RunSummary`.

        Raises:
            ValueError: `run_id` is not a run ID.
        """
        if lease is not None:
            values |= {"device_type": lease.device_type, "simulated": lease.simulated, "uuids": json.dumps(lease.uuids)}
        if meter is not None:
            values |= msgspec.structs.asdict(meter)
        self._change(check_id(run_id), {name: value for name, value in values.items() if value is not None})

    def summary(self, run_id: str) -> RunSummary | None:
        """Return the run's row, None when the ledger does not have it."""
        return next(iter(self.summaries([run_id])), None)

    def summaries(self, run_ids: Sequence[str]) -> list[RunSummary]:
        """Return the rows of these runs, in this order, without those that the ledger does not have."""
        sql = f"SELECT {_COLUMNS} FROM runs WHERE run_id IN (SELECT value FROM json_each(?))"
        if len(self._known) > self._cached_rows:
            self._known.clear()
        if unknown := [run_id for run_id in run_ids if run_id not in self._known]:
            written = [dict(zip(_NAMES, row, strict=True)) for row in self._rows(sql, json.dumps(unknown))]
            for row in (*written, *self._new.values()):
                try:
                    self._known[row["run_id"]] = _summary_of(row | self._changes.get(row["run_id"], {}))
                except msgspec.DecodeError as error:
                    # one damaged row must not hide the others
                    write_log(f"the row of run {row['run_id']} in the ledger can't be read: {error}\n")
        return [self._known[run_id] for run_id in run_ids if run_id in self._known]

    def find(self, prefix: str) -> list[str]:
        """Return the run IDs that begin with `prefix`, newest first."""
        if _PREFIX.fullmatch(prefix) is None:
            return []
        # "g" sorts after every hexadecimal digit; a range uses the ID's index where LIKE would not
        sql = "SELECT run_id FROM runs WHERE run_id >= ? AND run_id < ? ORDER BY seq DESC"
        written = [row[0] for row in self._rows(sql, prefix, prefix + "g")]
        return [run_id for run_id in reversed(self._new) if run_id.startswith(prefix)] + written

    def recent(self, limit: int) -> list[RunSummary]:
        """Return the rows of the `limit` runs submitted last, newest first."""
        limit = max(0, limit)
        written = [row[0] for row in self._rows("SELECT run_id FROM runs ORDER BY seq DESC LIMIT ?", limit)]
        return self.summaries([*reversed(self._new), *written][:limit])

    def unfinished(self) -> list[str]:
        """Return the runs that are not in a final state, oldest first: at startup, those that a dead service left."""
        marks = ", ".join("?" * len(FINAL))
        sql = f"SELECT run_id FROM runs WHERE state NOT IN ({marks}) ORDER BY seq"
        return [row[0] for row in self._rows(sql, *FINAL)]

    def cells(self) -> list[str]:
        """Return the IDs of runs in sessions, oldest first."""
        return [row[0] for row in self._database.rows("SELECT run_id FROM runs WHERE session != '' ORDER BY seq")]

    def cell_times(self, session: str) -> list[tuple[float, float | None]]:
        """Return when each started cell of a session began and ended; the end of an active cell is None."""
        sql = "SELECT started_at, ended_at FROM runs WHERE session = ? AND session != '' AND started_at IS NOT NULL"
        return [(began, ended) for began, ended in self._rows(sql, session)]

    def clocks(self, run_id: str) -> tuple[float | None, float | None]:
        """Return the run's `metered_clock` and `idle_clock`, or None; they may be from before a reboot."""
        rows = self._database.rows("SELECT metered_clock, idle_clock FROM runs WHERE run_id = ?", (run_id,))
        return rows[0] if rows else (None, None)

    def costs_since(self, since: float, currency: str) -> list[tuple[float, float]]:
        """Return (end time, cost) of the runs that ended after `since`, seconds since the epoch; oldest first."""
        sql = (
            "SELECT ended_at, cost FROM runs WHERE cost IS NOT NULL AND ended_at > ? AND currency = ? ORDER BY ended_at"
        )
        return [(ended, cost) for ended, cost in self._database.rows(sql, (since, currency))]

    def has(self, run_id: str) -> bool:
        """Whether the run was recorded. Does not write pending rows."""
        waits = run_id in self._later or run_id in self._new
        return waits or bool(self._database.rows("SELECT 1 FROM runs WHERE run_id = ?", (run_id,)))

    def close(self) -> None:
        """Write pending rows and close the database."""
        self.write()
        if self._timer is not None:
            self._timer.cancel()
        self._database.close()

    def write(self) -> None:
        """Write pending rows and changes."""
        if not self._new and not self._changes:
            return
        statements = [_insertion(row) for row in self._new.values()]
        statements += [_update(run_id, changes) for run_id, changes in self._changes.items()]
        if not self._database.write(*statements):
            self._write_in(_WRITE_AGAIN_S)
            return
        self._later -= {run_id for run_id, changes in self._changes.items() if changes.get("state") in FINAL}
        self._new, self._changes = {}, {}

    def checkpoint(self) -> None:
        """Checkpoint the write-ahead log if it is large. Blocks until the disk has it."""
        self._database.checkpoint()

    def checkpoint_in_background(self) -> None:
        """Checkpoint from another thread, while changes are written."""
        self._database.checkpoint_in_background()

    # ------------------------------------------------------------ internals

    def _rows(self, sql: str, *values: str | int) -> list[Any]:
        """Run a query, after trying to write what is pending."""
        self.write()
        return self._database.rows(sql, values)

    def _change(self, run_id: str, changes: RowChanges) -> None:
        """Change columns of a row, now or with a delay."""
        self._known.pop(run_id, None)
        waits = run_id in self._later or run_id in self._new or run_id in self._changes
        waits = waits or (changes.keys() == _OF_EACH_CELL and self._loop is not None)
        if not changes or (not waits and self._database.write(_update(run_id, changes))):
            return
        self._changes.setdefault(run_id, {}).update(changes)
        self._write_in(_WRITE_S if waits else _WRITE_AGAIN_S)

    def _write_in(self, seconds: float) -> None:
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(seconds, self._write_due)

    def _write_due(self) -> None:
        self._timer = None
        self.write()


def _new_row(spec: RunSpec, state: RunState) -> RowChanges:
    """Return a new run's row.

    Raises:
        ValueError: Its ID is invalid.
    """
    return {
        "run_id": check_id(spec.run_id),
        "name": spec.name,
        "ranks": spec.placement.ranks,
        "device_type": spec.placement.device_type,
        "state": state.value,
        "submitted_at": spec.submitted_at,
        "owner_pid": spec.owner.pid,
        "notebook": spec.owner.notebook,
        "kind": spec.kind.value,
        "session": spec.session,
        "kernel": spec.owner.kernel,
        "user": spec.owner.user,
    }


def _insertion(row: RowChanges) -> Statement:
    """Return the statement that adds a row, unless the run already has one."""
    sql = f"INSERT OR IGNORE INTO runs ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"
    return sql, tuple(row.values())


def _update(run_id: str, changes: RowChanges) -> Statement:
    """Return the statement that changes a row."""
    columns = ", ".join(f"{column} = ?" for column in changes)
    return f"UPDATE runs SET {columns} WHERE run_id = ?", (*changes.values(), run_id)


def _summary_of(row: RowChanges) -> RunSummary:
    """Convert a row; missing columns get their defaults."""
    values = {name: value for name, value in row.items() if name in _NAMES}
    values["uuids"] = load_json(values.get("uuids") or "[]")
    return convert({"simulated": False} | values, RunSummary, strict=False)


def in_one_line(ended: RunEnded) -> str:
    """Return a run's end in one line: `rank 1: ValueError: NaN in batch 118`, who cancelled it, or what was cut off."""
    if (failure := ended.failure) is None:
        work = [f"rank {each.rank}: {one.kind} {one.name}" for each in ended.cut_off for one in each.work[:1]]
        return ended.reason or (f"cut off: {'; '.join(work)}" if ended.cut_off else "")
    message = failure.message.splitlines()[0] if failure.message else ""
    name = failure.type_name.rpartition(".")[2]
    text = f"{name}: {message}" if name else message
    return f"rank {failure.rank}: {text}" if failure.rank is not None and name else text
