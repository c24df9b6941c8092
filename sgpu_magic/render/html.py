"""The static HTML form: inline style only, text from ranks escaped, the theme's colours where it has some.

Read with all styles stripped it is still the same sentences in the same order.
"""

from __future__ import annotations

from dataclasses import replace
from html import escape

from sgpu_magic.protocol.records import Lease
from sgpu_magic.protocol.states import FailureKind, RunState
from sgpu_magic.render import ansi
from sgpu_magic.render.failure import cell_excerpt, last_part, other_lines, traceback_body
from sgpu_magic.render.items import DisplayItem, GapItem, LineItem, display_text, gap_lines, trim
from sgpu_magic.render.segments import TextSegment, segments
from sgpu_magic.render.text import (
    attempt_text,
    backend,
    culprits_last_words,
    ending_stacks,
    failure_sentence,
    returned_text,
    shipped_text,
    stall_lines,
)
from sgpu_magic.render.units import TIMES, count_of, format_clock, format_seconds
from sgpu_magic.render.view import RunView

__all__ = ["device_html", "render_html", "render_segment_html", "segments"]

# greys that are right on light and dark alike need no theme; the rest asks JupyterLab, then VS Code
LINE = "rgba(128,128,128,.28)"
PANEL = "rgba(128,128,128,.07)"
SANS = "font-family:var(--jp-ui-font-family,var(--vscode-font-family,system-ui,sans-serif))"
MONO = "font-family:var(--jp-code-font-family,ui-monospace,'DejaVu Sans Mono',Menlo,monospace)"
SOFT = "opacity:.68"
FAINT = "opacity:.55"
ACCENT = "var(--jp-brand-color1,var(--vscode-textLink-foreground,#1e88e5))"
GOOD = "var(--jp-success-color1,var(--vscode-testing-iconPassed,#2e9e44))"
BAD = "var(--jp-error-color1,var(--vscode-errorForeground,#d9403c))"
WARN = "var(--jp-warn-color0,var(--vscode-editorWarning-foreground,#c77800))"

_COLOURS = {
    RunState.RUNNING: ACCENT,
    RunState.STARTING: ACCENT,
    RunState.PREPARING: ACCENT,
    RunState.SUCCEEDED: GOOD,
    RunState.FAILED: BAD,
    RunState.TIMED_OUT: BAD,
    RunState.CANCELLED: WARN,
    RunState.CANCELLING: WARN,
}
_SHAPES = {
    RunState.QUEUED: "○",
    RunState.SUCCEEDED: "✓",
    RunState.FAILED: "✕",
    RunState.TIMED_OUT: "✕",
    RunState.CANCELLED: "■",
    RunState.CANCELLING: "■",
}
_PRE = f"margin:0;padding:6px 12px;{MONO};font-size:12px;line-height:1.5;white-space:pre-wrap;overflow-wrap:anywhere"
_MAX_EXCERPT_CHARS = 12_000
_MAX_WHOLE_CHARS = 40_000
_MAX_LIVE_CHARS = 160
_MAX_CELLS = 64
_MAX_LIVE_LINES = 100


def render_html(view: RunView) -> str:
    """Return the whole run; displays stand as their text, since only Jupyter's renderers may draw them."""
    parts = segments(view)
    drawn: list[str] = []
    for at, part in enumerate(parts):
        if isinstance(part, DisplayItem):
            text = "\n".join(_line(part.rank, line) for line in display_text(part).split("\n"))
            drawn.append(f'<pre style="{_PRE}">{text}</pre>')
        else:
            drawn.append(render_segment_html(view, part, at == 0, at == len(parts) - 1))
    return "".join(drawn)


def render_segment_html(view: RunView, segment: TextSegment, first: bool, last: bool, limit: int | None = None) -> str:
    """Return one segment: the first has the header and the live lines, the last the error and the footer.

    Args:
        view: The run.
        segment: One of `segments(view)`.
        first: It is the first of them.
        last: It is the last of them.
        limit: Bytes allowed for a live form, which shows the newest lines; the segment's share of
            `view.output_limit` when left out.
    """
    live = "" if view.is_final or view.left else _ranks(view) + _stall(view)
    top = _header(view) + _notes(view) + live if first else ""
    bottom = (_error(view) if view.is_final else "") + _footer(view) if last else ""
    share = _share(view, segment) if limit is None else limit
    room = max(share - len(top.encode()) - len(bottom.encode()), 2000)
    lines = _lines(view, segment, room, live=limit is not None)
    if not (top or bottom or lines):
        return ""
    return (
        f'<div style="border:1px solid {LINE};border-radius:6px;overflow:hidden;{SANS};font-size:13px;'
        f'line-height:1.45;margin:2px 0">{top}{lines}{bottom}</div>'
    )


def device_html(lease: Lease, ranks: int) -> str:
    """Return the devices, escaped: `4 ranks · cpu`, or number and type, and that they are simulated."""
    if lease.device_type == "cpu":
        return f"{count_of(ranks, 'rank')} · cpu"
    simulated = " (simulated on cpu)" if lease.simulated else ""
    return escape(f"{lease.ranks} {TIMES} {lease.device_type.upper()}{simulated}")


def _share(view: RunView, segment: TextSegment) -> int:
    """Return the bytes this segment may take, by its part of all lines."""
    every = sum(1 for item in view.items if not isinstance(item, DisplayItem))
    return view.output_limit * (len(segment.items) + 1) // (every + 1)


def _header(view: RunView) -> str:
    colour = _COLOURS.get(view.state, "inherit") if not view.left else "inherit"
    state = f"{_SHAPES.get(view.state, '●')} {view.state}" if not view.left else "→ goes on"
    meta: list[str] = []
    if view.lease is not None:
        meta.append(f"{device_html(view.lease, view.ranks)}, {backend(view.lease)}")
    else:
        meta.append(count_of(view.ranks, "rank"))
    meta.append(escape(view.pool))
    meta += [attempt_text(view)] if view.attempt > 1 else []
    if view.left:
        pass
    elif view.state is RunState.QUEUED:
        meta += [f"position {view.position}"] if view.position else []
        meta += [escape(view.waiting_for or view.reason)] if view.waiting_for or view.reason else []
    else:
        elapsed = view.elapsed_s()
        meta.append(format_seconds(elapsed) if view.is_final else format_clock(elapsed))
        if view.reason and (view.state is RunState.CANCELLED or not view.is_final):
            meta.append(escape(view.reason))
    return (
        f'<div style="display:flex;flex-wrap:wrap;align-items:baseline;gap:2px 10px;padding:6px 12px;'
        f'background:{PANEL};border-bottom:1px solid {LINE}">'
        f'<b style="font-weight:600;color:{colour}">{state}</b> '
        f'<b style="font-weight:600">{escape(view.name)}</b> '
        f'<span style="{SOFT}">{" · ".join(meta)}</span></div>'
    )


def _notes(view: RunView) -> str:
    return "".join(
        f'<div style="padding:4px 12px;font-size:12px;color:{WARN};border-bottom:1px solid {LINE}">'
        f"{escape(ansi.plain(note))}</div>"
        for note in view.notes
    )


def _stall(view: RunView) -> str:
    newline = "\n"
    lines = [escape(line, quote=False) for line in _cut(stall_lines(view), _MAX_EXCERPT_CHARS)]
    if not lines:
        return ""
    lines[0] = f'<b style="font-weight:600;color:{WARN}">{lines[0]}</b>'
    return (
        f'<div style="border-bottom:1px solid {LINE};border-left:3px solid {WARN}">'
        f'<pre style="{_PRE};padding-left:9px">{newline.join(lines)}</pre></div>'
    )


def _ranks(view: RunView) -> str:
    """Return the grid of ranks with what each has said last."""
    said = view.last_lines
    if view.state is not RunState.RUNNING or not (said or view.rank_failures):
        return ""
    columns = next((number for number in (4, 3, 2) if view.ranks % number == 0), min(view.ranks, 4))
    cells: list[str] = []
    shown = min(view.ranks, _MAX_CELLS)
    for rank in range(shown):
        label = f" {escape(view.labels[rank])}" if rank < len(view.labels) else ""
        failure = view.rank_failures.get(rank)
        if failure is not None:
            label, last = f" ✕ {escape(last_part(failure.type_name) or failure.kind)}", failure.message
        else:
            last = said.get(rank, "")
        colour = f";color:{BAD}" if failure else ""
        cells.append(
            f'<div style="padding:3px 12px 4px;min-width:0;box-shadow:0 0 0 .5px {LINE}">'
            f'<b style="font-weight:600;font-size:12px{colour}">rank {rank}</b>'
            f'<span style="font-size:12px;{SOFT}">{label}</span>'
            f'<div style="{MONO};font-size:11.5px;{SOFT};white-space:nowrap;overflow:hidden;'
            f'text-overflow:ellipsis;min-height:1.45em">{escape(ansi.plain(last)[:_MAX_LIVE_CHARS])}</div></div>'
        )
    more = f"and {count_of(view.ranks - shown, 'more rank')}" if shown < view.ranks else ""
    cells += [f'<div style="padding:3px 12px">{more}</div>'] if more else []
    return (
        f'<div style="display:grid;grid-template-columns:repeat({columns},minmax(0,1fr));'
        f'border-bottom:1px solid {LINE}">{"".join(cells)}</div>'
    )


def _lines(view: RunView, segment: TextSegment, room: int, live: bool) -> str:
    if live and len(segment.items) > _MAX_LIVE_LINES:
        segment = replace(segment, items=_newest(segment.items))
    drawn = {at: _line(item.rank, item.text) for at, item in enumerate(segment.items) if isinstance(item, LineItem)}
    # ASCII is the rule, so that measuring costs nothing
    sizes = [
        0 if (text := drawn.get(at)) is None else 1 + (len(text) if text.isascii() else len(text.encode()))
        for at in range(len(segment.items))
    ]
    kept = trim(segment.items, sizes, room, head_share=0.0 if live else 0.4)
    head = next((at for at, item in enumerate(kept) if isinstance(item, GapItem)), len(kept))
    tail = len(kept) - head - 1
    lines = [drawn[at] for at in range(head)]
    if head < len(kept):
        gap = kept[head]
        if isinstance(gap, GapItem):
            lines += [f'<span style="{FAINT}">{line}</span>' for line in gap_lines(gap, view.short_id)]
        lines += [drawn[at] for at in range(len(segment.items) - tail, len(segment.items))]
    if segment.next_rank is not None:
        lines.append(f'<span style="{FAINT}">[{segment.next_rank}] displays:</span>')
    newline = "\n"
    return f'<pre style="{_PRE}">{newline.join(lines)}</pre>' if lines else ""


def _newest(items: tuple[LineItem | GapItem, ...]) -> tuple[LineItem | GapItem, ...]:
    """Return the last lines, before them one gap for the rest: a live form follows, it does not grow."""
    kept = trim(items, [isinstance(item, LineItem) for item in items], _MAX_LIVE_LINES, head_share=0.0)
    return tuple(item for item in kept if not isinstance(item, DisplayItem))


def _line(rank: int, text: str) -> str:
    return f'<span style="{FAINT}">[{rank}]</span> {ansi.to_html(text)}'


def _error(view: RunView) -> str:
    failure = view.failure
    if failure is None or view.state is RunState.SUCCEEDED:
        return ""
    whole = ""
    if failure.kind is FailureKind.USER_CODE:
        where = [f"on rank {failure.rank}" if failure.rank is not None else "", escape(failure.host)]
        name = escape(last_part(failure.type_name) or "error")
        lines = [f'<b style="font-weight:600;color:{BAD}">{name}</b> {" · ".join(filter(None, where))}']
        excerpt, left_out = ([], False) if view.error_follows else cell_excerpt(failure)
        lines += [_traceback_line(line) for line in _cut(excerpt, _MAX_EXCERPT_CHARS)]
        if not excerpt and failure.message:
            lines.append(escape(ansi.plain(failure.message)[:_MAX_EXCERPT_CHARS]))
        if left_out:
            body = "\n".join(_traceback_line(line) for line in _cut(traceback_body(failure), _MAX_WHOLE_CHARS))
            whole = (
                f'<details style="padding:0 12px 6px;font-size:12px"><summary style="cursor:pointer;{SOFT}">'
                f'the whole traceback</summary><pre style="{_PRE};padding:4px 0 0">{body}</pre></details>'
            )
    else:
        sentence = ansi.plain(failure_sentence(view))[:_MAX_EXCERPT_CHARS]
        lines = [escape(sentence), *(escape(line) for line in culprits_last_words(view))]
        if not view.error_follows:
            lines += [_traceback_line(line) for line in _cut(traceback_body(failure), _MAX_EXCERPT_CHARS)]
    lines += [escape(line, quote=False) for line in _cut(ending_stacks(view), _MAX_EXCERPT_CHARS)]
    newline = "\n"
    return (
        f'<div style="border-top:1px solid {LINE};border-left:3px solid {BAD}">'
        f'<pre style="{_PRE};padding-left:9px">{newline.join(lines)}</pre>{whole}</div>'
    )


def _traceback_line(line: str) -> str:
    line = ansi.plain(line)
    safe = escape(line, quote=False)
    if line.startswith("--"):
        return f'<span style="color:{BAD}">{safe}</span>'
    name, colon, rest = safe.partition(":")
    if colon and name and name[0].isalpha() and name.replace(".", "").replace("_", "").isalnum():
        return f'<span style="color:{BAD}">{name}</span>:{rest}'
    return safe


def _cut(lines: list[str], most: int) -> list[str]:
    """Return the beginning and the end of `lines`, together at most about `most` characters."""
    if sum(map(len, lines)) + len(lines) <= most:
        return lines
    joined = "\n".join(lines)
    return [*joined[: most // 2].split("\n"), "...", *joined[-most // 2 :].split("\n")]


def _footer(view: RunView) -> str:
    parts: list[str] = []
    if view.is_final and view.state is not RunState.SUCCEEDED:
        culprit = view.failure.rank if view.failure else None
        parts += other_lines(view.others, culprit)[:6]
    parts += [
        f"rank {result.rank}'s last value stayed there: {result.value_problem}"
        for result in view.results[:4]
        if result.value_problem
    ]
    if not view.is_final or view.state is RunState.SUCCEEDED:
        parts += [returned_text(view), shipped_text(view)]
    if not view.is_final and view.total_lines:
        parts.append(count_of(view.total_lines, "line"))
    if view.left:
        parts.append(view.left)
    elif view.is_final and view.state is RunState.FAILED:
        parts.append(f"sgpu logs {view.short_id}")
    else:
        parts.append(f"run {view.short_id}")
    text = " · ".join(escape(ansi.plain(part)[:1000]) for part in parts if part)
    return (
        f'<div style="padding:4px 12px;font-size:12px;border-top:1px solid {LINE};background:{PANEL}">'
        f'<span style="{SOFT}">{text}</span></div>'
    )
