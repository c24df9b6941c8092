"""The ranks of a run, each with its state, usage and last line: as cards of the live view, and as static HTML."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from weakref import WeakKeyDictionary

from sgpu_magic.formatting import count_of
from sgpu_magic.views import ansi
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.format_run import BEFORE_RANKS, new_host
from sgpu_magic.views.format_summary import curve_text, is_low, measured_lines, whole_text
from sgpu_magic.views.html_style import (
    ACCENT,
    BAD,
    FAINT,
    LINE,
    MONO,
    PANEL,
    PRE,
    SOFT,
    WARN,
    fold,
    safe,
    sparkline,
    stream_html,
)
from sgpu_magic.views.live.bars import bar_of, without_bar
from sgpu_magic.views.live.schema import Curve, RankCard, Tone
from sgpu_magic.views.live.widget_bars import widget_bars
from sgpu_magic.views.output_buffer import DisplayItem, LineItem, count_fitting, html_limit
from sgpu_magic.views.run_notes import died_of, error_line, last_part, restart_command
from sgpu_magic.views.usage import RankUsage, UsageCurve, detail_lines, use_text
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.rank_events import Failure

_MAX_LAST_CHARS = 160
_MAX_SEEN_CHARS = 1000
_MAX_LABEL_CHARS = 80
MAX_RANKS = 64
_MAX_LIVE_CHARS = 160
_SHARE = 0.6
_MAX_LINES = 20
_MAX_LINE_CHARS = 400
# with fewer lines than this, listing the lines of each rank is not worthwhile
_MANY_LINES = 20
# rows of ranks that an ended run shows without a click
_MOST_ROWS = 8


def rank_cards(view: RunView) -> tuple[RankCard, ...]:
    """Return a card for each rank; none before the ranks are being started."""
    never_started = view.lease is None and not view.rank_failures
    is_there = view.spec.in_session and view.state is not RunState.QUEUED
    if (view.state in BEFORE_RANKS and not is_there) or never_started:
        return ()
    failures = {failure.rank: failure for failure in reversed(view.others) if failure.rank is not None}
    failures |= {rank: failure for rank, failure in view.rank_failures.items() if rank >= 0}
    if view.failure is not None and view.failure.rank is not None and view.state is not RunState.SUCCEEDED:
        failures[view.failure.rank] = view.failure
    last_lines = view.output.last_lines
    seen = {rank: ansi.plain(last_lines.get(rank, "")[:_MAX_SEEN_CHARS]) for rank in view.rank_numbers}
    bars = widget_bars(view)
    return tuple(
        _card(view, at, failures.get(rank), last, bars.get(rank, "")) for at, (rank, last) in enumerate(seen.items())
    )


def _card(view: RunView, at: int, failure: Failure | None, seen: str, widget_bar: str) -> RankCard:
    rank = view.rank_numbers[at]
    state, tone = _state(view, rank, failure)
    usage = view.usage.ranks.get(rank) or RankUsage(rank)
    latest = usage.latest
    last = without_bar(seen)
    if state == "running" and latest is not None:
        if latest.waits_in:
            last = f"waits in {ansi.plain(latest.waits_in)}"
        elif latest.line and not last:
            last = f"at {ansi.plain(latest.line)}"
    return RankCard(
        rank=rank,
        state=state,
        tone=tone,
        label=ansi.plain(_label(view, rank))[:_MAX_LABEL_CHARS],
        last=_last(rank, state, failure, last)[:_MAX_LAST_CHARS],
        bar=(bar_of(seen) or bar_of(widget_bar)) if state == "running" else None,
        use=use_text(latest) if latest is not None else "",
        details=tuple(ansi.plain(line)[:200] for line in detail_lines(latest)) if latest is not None else (),
        curves=tuple(map(_curve, usage.curves())),
        idle=ansi.plain(usage.idle_text)[:200],
        host=new_host(view, view.rank_numbers, at),
    )


def _label(view: RunView, rank: int) -> str:
    """Return the rank's device, "" when it has none."""
    return view.labels[rank] if rank < len(view.labels) else ""


def _state(view: RunView, rank: int, failure: Failure | None) -> tuple[str, Tone]:
    if view.session is not None and not view.is_final:
        if rank in view.session.dead:
            return "dead", "bad"
        if view.state is RunState.RUNNING:
            return "alive", "good"
    if view.state is RunState.SUCCEEDED:
        return "done", "good"
    if failure is not None:
        if failure.is_consequence:
            return "released", "plain"
        if failure.after_stop:
            # the stop path interrupts ranks that are not blocked in a collective
            return "ended", "plain"
        return "failed", "bad"
    if view.is_final:
        return "ended", "plain"
    return ("waiting", "plain") if view.state is RunState.STARTING else ("running", "busy")


def _last(rank: int, state: str, failure: Failure | None, last: str) -> str:
    """Return the rank's last line, or its failure or restart command, which take precedence."""
    if state == "dead":
        return restart_command((rank,))
    if failure is None or state != "failed":
        return last
    silent = failure.kind is FailureKind.WORKER_DIED and not failure.message
    return ansi.plain(died_of(failure) if silent else error_line(failure))


def _curve(curve: UsageCurve) -> Curve:
    name, unit, series, top = curve
    began_s = round(series.began_s, 1)
    return Curve(name=name, unit=unit, values=series.values, began_s=began_s, step_s=series.step_s, top=top)


# ---------------------------------------------------------------- as static HTML


_ended_html: WeakKeyDictionary[RunView, tuple[int, str]] = WeakKeyDictionary()


def live_ranks_html(view: RunView) -> str:
    """Return the grid of ranks with each rank's usage and last line."""
    last_lines, usage = view.output.last_lines, view.usage.ranks
    dead = view.session.dead if view.session is not None else ()
    if view.state is not RunState.RUNNING or not (last_lines or view.rank_failures or usage or dead):
        return ""
    ranks = view.rank_numbers
    columns = next((number for number in (4, 3, 2) if len(ranks) % number == 0), min(len(ranks), 4))
    cells: list[str] = []
    for at, rank in enumerate(ranks[:MAX_RANKS]):
        cells.append(_host_row(new_host(view, ranks, at)))
        latest = usage[rank].latest if rank in usage else None
        failure = view.rank_failures.get(rank)
        if rank in dead:
            label, last = "✕ dead", restart_command((rank,))
        elif failure is not None:
            label, last = f"✕ {last_part(failure.type_name) or failure.kind}", failure.message
        else:
            label, last = use_text(latest) if latest is not None else _label(view, rank), last_lines.get(rank, "")
        colour = f";color:{BAD}" if failure or rank in dead else ""
        cells.append(
            f'<div style="padding:3px 12px 4px;min-width:0;box-shadow:0 0 0 .5px {LINE}">'
            f'<b style="font-weight:600;font-size:12px{colour}">rank {rank}</b>'
            f'<span style="font-size:12px;{SOFT}"> {escape(label)}</span>'
            f'<div style="{MONO};font-size:11.5px;{SOFT};white-space:nowrap;overflow:hidden;'
            f'text-overflow:ellipsis;min-height:1.45em">{safe(ansi.plain(last)[:_MAX_LIVE_CHARS])}</div></div>'
        )
    if (rest := len(ranks) - MAX_RANKS) > 0:
        cells.append(f'<div style="padding:3px 12px">and {count_of(rest, "more rank")}</div>')
    return (
        f'<div style="display:grid;grid-template-columns:repeat({columns},minmax(0,1fr));'
        f'border-bottom:1px solid {LINE}">{"".join(cells)}</div>'
    )


def ended_ranks_html(view: RunView) -> str:
    """Return one `<details>` for each rank of an ended run, in at most 60 % of the bytes of its HTML.

    They are brief if there are too many ranks. Returns "" for one rank, and without measured usage when there are only
    few lines.
    """
    version, markup = _ended_html.get(view, (-1, ""))
    if version != view.version:
        markup = _ended(view)
        _ended_html[view] = (view.version, markup)
    return markup


def _ended(view: RunView) -> str:
    measured = any(usage.latest is not None for usage in view.usage.ranks.values())
    if not view.is_final or len(view.rank_numbers) == 1 or not (measured or view.output.total_lines > _MANY_LINES):
        return ""
    limit = int(html_limit(view.output_limit) * _SHARE)
    shows = Counter(item.rank for item in view.items if isinstance(item, DisplayItem))
    ranks = _most_urgent(view)
    frames = {rank: _frame(view, rank, shows[rank]) for rank in ranks}
    if sum(map(_size, frames.values())) > limit:
        frames = {rank: _frame(view, rank, shows[rank], is_brief=True) for rank in ranks}
    listed = sorted(ranks[: count_fitting(map(_size, frames.values()), limit)])
    room = (limit - sum(_size(frames[rank]) for rank in listed)) // max(len(listed), 1)
    lines = _last_lines(view, listed, room)
    rows: dict[int, str] = {}
    for rank in listed:
        head, foot = frames[rank]
        rows[rank] = head + _pre(lines[rank], view.output.rank_lines[rank]) + foot
    markup = _grouped(view, rows)
    if rest := len(view.rank_numbers) - len(listed):
        what = f"and {count_of(rest, 'more rank')}" if listed else count_of(rest, "rank")
        command = f"sgpu logs {view.short_id} --rank N"
        markup += f'<div style="padding:3px 12px;font-size:12px;{SOFT}">{what}: {command}</div>'
    return f'<div style="border-top:1px solid {LINE};padding:2px 0">{markup}</div>'


def _grouped(view: RunView, rows: Mapping[int, str]) -> str:
    """Return ranks' rows. Of more than eight, only those that failed or idled are open; a summary hides the others."""

    def html_of(ranks: Sequence[int]) -> str:
        return "".join(_host_row(new_host(view, ranks, at)) + rows[rank] for at, rank in enumerate(ranks))

    if len(rows) <= _MOST_ROWS:
        return html_of(list(rows))
    notable = _notable(view)
    opened = [rank for rank in rows if rank in notable][:_MOST_ROWS]
    others = [rank for rank in rows if rank not in opened]
    what = count_of(len(others), "other rank" if opened else "rank")
    return html_of(opened) + fold(what, html_of(others), "padding:2px 12px")


def _host_row(host: str) -> str:
    """Return a row with the name of the node of the ranks below it."""
    if not host:
        return ""
    return f'<div style="grid-column:1/-1;padding:3px 12px 1px;font-size:11.5px;{FAINT}">{escape(host)}</div>'


def _most_urgent(view: RunView) -> list[int]:
    """Return the ranks in order of importance: the first to fail, other failed or idle ranks, then by number."""
    culprit = view.failure.rank if view.failure is not None else None
    notable = _notable(view)
    order = sorted(view.rank_numbers, key=lambda rank: (rank != culprit, rank not in notable, rank))
    return order[:MAX_RANKS]


def _notable(view: RunView) -> set[int]:
    """Return the ranks that failed by themselves or whose GPU idled."""
    idle = {rank for rank, usage in view.usage.ranks.items() if is_low(usage)}
    failures = [view.failure, *(other for other in view.others if not _is_secondary(other))]
    return idle | {each.rank for each in failures if each is not None and each.rank is not None}


def _frame(view: RunView, rank: int, shows: int, *, is_brief: bool = False) -> tuple[str, str]:
    """Return what is before and after a rank's lines.

    Args:
        view: The run.
        rank: The rank.
        shows: Number of its displays.
        is_brief: Leave out its curve, what was measured, and the last line beside its name.
    """
    usage = view.usage.ranks.get(rank) or RankUsage(rank)
    (state, colour), label = _ended_as(view, rank), _label(view, rank)
    count = view.output.rank_lines.get(rank, 0)
    texts = [state, escape(whole_text(usage)), count_of(count, "line") if count else ""]
    curve, curves = "", [] if is_brief else usage.curves()
    if curves and not curves[0].is_flat_zero:
        stroke, title = WARN if is_low(usage) else ACCENT, f"({curve_text(curves[0])})"
        curve = " " + sparkline(curves[0].series.values, curves[0].top, title, stroke)
    seen = ansi.plain(view.output.last_lines.get(rank, "")[:_MAX_SEEN_CHARS])
    last = "" if is_brief else safe(without_bar(seen)[:_MAX_LAST_CHARS])
    ellipsis = f"flex:1 1 14em;min-width:0;{MONO};{SOFT};white-space:nowrap;overflow:hidden;text-overflow:ellipsis"
    head = (
        f'<details style="font-size:12px"><summary style="cursor:pointer;padding:3px 12px">'
        # the marker that opens it stays on its line
        f'<span style="display:inline-flex;width:calc(100% - 1.5em);flex-wrap:wrap;gap:0 12px;align-items:center">'
        f'<span style="min-width:min(23em,100%)"><b style="font-weight:600{colour}">rank {rank}</b>'
        f"{''.join(f' · {part}' for part in texts if part)}</span>{curve}"
        + (f' <span style="{ellipsis}">{last}</span>' if last else "")
        + f'</span></summary><div style="padding:2px 12px 6px 28px;background:{PANEL}">'
    )
    parts = [f"on {label}"] if label else []
    parts += [] if is_brief else measured_lines(usage)
    parts += [count_of(shows, "display")] if shows else []
    foot = "".join(f"<div>{safe(line)}</div>" for line in parts)
    foot += f'<div style="overflow-wrap:anywhere">{escape(_log(view, rank))}</div>'
    return head, f'<div style="{SOFT}">{foot}</div></div></details>'


def _size(frame: tuple[str, str]) -> int:
    return len("".join(frame).encode())


def _pre(lines: list[str], count: int) -> str:
    """Return a rank's last lines, and how many of its `count` lines are before them."""
    left_out = count - len(lines)
    before = f'<span style="{FAINT}">... {count_of(left_out, "line")} before</span>\n' if left_out > 0 else ""
    text = "\n".join(lines)
    return f'<pre style="{PRE};padding:4px 0">{before}{text}</pre>' if lines else ""


def _is_secondary(failure: Failure) -> bool:
    """Whether another rank's failure caused it, or the end of the run."""
    return failure.is_consequence or failure.after_stop


def _ended_as(view: RunView, rank: int) -> tuple[str, str]:
    """Return how the rank ended, "" if as the run did, and the style of its name."""
    if view.failure is not None and view.failure.rank == rank:
        return f'<span style="color:{BAD}">✕ failed</span>', f";color:{BAD}"
    other = next((other for other in view.others if other.rank == rank), None)
    if other is not None and not _is_secondary(other):
        return f'<span style="color:{BAD}">✕ failed</span>', ""
    if other is None:
        return "", ""
    return "released" if other.is_consequence else "stopped", ""


def _log(view: RunView, rank: int) -> str:
    """Return the command that prints the rank's whole log."""
    return f"whole log: !sgpu logs {view.short_id} --rank {rank}"


def _last_lines(view: RunView, ranks: Iterable[int], room: int) -> dict[int, list[str]]:
    """Return the last lines of each rank as HTML, at most `room` bytes per rank."""
    newest: dict[int, deque[LineItem]] = {rank: deque(maxlen=_MAX_LINES) for rank in ranks}
    for item in view.items:
        if isinstance(item, LineItem) and item.rank in newest:
            newest[item.rank].append(item)
    found: dict[int, list[str]] = {}
    for rank, items in newest.items():
        lines = [stream_html(item.stream, item.text, _line(item.text)) for item in items]
        # leave 200 bytes for the line about dropped lines
        fitting = count_fitting((len(line.encode()) + 1 for line in reversed(lines)), room - 200)
        found[rank] = lines[len(lines) - fitting :]
    return found


def _line(text: str) -> str:
    if len(text) > _MAX_LINE_CHARS:
        return escape(ansi.plain(text)[:_MAX_LINE_CHARS], quote=False) + " ..."
    return ansi.to_html(text)
