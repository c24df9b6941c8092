"""`%sgpu_status` and `%sgpu_env` as text and as HTML: a pool's devices, queue and runs; a kernel's packages."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

import msgspec

from sgpu_magic.formatting import count_of, format_duration, format_money
from sgpu_magic.views import ansi
from sgpu_magic.views.format_pool import (
    HOLDING,
    NODE_HEADS,
    NODE_RIGHT,
    TYPE_HEADS,
    TYPE_RIGHT,
    failure_line,
    format_budget,
    format_cpu,
    format_idle,
    format_problem,
    format_simulated,
    format_type,
    node_rows,
    simulates_all,
    type_rows,
)
from sgpu_magic.views.format_summary import idle_since
from sgpu_magic.views.history_table import HISTORY_HEADS, HISTORY_RIGHT, history_rows
from sgpu_magic.views.html_style import BAD, SOFT, WARN, safe, sentences, table, titled_box
from sgpu_magic.views.units import BETWEEN, TIMES, Row, aligned, cut
from sgpu_magic.wire.base import RunKind, RunState, short
from sgpu_magic.wire.costs import cost_so_far
from sgpu_magic.wire.devices import type_label
from sgpu_magic.wire.pool_status import PoolStatus, RunSummary

# number of newest cells that are listed for a session
_MAX_CELLS = 3
# the default of `AskStatus.recent`
_RECENT = 20
_BELOW = "└ "
# number of newest runs that are listed
_MAX_TOPS = 60
# number of queued runs that are listed, from the first
_MAX_WAITING = 20

_RUN_HEADS: Row = ("run", "name", "notebook", "user", "ranks", "state", "duration", "cost", "")
_RUN_RIGHT = (6, 7)

# characters of a name that are always shown
_LEAST_NAME = 8

# heads of the columns that break their lines, and of those that are drawn below their rows, in HTML
_BREAKING = ("name", "notebook", "runs")
_BELOW_ROWS = ("held by", "")

_Table = tuple[list[Row], tuple[int, ...]]
"""The heads and the rows, and the right-aligned columns."""

_MOST_ROWS = 400


class _StatusContent(NamedTuple):
    """What is shown of a pool: a headline, sentences, warnings, its devices or nodes, their use, its runs."""

    headline: str
    quiet: list[str]
    loud: list[str]
    devices: _Table
    history: _Table
    runs: _Table


def status_text(status: PoolStatus, now: float | None = None, notice: str = "", width: int | None = None) -> str:
    """Return the pool as text.

    Args:
        status: The pool's status.
        now: Wall-clock time, seconds since the epoch; by default the present.
        notice: A notice from the pool, "" for none.
        width: Characters of a line into which the tables are to fit: reasons and holders then stand below their rows,
            names are cut, and the column of notebooks is left out if need be. None for no limit.
    """
    content = _content(status, now, notice, html=False)
    lines = [content.headline, *content.quiet, *content.loud]
    for rows, right in (content.devices, content.history, content.runs):
        lines += ["", *_table_lines(rows, right, width)] if len(rows) > 1 else []
    return "\n".join(lines if status.runs else [*lines, "no runs yet"])


def _table_lines(rows: Sequence[Row], right: tuple[int, ...], width: int | None) -> list[str]:
    lines = aligned(rows, right)
    if width is None or _widest(lines) <= width:
        return lines
    heads = rows[0]
    below = [row[-1] if heads[-1] in _BELOW_ROWS else "" for row in rows]
    if heads[-1] in _BELOW_ROWS:
        rows = [row[:-1] for row in rows]
    if "notebook" in heads and _widest(aligned(_with_names_cut(rows, _LEAST_NAME), right)) > width:
        at = heads.index("notebook")
        rows = [row[:at] + row[at + 1 :] for row in rows]
        right = tuple(column - (column > at) for column in right)
    excess = _widest(aligned(rows, right)) - width
    if excess > 0 and "name" in heads:
        at = heads.index("name")
        rows = _with_names_cut(rows, max(max(len(row[at]) for row in rows) - excess, _LEAST_NAME))
    indent = " " * (max(len(row[0]) for row in rows) + len(BETWEEN))
    fitted: list[str] = []
    for line, remark in zip(aligned(rows, right), ["", *below[1:]], strict=True):
        fitted.append(line)
        if remark:
            fitted.append(indent + cut(ansi.plain(f"{heads[-1]} {remark}").strip(), width - len(indent)))
    return fitted


def _with_names_cut(rows: Sequence[Row], most: int) -> list[Row]:
    at = rows[0].index("name") if "name" in rows[0] else None
    return [row if at is None else (*row[:at], cut(row[at], most), *row[at + 1 :]) for row in rows]


def _widest(lines: Sequence[str]) -> int:
    return max(map(len, lines), default=0)


def status_html(status: PoolStatus, now: float | None = None, notice: str = "") -> str:
    """Return the pool as tables with inline style; arguments as for `status_text`."""
    content = _content(status, now, notice, html=True)
    parts = [sentences(content.quiet), sentences(content.loud, f"color:{WARN}")]
    for (heads, *rows), right in (content.devices, content.history, content.runs):
        breaks = [column for column, head in enumerate(heads) if head in _BREAKING]
        below = len(heads) - 1 if heads[-1] in _BELOW_ROWS else None
        parts += [table(heads, rows, right, breaks, below)] if rows else []
    parts += [] if status.runs else [sentences(["no runs yet"], SOFT)]
    name, _, rest = content.headline.partition(" · ")
    return titled_box(name, rest, "".join(parts))


def _content(status: PoolStatus, now: float | None, notice: str, *, html: bool) -> _StatusContent:
    now = time.time() if now is None else now
    types = format_type(status) if _has_nodes(status) else []
    quiet = [*types, *_waiting(status), *format_idle(status, now), *format_budget(status, nearly_used=False)]
    loud = [*format_problem(status), *format_budget(status, nearly_used=True), *([notice] if notice else [])]
    left_out = () if _several_users(status) else ("user",)
    runs = _with_columns(_RUN_HEADS, _run_rows(status, now), _RUN_RIGHT, ("notebook", "cost"), left_out)
    history = _with_columns(HISTORY_HEADS, history_rows(status, now, html=html), HISTORY_RIGHT, ("memory now",))
    return _StatusContent(_headline(status), quiet, loud, _devices(status), history, runs)


def away_html(name: str, why: str, *, is_problem: bool) -> str:
    """Return a pool without a status as HTML.

    Args:
        name: The pool's name.
        why: A sentence about why there is no status.
        is_problem: The user has to do something.
    """
    return titled_box(name, why, "", f"color:{WARN}" if is_problem else SOFT)


def _headline(status: PoolStatus) -> str:
    inventory = status.inventory
    parts = [status.pool]
    types = Counter(f"{type_label(each.type)}{format_simulated(status, each.simulated)}" for each in inventory.devices)
    if types:
        counted = ", ".join(f"{count:,} {kind}" for kind, count in types.items())
        parts.append(counted + (" (simulated)" if simulates_all(status) else ""))
    free = "" if status.cpu_slots_free == inventory.cpu_slots else f" ({status.cpu_slots_free} free)"
    parts.append(format_cpu(inventory) + free)
    if all(device.simulated for device in inventory.devices):
        parts.append("no GPU there" if _has_nodes(status) else "no GPU on this machine")
    parts += [inventory.host, count_of(len(inventory.nodes), "node") if inventory.nodes else ""]
    return " · ".join(filter(None, parts))


def _waiting(status: PoolStatus) -> list[str]:
    queued = [run for run in status.runs if run.state is RunState.QUEUED]
    queued.sort(key=lambda run: (run.position is None, run.position or 0))
    several = _several_users(status)
    lines: list[str] = []
    for run in queued[:_MAX_WAITING]:
        whose = f"waiting: {run.user}'s" if several else "waiting:"
        position = f"position {run.position}" if run.position else ""
        parts = [f"{whose} {_name(run) or 'cell'}", count_of(run.ranks, "rank"), run.waiting_for, position]
        lines.append(", ".join(filter(None, parts)))
    more = len(queued) - _MAX_WAITING
    lines += [f"waiting: {count_of(more, 'more run')}"] if more > 0 else []
    # their devices stay leased
    remaining = [run for run in status.runs if run.waiting_for and run.state is not RunState.QUEUED]
    return [*lines, *(f"{_name(run) or 'cell'}: {run.waiting_for}, its devices stay leased" for run in remaining)]


def _several_users(status: PoolStatus) -> bool:
    return len({run.user for run in status.runs if run.user}) > 1


def _has_nodes(status: PoolStatus) -> bool:
    return bool(status.inventory.nodes or status.inventory.elastic)


def _devices(status: PoolStatus) -> _Table:
    """Return a row for each type of device, or for each node in a pool with nodes."""
    if _has_nodes(status):
        return [NODE_HEADS, *node_rows(status)], NODE_RIGHT
    return _with_columns(TYPE_HEADS, type_rows(status), TYPE_RIGHT, ("memory", "memory in use", "utilization"))


def _run_rows(status: PoolStatus, now: float) -> list[Row]:
    """Return a row for each run; the newest few runs of a session are listed below it."""
    sessions = {run.run_id for run in status.runs if run.kind is RunKind.SESSION}
    cells: dict[str, list[RunSummary]] = {}
    for run in status.runs:
        if run.session in sessions:
            cells.setdefault(run.session, []).append(run)
    rows: list[Row] = []

    def further(words: str) -> None:
        rows.append(("", words, *[""] * (len(_RUN_HEADS) - 2)))

    by_id = {run.run_id: run for run in status.runs}
    # a session is placed by its newest cell
    tops = dict.fromkeys(run.session if run.session in sessions else run.run_id for run in status.runs)
    for run in [by_id[run_id] for run_id in [*tops][:_MAX_TOPS]]:
        rows.append(_run_row(status, run, now, cells.get(run.run_id, [])))
        # active ones first, however old they are, then the newest
        below = sorted(cells.get(run.run_id, []), key=lambda cell: (cell.state.is_final, -cell.submitted_at))
        rows += [_run_row(status, cell, now, is_below=True) for cell in below[:_MAX_CELLS]]
        if len(below) > _MAX_CELLS:
            # the number of others is unknown if the status has only the newest runs
            count = count_of(len(below) - _MAX_CELLS, "more cell") if len(status.runs) < _RECENT else "more cells"
            further(f"{_BELOW}and {count}")
    if len(tops) > _MAX_TOPS:
        further(f"and {count_of(len(tops) - _MAX_TOPS, 'more run')}")
    return rows


def _with_columns(
    heads: Row, rows: Sequence[Row], right: Sequence[int], optional: Sequence[str], left_out: Sequence[str] = ()
) -> _Table:
    """Return heads and rows without some columns, and which of the others are right-aligned.

    Args:
        heads: The heads of all columns.
        rows: Rows with all columns.
        right: The right-aligned columns.
        optional: Heads of columns that are left out if they are empty.
        left_out: Heads of columns that are left out in any case.
    """
    empty = {head for at, head in enumerate(heads) if head in optional and not any(row[at] for row in rows)}
    kept = [at for at, head in enumerate(heads) if head not in empty and head not in left_out]
    kept_rows = [tuple(row[at] for at in kept) for row in (heads, *rows)]
    return kept_rows, tuple(at for at, column in enumerate(kept) if column in right)


def _name(run: RunSummary) -> str:
    if run.kind is RunKind.SESSION:
        return f"session {run.name or short(run.run_id)}"
    return run.name or ("" if run.kind is RunKind.CELL else f"{run.kind}")


def _state(run: RunSummary, cells: Sequence[RunSummary], now: float) -> str:
    """Return a run's state; for a session what it runs, or since when it is idle."""
    if run.kind is not RunKind.SESSION:
        return str(run.state)
    if run.state is RunState.QUEUED:
        return "waits for devices"
    if run.state is RunState.RUNNING:
        under_way = [cell for cell in cells if cell.state in HOLDING]
        if under_way:
            return f"runs {under_way[0].name or 'a cell'}"
        ended = [cell.ended_at for cell in cells if cell.ended_at is not None]
        return idle_since(max(ended), now) if ended else "connected"
    return str(run.state)


def run_duration(run: RunSummary, now: float) -> str:
    """Return `12 s · start 25 s`; for a run whose ranks have not started, the time since it was submitted."""
    until = now if run.ended_at is None else run.ended_at
    if run.started_at is None:
        return format_duration(until - run.submitted_at)
    starting_s = run.started_at - run.metered_at if run.metered_at is not None else 0.0
    return format_duration(until - run.started_at, starting_s)


def _run_row(
    status: PoolStatus, run: RunSummary, now: float, cells: Sequence[RunSummary] = (), *, is_below: bool = False
) -> Row:
    gpu = f"{type_label(run.device_type)}{format_simulated(status, run.simulated)}"
    kind = {"cpu": "cpu", "any": ""}.get(run.device_type, gpu)
    ranks = f"{run.ranks} {TIMES} {kind}" if kind else f"{run.ranks}"
    # the session's row has its notebook and ranks
    name, notebook = _name(run), PurePath(run.notebook).name
    if is_below:
        name, notebook, ranks = f"{_BELOW}{name}", "", ""
    cost = cost_so_far(run, now)
    paid = "" if cost is None else format_money(cost, run.currency)
    state = _state(run, cells, now)
    return short(run.run_id), name, notebook, run.user, ranks, state, run_duration(run, now), paid, failure_line(run)


# ---------------------------------------------------------------- a kernel's packages


class EnvironmentReport(msgspec.Struct, frozen=True):
    """What `%sgpu_env` shows.

    Args:
        title: Python and its version.
        facts: Short texts beside the title.
        lines: Sentences that need no action.
        pending: What is installed but not used yet, with the remedy.
        broken: What will not work, with the remedy.
        compared_to: The environment that was compared with, "" for none.
        differences: From that environment: rows of package, its version here, its version there, and a remark.
    """

    title: str
    facts: tuple[str, ...]
    lines: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    compared_to: str = ""
    differences: tuple[Row, ...] = ()


def environment_text(report: EnvironmentReport) -> str:
    """Return the report as text."""
    lines = [" · ".join((report.title, *report.facts)), *report.lines, *report.pending, *report.broken]
    if report.compared_to:
        lines += ["", _compared(report)]
    if report.differences:
        lines += [*aligned([_package_heads(report), *report.differences[:_MOST_ROWS]]), *_more(report)]
    return "\n".join(lines)


def environment_html(report: EnvironmentReport) -> str:
    """Return the report as HTML with inline style."""
    pending, broken = sentences(report.pending, f"color:{WARN}"), sentences(report.broken, f"color:{BAD}")
    body = sentences(report.lines) + pending + broken
    if report.compared_to:
        body += f'<div style="padding:6px 12px 3px">{safe(_compared(report))}</div>'
    if report.differences:
        heads = _package_heads(report)
        body += table(heads, report.differences[:_MOST_ROWS], breaks=(len(heads) - 1,))
        body += sentences(_more(report), SOFT)
    return titled_box(report.title, " · ".join(report.facts), body)


def _compared(report: EnvironmentReport) -> str:
    if not report.differences:
        return f"no difference from {report.compared_to}"
    return f"{count_of(len(report.differences), 'difference')} from {report.compared_to}"


def _package_heads(report: EnvironmentReport) -> Row:
    return ("package", "here", report.compared_to, "")


def _more(report: EnvironmentReport) -> list[str]:
    more = len(report.differences) - _MOST_ROWS
    return [f"and {more} more"] if more > 0 else []
