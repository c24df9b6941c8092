"""The ledger's file, read only: beside a living pool, and when there is none."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from sgpu_magic.client.local_pool import find_pool
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError
from sgpu_magic.wire.pool_status import RunSummary, agent_socket_file
from sgpu_magic.wire.states import RunState

_BUSY_TIMEOUT_S = 2.0
# what two clocks differ by that were not set
_STEP_S = 1.0
_FIELDS = frozenset(field.name for field in msgspec.structs.fields(RunSummary))
LOST = "the pool service ended while the run was going on"


def recent_runs(settings: Settings, limit: int | None) -> list[RunSummary]:
    """Return the runs submitted last, newest first; all of them when `limit` is None.

    Raises:
        PoolError: There is a ledger but it can't be read.
    """
    return _read(settings, "ORDER BY seq DESC LIMIT ?", (-1 if limit is None else limit,))


def runs_since(settings: Settings, since: float) -> list[RunSummary]:
    """Return the runs that have ended since a time, in seconds since the epoch, or not yet, newest first.

    Raises:
        PoolError: There is a ledger but it can't be read.
    """
    return _read(settings, "WHERE ended_at IS NULL OR ended_at >= ? ORDER BY seq DESC", (since,))


def find_run(settings: Settings, run_id: str) -> RunSummary | None:
    """Return a run's row, None when the ledger does not have it.

    Raises:
        PoolError: There is a ledger but it can't be read.
    """
    rows = _read(settings, "WHERE run_id = ?", (run_id,))
    return rows[0] if rows else None


def _read(settings: Settings, rest: str, values: Sequence[str | int | float]) -> list[RunSummary]:
    path = settings.state_path / "ledger.sqlite3"
    if not path.exists():
        return []
    try:
        # a ledger that was closed well is all in one file, and reading it must not leave others beside it
        closed = not path.with_name(f"{path.name}-wal").exists()
        uri = f"file:{quote(str(path))}?mode=ro" + ("&immutable=1" if closed else "")
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S)) as database:
            database.row_factory = sqlite3.Row
            # every column that it has: an older or newer schema is read as far as it goes
            rows = [dict(row) for row in database.execute(f"SELECT * FROM runs {rest}", values)]
        held = find_pool(settings) is not None or _agent_waits(settings)
        _bring_up_to_now(rows)
        return [_summary(row, held=held) for row in rows]
    except (sqlite3.Error, msgspec.ValidationError, ValueError) as error:
        raise PoolError(
            f"the pool's ledger {path} can't be read: {error}. The next pool mends it or moves it aside."
        ) from error


def _agent_waits(settings: Settings) -> bool:
    """Whether the agent of a pool that was killed still has its runs, for the next pool to take over.

    Asked of the system and not of the agent, which would take this for that pool.
    """
    path = agent_socket_file(settings.runtime_path)
    try:
        return any(line.split()[-1] == str(path) for line in Path("/proc/net/unix").read_text().splitlines())
    except OSError:
        # no Linux: it takes its socket away when it ends, unless it is killed too
        return path.exists()


def _bring_up_to_now(rows: Sequence[dict[str, Any]]) -> None:
    """Let what is counted from the rows of runs that go on be what their pool counts, whatever the clock was set to."""
    wall, clock = time.time(), time.monotonic()
    going = [row for row in rows if row.get("ended_at") is None]
    in_cells = {row.get("session") for row in going if row["started_at"] is not None}
    for row in going:
        began, idle_at = row.get("metered_clock"), row.get("idle_clock")
        # else the machine was started anew
        if began is not None and began <= clock and abs(wall - clock + began - row["metered_at"]) > _STEP_S:
            row["metered_at"] = wall - clock + began
        if idle_at is not None and idle_at <= clock and row["run_id"] not in in_cells:
            row["idle_s"] += clock - idle_at


def _summary(row: dict[str, Any], *, held: bool) -> RunSummary:
    known = {name: value for name, value in row.items() if name in _FIELDS}
    known["uuids"] = json.loads(row.get("uuids", "[]"))
    known["simulated"] = bool(row.get("simulated", 0))
    run = msgspec.convert(known, RunSummary)
    if held or run.state.is_final:
        return run
    # what the next pool will write down: nobody can still be at it
    return msgspec.structs.replace(run, state=RunState.FAILED, failure=run.failure or LOST)
