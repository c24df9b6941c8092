"""`sgpu usage`: GPU-hours and cost of runs, as a table, CSV or JSON."""

from __future__ import annotations

import argparse
import csv
import io
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

from sgpu_magic.cli.json_form import amounts, omitted_pools, time_of
from sgpu_magic.cli.json_records import Money, UsageReport, UsageRow, encode
from sgpu_magic.cli.main import CommandParser, add_json, note
from sgpu_magic.client import ledger
from sgpu_magic.client.ledger import Usage, Use, usage_within
from sgpu_magic.client.pools import Pools, PoolStatusReply
from sgpu_magic.client.pools_file import LOCAL
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.formatting import format_money
from sgpu_magic.views.units import aligned
from sgpu_magic.wire.costs import HOUR_S
from sgpu_magic.wire.pool_status import RunSummary

_ALL = 1_000_000_000


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
        columns.append(("CPU-hours", lambda use: _hours(use.slot_s)))
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


def report(used: Usage, omitted: Sequence[PoolStatusReply] = ()) -> UsageReport:
    """Return usage in the form of `--json`.

    Args:
        used: The usage.
        omitted: Answers of pools that could not be asked.
    """
    return UsageReport(
        since=time_of(used.since),
        until=time_of(used.until),
        by=used.by,
        groups=tuple(_row(use, used.currency) for use in used.groups),
        total=_row(used.total, used.currency),
        omitted=omitted_pools(omitted),
    )


def _row(use: Use, currency: str) -> UsageRow:
    return UsageRow(
        name=use.name,
        runs=use.runs,
        gpu_s=use.gpu_s,
        slot_s=use.slot_s,
        idle_s=use.idle_s,
        simulated_s=use.simulated_s,
        cost=amounts(use.cost),
        idle_cost=amounts(use.idle_cost),
        simulated_cost=amounts(use.simulated_cost),
        reserved_cost=None if use.reserved is None else Money(amount=use.reserved, currency=currency),
    )


def _rounded(value: float) -> float:
    return round(value, 6)


def _hours(seconds: float) -> str:
    return f"{seconds / HOUR_S:,.2f}"


def _money(sums: Mapping[str, float]) -> str:
    return " + ".join(format_money(amount, currency) for currency, amount in sorted(sums.items()))


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


_FORMATS: Mapping[str, Callable[[Usage], str]] = {"table": table, "csv": comma_separated}


def _options(parser: CommandParser) -> None:
    parser.add_argument("--since", default="7d", metavar="7d", help="how far back, such as 12h, 7d or 4w (default: 7d)")
    groups = ("day", "user", "session", "notebook", "type")
    parser.add_argument("--by", choices=groups, default="day", help="what to group by (default: day)")
    parser.add_argument("--format", choices=tuple(_FORMATS), default="table", help="output format (default: table)")
    parser.add_argument("--pool", default="", metavar="NAME", help="only this pool (default: all)")
    add_json(parser)
    parser.does(_usage)


def _usage(options: argparse.Namespace) -> str:
    settings = load_settings()
    rows, omitted = all_runs(settings, options.pool)
    used = usage_within(settings, rows, options.since, options.by)
    if options.json:
        return encode(report(used, omitted))
    text = _FORMATS[options.format](used)
    for answer in omitted:
        note(f"{answer.name} is left out: {answer.problem}")
    return text


def all_runs(settings: Settings, name: str = "") -> tuple[list[RunSummary], list[PoolStatusReply]]:
    """Return all runs of the pools that this machine lists, and the answers of pools that could not be asked.

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
            status = pools.get(name).status(_ALL)
            return [] if status is None else list(status.runs), []
        remote = pools.ask_status(() if name else pools.entries(), local=False, recent=_ALL)
    rows = ledger.recent_runs(settings, None)
    rows += [run for each in remote if each.status is not None for run in each.status.runs]
    return rows, [each for each in remote if each.problem]


COMMANDS = {"usage": _options}
