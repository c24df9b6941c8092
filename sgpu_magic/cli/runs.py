"""`sgpu runs` and `sgpu usage`: the pools' runs and their use; `cancel`, `detach` and `stacks` for one run."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

from sgpu_magic.cli.main import CommandParser, note, positive
from sgpu_magic.client import ledger
from sgpu_magic.client.find_run import check_prefix, pool_of
from sgpu_magic.client.ledger import Usage, Use, usage_within
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pools import Pools
from sgpu_magic.client.pools_file import LOCAL
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import PoolError
from sgpu_magic.formatting import clipped, format_money
from sgpu_magic.views.pool_tables import run_duration
from sgpu_magic.views.stacks import stacks_text
from sgpu_magic.views.units import TIMES, aligned
from sgpu_magic.wire.base import CancelReason, RunKind, short
from sgpu_magic.wire.costs import HOUR_S, cost_so_far
from sgpu_magic.wire.pool_status import RunSummary

_MAX_FAILURE = 100
_ALL = 1_000_000_000
_RECENT = 20


def recent(settings: Settings, limit: int | None, name: str = "") -> tuple[str, str]:
    """Return the table of the newest runs, and a note about its sources ("" for none).

    The local pool's runs come from the pool if it is running, else from the ledger's file.

    Args:
        settings: The settings.
        limit: Maximum number of runs; None for all.
        name: Only this pool; "" for all.

    Raises:
        PoolError: The ledger can't be read, or the named pool can't be reached.
        UsageError: There is no pool of that name.
    """
    number = _ALL if limit is None else limit
    status = None
    notes: list[str] = []
    with closing(Pools(settings)) as pools:
        if name not in ("", LOCAL):
            status = pools.named(name).status(number)
            runs = () if status is None else status.runs[:limit]
            return runs_table(runs, time.time(), {run.run_id: name for run in runs}), ""
        elsewhere = pools.asked(() if name else pools.entries(), local=False, recent=number)
        try:
            status = pools.local.status(recent=number, start=False)
        except PoolError as error:
            notes.append(f"this list is from the ledger's file, because {error.message}")
    local = ledger.recent_runs(settings, limit) if status is None else status.runs
    if not elsewhere:
        return runs_table(local, time.time()), " ".join(notes)
    notes += [f"{each.name} is left out: {each.problem}" for each in elsewhere if each.problem]
    listed = [(LOCAL, run) for run in local]
    listed += [(each.name, run) for each in elsewhere if each.status is not None for run in each.status.runs]
    listed = sorted(listed, key=lambda found: -found[1].submitted_at)[:limit]
    pool_of = {run.run_id: pool for pool, run in listed}
    return runs_table([run for _, run in listed], time.time(), pool_of), " ".join(notes)


def of_one(settings: Settings, command: str, run: str) -> str:
    """Execute a command on an active run and return its message. Never starts a pool.

    Args:
        settings: The settings.
        command: `cancel`, `detach` or `stacks`.
        run: Prefix of the run's id.

    Raises:
        PoolError: No pool is running, or it does not answer.
        UsageError: No active run or several match.
    """
    prefix = check_prefix(run)
    wish, do = _OF_ONE[command]
    with pool_of(settings, prefix, wish, only_active=True) as pool:
        return do(pool, prefix)


def _stacks(pool: Pool, run: str) -> str:
    answer = pool.stacks(run)
    return stacks_text(answer.run_id, answer.stacks, answer.cell)


_OF_ONE: Mapping[str, tuple[str, Callable[[Pool, str], str]]] = {
    "cancel": ("that could be cancelled", lambda pool, run: pool.cancel(run, CancelReason.COMMAND)),
    "detach": ("that could be detached", lambda pool, run: pool.detach(run)),
    "stacks": ("whose stacks could be shown", _stacks),
}


def runs_table(runs: Sequence[RunSummary], now: float, pools: Mapping[str, str] | None = None) -> str:
    """Return the runs as aligned text.

    Args:
        runs: The runs, newest first.
        now: The current time, seconds since the epoch.
        pools: Pool of each run by its id; adds a column.
    """
    if not runs:
        return "no runs yet"
    times_seen = Counter(short(run.run_id) for run in runs)
    columns: dict[str, list[str]] = {
        "run": [short(run.run_id) if times_seen[short(run.run_id)] == 1 else run.run_id for run in runs],
        "pool": [pools[run.run_id] for run in runs] if pools else [],
        "name": [f"session {run.name}".rstrip() if run.kind is RunKind.SESSION else run.name for run in runs],
        "ranks": [_ranks(run) for run in runs],
        "state": [run.state.value for run in runs],
        "submitted": [_date(run.submitted_at) for run in runs],
        # the end of a run is unknown if its pool died with it
        "for": ["-" if run.state.is_final and run.ended_at is None else run_duration(run, now) for run in runs],
        "cost": [_cost(run, now) for run in runs],
        "": [_remark(run) for run in runs],
    }
    # omit the pool where there is only one, and the cost if no run has a price
    columns = {head: cells for head, cells in columns.items() if any(cells) or head not in ("pool", "cost")}
    right = tuple(at for at, head in enumerate(columns) if head in ("for", "cost"))
    return "\n".join(aligned([tuple(columns), *zip(*columns.values(), strict=True)], right=right))


def _ranks(run: RunSummary) -> str:
    if run.device_type == "any":
        return str(run.ranks)
    kind = run.device_type if run.device_type == "cpu" else run.device_type.upper()
    return f"{run.ranks} {TIMES} {kind}" + (" (simulated on cpu)" if run.simulated else "")


def _cost(run: RunSummary, now: float) -> str:
    cost = cost_so_far(run, now)
    return "" if cost is None else format_money(cost, run.currency)


def _remark(run: RunSummary) -> str:
    in_session = f"in session {short(run.session)}" if run.session else ""
    return clipped(run.waiting_for or run.failure.strip().partition("\n")[0] or in_session, _MAX_FAILURE)


def _list_options(parser: CommandParser) -> None:
    parser.add_argument("--pool", default="", metavar="NAME", help="only this pool (default: all)")
    how_many = parser.add_mutually_exclusive_group()
    how_many.add_argument(
        "-n", dest="number", type=positive, default=_RECENT, metavar="N", help="how many to show (default: 20)"
    )
    how_many.add_argument("--all", action="store_true", help="show all")
    parser.does(_list)


def _list(options: argparse.Namespace) -> int:
    table, where = recent(load_settings(), None if options.all else options.number, options.pool)
    sys.stdout.write(f"{table}\n")
    if where:
        note(where)
    return 0


def _one_options(parser: CommandParser) -> None:
    parser.add_argument("run", metavar="RUN", help="ID of the run, or its first digits")
    parser.does(lambda options: of_one(load_settings(), options.command, options.run))


# ---------------------------------------------------------------- usage


def table(used: Usage) -> str:
    """Return usage as text: a row per group, the total, and notes on the columns."""
    total = used.total
    if not total.runs:
        return f"no runs since {_date(used.since)}"
    columns: list[tuple[str, Callable[[Use], str]]] = [
        (used.by, lambda use: use.name),
        ("runs", lambda use: f"{use.runs:,}"),
        ("GPU-hours", lambda use: _hours(use.gpu_s)),
    ]
    if total.slot_s:
        columns.append(("slot-hours", lambda use: _hours(use.slot_s)))
    if total.cost:
        columns.append(("cost", lambda use: _money(use.cost)))
    if total.idle_s:
        columns.append(("idle GPU-hours", lambda use: _hours(use.idle_s)))
        if total.idle_cost:
            columns.append(("idle cost", lambda use: _money(use.idle_cost)))
    if total.reserved is not None:
        columns.append(
            ("reserved", lambda use: "" if use.reserved is None else format_money(use.reserved, used.currency))
        )
    rows = [tuple(text(use) for _, text in columns) for use in (*used.groups, total)]
    lines = aligned([tuple(head for head, _ in columns), *rows], right=tuple(range(1, len(columns))))
    return "\n".join([*lines, "", *_remarks(used)])


def _remarks(used: Usage) -> list[str]:
    total = used.total
    lines = [f"runs that have ended since {_date(used.since)}, and active ones; each counts in full"]
    if total.idle_s:
        lines.append("idle: time of sessions in which no cell ran; it is included in the hours and the cost")
    if total.reserved is not None:
        lines.append("reserved: what the same hours cost at the reserved prices, for types that have one")
    if total.simulated_s:
        cost = f" and {_money(total.simulated_cost)} of the cost" if total.simulated_cost else ""
        lines.append(f"simulated: {_hours(total.simulated_s)} of the GPU-hours{cost}; it is not charged")
    return lines


def comma_separated(used: Usage) -> str:
    """Return usage as CSV: a row per group, six decimals, and cost columns for each currency that occurs."""
    currencies = sorted(used.total.cost)
    heads = [used.by, "runs", "gpu_hours", "slot_hours", "idle_gpu_hours", "simulated_gpu_hours"]
    for currency in currencies:
        heads += [f"cost_{currency}", f"idle_cost_{currency}", f"simulated_cost_{currency}"]
    reserved = used.total.reserved is not None
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*heads, *([f"reserved_cost_{used.currency}"] if reserved else [])])
    for use in used.groups:
        # a spreadsheet would evaluate a name that begins like a formula
        row: list[object] = [f"'{use.name}" if use.name.startswith(("=", "+", "-", "@")) else use.name, use.runs]
        row += [_rounded(seconds / HOUR_S) for seconds in (use.gpu_s, use.slot_s, use.idle_s, use.simulated_s)]
        for currency in currencies:
            row += [_rounded(sums.get(currency, 0.0)) for sums in (use.cost, use.idle_cost, use.simulated_cost)]
        if reserved:
            row.append("" if use.reserved is None else _rounded(use.reserved))
        writer.writerow(row)
    return out.getvalue().rstrip("\n")


def as_json(used: Usage) -> str:
    """Return usage as JSON: the groups and the total, with costs by currency."""
    record = {
        "since": round(used.since, 3),
        "until": round(used.until, 3),
        "by": used.by,
        "groups": [_record(use, used.currency) for use in used.groups],
        "total": _record(used.total, used.currency),
    }
    return json.dumps(record, indent=1, ensure_ascii=False)


def _record(use: Use, currency: str) -> dict[str, object]:
    return {
        "name": use.name,
        "runs": use.runs,
        "gpu_hours": _rounded(use.gpu_s / HOUR_S),
        "slot_hours": _rounded(use.slot_s / HOUR_S),
        "cost": _sums(use.cost),
        "idle": {"gpu_hours": _rounded(use.idle_s / HOUR_S), "cost": _sums(use.idle_cost)},
        "simulated": {"gpu_hours": _rounded(use.simulated_s / HOUR_S), "cost": _sums(use.simulated_cost)},
        "reserved_cost": {} if use.reserved is None else {currency: _rounded(use.reserved)},
    }


def _sums(sums: Mapping[str, float]) -> dict[str, float]:
    return {currency: _rounded(amount) for currency, amount in sorted(sums.items())}


def _rounded(value: float) -> float:
    return round(value, 6)


def _hours(seconds: float) -> str:
    return f"{seconds / HOUR_S:,.2f}"


def _money(sums: Mapping[str, float]) -> str:
    return " + ".join(format_money(amount, currency) for currency, amount in sorted(sums.items()))


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


_FORMATS: Mapping[str, Callable[[Usage], str]] = {"table": table, "csv": comma_separated, "json": as_json}


def _usage_options(parser: CommandParser) -> None:
    parser.add_argument("--since", default="7d", metavar="7d", help="how far back, such as 12h, 7d or 4w (default: 7d)")
    groups = ("day", "user", "session", "notebook", "type")
    parser.add_argument("--by", choices=groups, default="day", help="what to group by (default: day)")
    parser.add_argument("--format", choices=tuple(_FORMATS), default="table", help="output format (default: table)")
    parser.add_argument("--pool", default="", metavar="NAME", help="only this pool (default: all)")
    parser.does(_usage)


def _usage(options: argparse.Namespace) -> str:
    settings = load_settings()
    rows, where = all_runs(settings, options.pool)
    text = _FORMATS[options.format](usage_within(settings, rows, options.since, options.by))
    if where:
        note(where)
    return text


def all_runs(settings: Settings, name: str = "") -> tuple[list[RunSummary], str]:
    """Return all runs of the pools that this machine lists, and a note about pools that are left out ("" for none).

    The local pool's are read from its ledger, whether it is running or not. Served pools answer with this user's runs.

    Args:
        settings: The settings.
        name: Only this pool; "" for all.

    Raises:
        PoolError: The ledger can't be read, or the named pool can't be reached.
        UsageError: There is no pool of that name.
    """
    with closing(Pools(settings)) as pools:
        if name not in ("", LOCAL):
            status = pools.named(name).status(_ALL)
            return [] if status is None else list(status.runs), ""
        elsewhere = pools.asked(() if name else pools.entries(), local=False, recent=_ALL)
    rows = ledger.recent_runs(settings, None)
    rows += [run for each in elsewhere if each.status is not None for run in each.status.runs]
    return rows, " ".join(f"{each.name} is left out: {each.problem}" for each in elsewhere if each.problem)


COMMANDS = {"runs": _list_options, "usage": _usage_options, **dict.fromkeys(_OF_ONE, _one_options)}
