"""What `sgpu usage` prints: a table for people, CSV for spreadsheets, JSON for programs."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Mapping

from sgpu_magic.cli.arguments import Parser
from sgpu_magic.client.ledger import Usage, Use, read_usage
from sgpu_magic.config import load_settings
from sgpu_magic.views.units import aligned
from sgpu_magic.wire.costs import HOUR_S, format_money


def table(used: Usage) -> str:
    """Return a row for each group, the total, and what the columns mean."""
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
    lines = aligned(
        [
            tuple(head for head, _ in columns),
            *(tuple(text(use) for _, text in columns) for use in (*used.groups, total)),
        ],
        right=tuple(range(1, len(columns))),
    )
    return "\n".join([*lines, "", *_remarks(used)])


def _remarks(used: Usage) -> list[str]:
    total = used.total
    lines = [f"runs that have ended since {_date(used.since)}, and those that go on; each counts whole"]
    if total.idle_s:
        lines.append("idle: time of sessions in which no cell ran; it is part of the hours and the cost")
    if total.reserved is not None:
        lines.append("reserved: what the same hours cost at the reserved prices, of types that have one")
    if total.simulated_s:
        cost = f" and {_money(total.simulated_cost)} of the cost" if total.simulated_cost else ""
        lines.append(f"simulated: {_hours(total.simulated_s)} of the GPU-hours{cost}; nobody is paid that")
    if total.unmetered:
        runs = (
            "1 run of an earlier version has"
            if total.unmetered == 1
            else f"{total.unmetered} runs of an earlier version have"
        )
        lines.append(f"{runs} no hours")
    return lines


def comma_separated(used: Usage) -> str:
    """Return a row for each group, sums with six digits; columns for each currency that occurs."""
    currencies = sorted(used.total.cost)
    heads = [used.by, "runs", "gpu_hours", "slot_hours", "idle_gpu_hours", "simulated_gpu_hours"]
    for currency in currencies:
        heads += [f"cost_{currency}", f"idle_cost_{currency}", f"simulated_cost_{currency}"]
    reserved = used.total.reserved is not None
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*heads, *([f"reserved_cost_{used.currency}"] if reserved else [])])
    for use in used.groups:
        row: list[object] = [_cell(use.name), use.runs]
        row += [_rounded(seconds / HOUR_S) for seconds in (use.gpu_s, use.slot_s, use.idle_s, use.simulated_s)]
        for currency in currencies:
            row += [_rounded(sums.get(currency, 0.0)) for sums in (use.cost, use.idle_cost, use.simulated_cost)]
        if reserved:
            row.append("" if use.reserved is None else _rounded(use.reserved))
        writer.writerow(row)
    return out.getvalue().rstrip("\n")


def _cell(name: str) -> str:
    """A name that a spreadsheet would take for a formula is none."""
    return f"'{name}" if name[:1] in ("=", "+", "-", "@") else name


def as_json(used: Usage) -> str:
    """Return the groups and the total; sums of money by currency."""
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
        "unmetered_runs": use.unmetered,
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


FORMATS: Mapping[str, Callable[[Usage], str]] = {"table": table, "csv": comma_separated, "json": as_json}


def _options(parser: Parser) -> None:
    parser.add_argument("--since", default="7d", metavar="7d", help="how far back: 12h, 7d, 4w (7d)")
    groups = ("day", "user", "session", "notebook", "type")
    parser.add_argument("--by", choices=groups, default="day", help="what the rows are (day)")
    parser.add_argument("--format", choices=tuple(FORMATS), default="table", help="(table)")
    parser.does(lambda it: FORMATS[it.format](read_usage(load_settings(), it.since, it.by)))


COMMANDS = {"usage": _options}
