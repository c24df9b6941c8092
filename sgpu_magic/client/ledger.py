"""Reads the local ledger, with or without a running pool, and computes usage from it."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from sgpu_magic.client.this_machine import agent_path, has_pool
from sgpu_magic.config import Settings
from sgpu_magic.config.pool_terms import read_prices
from sgpu_magic.errors import PoolError, UsageError
from sgpu_magic.wire.base import RunKind, RunState, short
from sgpu_magic.wire.costs import HOUR_S, Prices, cost_so_far, gpu_s_so_far, idle_seconds
from sgpu_magic.wire.decoding import convert, load_json
from sgpu_magic.wire.devices import CPU
from sgpu_magic.wire.pool_status import RunSummary

_BUSY_TIMEOUT_S = 2.0
# a larger difference between two clocks means that the wall clock was set
_STEP_S = 1.0
_FIELDS = frozenset(field.name for field in msgspec.structs.fields(RunSummary))
LOST = "the pool service ended while the run was active"
_UNITS = {"s": 1.0, "m": 60.0, "h": HOUR_S, "d": 24 * HOUR_S, "w": 7 * 24 * HOUR_S}
_SINCE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_POOL = "local"


def recent_runs(settings: Settings, limit: int | None) -> list[RunSummary]:
    """Return the runs submitted last, newest first; all if `limit` is None.

    Raises:
        PoolError: There is a ledger but it can't be read.
    """
    return _read(settings, "ORDER BY seq DESC LIMIT ?", (-1 if limit is None else limit,))


def runs_since(settings: Settings, since: float) -> list[RunSummary]:
    """Return the runs that are active or ended since a time, in seconds since the epoch; newest first.

    Raises:
        PoolError: There is a ledger but it can't be read.
    """
    return _read(settings, "WHERE ended_at IS NULL OR ended_at >= ? ORDER BY seq DESC", (since,))


def find_run(settings: Settings, run_id: str) -> RunSummary | None:
    """Return a run's row, None if the ledger does not have it.

    Raises:
        PoolError: There is a ledger but it can't be read.
    """
    return next(iter(_read(settings, "WHERE run_id = ?", (run_id,))), None)


def _read(settings: Settings, rest: str, values: Sequence[str | int | float]) -> list[RunSummary]:
    path = settings.state_path / "ledger.sqlite3"
    if not path.exists():
        return []
    try:
        # a cleanly closed ledger is one file, and reading it must not create others beside it
        closed = not path.with_name(f"{path.name}-wal").exists()
        uri = f"file:{quote(str(path))}?mode=ro" + ("&immutable=1" if closed else "")
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S)) as database:
            database.row_factory = sqlite3.Row
            # all columns: a pool of another version may have another schema
            rows = [dict(row) for row in database.execute(f"SELECT * FROM runs {rest}", values)]
        held = has_pool(settings) or _agent_waits(settings)
        _bring_up_to_now(rows)
        return [_summary(row, held=held) for row in rows]
    except (sqlite3.Error, msgspec.DecodeError, ValueError) as error:
        raise PoolError(
            f"the pool's ledger {path} can't be read: {error}. The next pool repairs it or moves it aside."
        ) from error


def _agent_waits(settings: Settings) -> bool:
    """Whether the agent of a killed pool still holds its runs, for the next pool to take over.

    The check does not connect to the agent, which would take this process for that pool.
    """
    path = agent_path(settings)
    try:
        return any(line.split()[-1] == str(path) for line in Path("/proc/net/unix").read_text().splitlines())
    except OSError:
        # not on Linux: an agent removes its socket when it exits, unless it is killed too
        return path.exists()


def _bring_up_to_now(rows: Sequence[dict[str, Any]]) -> None:
    """Correct the times of active runs by the monotonic clock, as their pool does, in case the wall clock was set."""
    wall, clock = time.time(), time.monotonic()
    going = [row for row in rows if row.get("ended_at") is None]
    in_cells = {row.get("session") for row in going if row["started_at"] is not None}
    for row in going:
        began, idle_at = row.get("metered_clock"), row.get("idle_clock")
        # a later monotonic time is from before a reboot
        if began is not None and began <= clock and abs(wall - clock + began - row["metered_at"]) > _STEP_S:
            row["metered_at"] = wall - clock + began
        if idle_at is not None and idle_at <= clock and row["run_id"] not in in_cells:
            row["idle_s"] += clock - idle_at


def _summary(row: dict[str, Any], *, held: bool) -> RunSummary:
    known = {name: value for name, value in row.items() if name in _FIELDS}
    known["uuids"] = load_json(row.get("uuids", "[]"))
    known["simulated"] = bool(row.get("simulated", 0))
    run = convert(known, RunSummary)
    if held or run.state.is_final:
        return run
    # the run can't be active any more; the next pool will record this
    return msgspec.structs.replace(run, state=RunState.FAILED, failure=run.failure or LOST)


# ---------------------------------------------------------------- runs, GPU-hours and cost, for `sgpu usage`


class Use(msgspec.Struct):
    """The usage of a group of runs.

    Args:
        name: Name of the group.
        runs: Number of runs, including those in sessions.
        gpu_s: GPU-seconds.
        slot_s: Seconds of CPU slots that have a price.
        idle_s: GPU-seconds of sessions in which no cell ran; included in `gpu_s`.
        simulated_s: GPU-seconds of simulated GPUs; included in `gpu_s`.
        cost: Cost by currency.
        idle_cost: The part of `cost` for idle time.
        simulated_cost: The part of `cost` for simulated devices, which no one pays.
        reserved: Cost of the same device time at the reserved prices, for types that have one; None if none has.
    """

    name: str
    runs: int = 0
    gpu_s: float = 0.0
    slot_s: float = 0.0
    idle_s: float = 0.0
    simulated_s: float = 0.0
    cost: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    idle_cost: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    simulated_cost: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    reserved: float | None = None


class Usage(msgspec.Struct, frozen=True):
    """The usage of runs in a period.

    Args:
        since: Start, in seconds since the epoch; runs that ended later or are active count in full.
        until: End, in seconds since the epoch.
        by: What runs are grouped by.
        currency: Currency of the reserved prices.
        groups: Usage by group.
        total: Usage of all runs.
    """

    since: float
    until: float
    by: str
    currency: str
    groups: Sequence[Use]
    total: Use


def usage_within(settings: Settings, rows: Sequence[RunSummary], since: str, by: str) -> Usage:
    """Add up the usage of runs until now.

    Args:
        settings: Settings, with the reserved prices.
        rows: Rows of ledgers.
        since: Length of the period: `7d`, `12h`.
        by: `day`, `user`, `session`, `notebook` or `type`.

    Raises:
        UsageError: `since` is not a length of time.
    """
    now = time.time()
    began = now - seconds_of(since)
    return usage(rows, began, now, by, read_prices(settings.reserved_prices), settings.currency)


def usage(rows: Sequence[RunSummary], since: float, now: float, by: str, reserved: Prices, currency: str) -> Usage:
    """Add up the usage of runs.

    Args:
        rows: Rows of the ledger.
        since: Start, in seconds since the epoch; runs that ended before do not count.
        now: The current time, in seconds since the epoch.
        by: `day`, `user`, `session`, `notebook` or `type`.
        reserved: Reserved prices to compare with.
        currency: Currency of the reserved prices.
    """
    name_of, idle_s = _naming(by, rows, now), _idle_times(rows, now)
    groups: dict[str, Use] = {}
    total = Use("total")
    for row in rows:
        if row.state.is_final and (row.ended_at or 0.0) < since:
            continue
        name = name_of(row)
        for use in (groups.setdefault(name, Use(name)), total):
            _add(use, row, now, idle_s, reserved)
    ordered = sorted(groups.values(), key=lambda use: use.name, reverse=by == "day")
    if by != "day":
        ordered.sort(key=lambda use: (-sum(use.cost.values()), -use.gpu_s))
    return Usage(since, now, by, currency, ordered, total)


def _add(use: Use, row: RunSummary, now: float, idle_s: Callable[[RunSummary], float], reserved: Prices) -> None:
    use.runs += 1
    device_s, cost = gpu_s_so_far(row, now), cost_so_far(row, now)
    if device_s is None:
        # the run never started, or a session pays for it
        return
    idle_part = 0.0
    if row.kind is RunKind.SESSION and row.metered_at is not None:
        lasted = cost * HOUR_S / row.hourly if cost and row.hourly else device_s / row.ranks
        idle_part = min(1.0, idle_s(row) / lasted) if lasted > 0 else 0.0
    if row.device_type != CPU:
        use.gpu_s += device_s
        use.idle_s += device_s * idle_part
        use.simulated_s += device_s if row.simulated else 0.0
    else:
        use.slot_s += device_s
    if cost is not None:
        _put(use.cost, row.currency, cost)
        _put(use.idle_cost, row.currency, cost * idle_part)
        _put(use.simulated_cost, row.currency, cost if row.simulated else 0.0)
    if (price := reserved.price_of(_POOL, row.device_type)) is not None:
        use.reserved = (use.reserved or 0.0) + price * device_s / HOUR_S


def _put(sums: dict[str, float], currency: str, amount: float) -> None:
    if amount:
        sums[currency] = sums.get(currency, 0.0) + amount


def _naming(by: str, rows: Sequence[RunSummary], now: float) -> Callable[[RunSummary], str]:
    """Return a function that names a run's group."""
    names = {row.run_id: f"{row.name} ({short(row.run_id)})".strip() for row in rows if row.kind is RunKind.SESSION}

    def session(row: RunSummary) -> str:
        own = row.run_id if row.kind is RunKind.SESSION else row.session
        return names.get(own, short(own)) if own else "(no session)"

    namings: dict[str, Callable[[RunSummary], str]] = {
        "session": session,
        "day": lambda row: time.strftime("%Y-%m-%d", time.localtime(row.ended_at or now)),
        "type": lambda row: row.device_type + (" (simulated)" if row.simulated else ""),
        "notebook": lambda row: row.notebook or "(no notebook)",
        "user": lambda row: row.user or "(unknown)",
    }
    return namings[by]


def _idle_times(rows: Iterable[RunSummary], now: float) -> Callable[[RunSummary], float]:
    """Return a function for a session's idle time: as recorded by the pool, or until now for an active session."""
    cells: dict[str, list[tuple[float, float | None]]] = {}
    for row in rows:
        if row.session and row.started_at is not None:
            cells.setdefault(row.session, []).append((row.started_at, row.ended_at))

    def idle_s(session: RunSummary) -> float:
        if session.idle_s is not None or session.state.is_final or session.started_at is None:
            return session.idle_s or 0.0
        return idle_seconds(session.started_at, now, cells.get(session.run_id, []))

    return idle_s


def seconds_of(since: str) -> float:
    """Return the length of time of an option `--since` in seconds.

    Raises:
        UsageError: It is not a length of time.
    """
    found = _SINCE.fullmatch(since.strip().lower())
    if found is None or not float(found[1]):
        raise UsageError(f"--since {since[:40]!r} is not a length of time: write one such as 7d, 12h, 30m or 2w.")
    return float(found[1]) * _UNITS[found[2]]
