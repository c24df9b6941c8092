"""Static HTML of a run: inline styles only, text from ranks escaped, the theme's colours where available.

A front end that strips styles still shows the same sentences in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from sgpu_magic.formatting import count_of
from sgpu_magic.views import ansi
from sgpu_magic.views.failure import failure_html
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.format_run import (
    attempt_text,
    format_moved,
    format_placement,
    mark_text,
    next_step,
    packages_text,
    state_word,
    tracked_link,
    tracked_text,
    values_left_there,
)
from sgpu_magic.views.format_summary import (
    billed_text,
    busy_text,
    cost_text,
    dead_rank_lines,
    idle_lines,
    is_quiet,
    log_files,
    quiet_line,
    rank_label,
    rank_width,
    session_meta,
    silence_lines,
)
from sgpu_magic.views.html_style import (
    ACCENT,
    BAD,
    BOX,
    FAINT,
    GOOD,
    LINE,
    PANEL,
    PRE,
    SANS,
    SCROLL_LINES,
    SOFT,
    WARN,
    boxed,
    fold,
    safe,
    scroll,
    stream_html,
)
from sgpu_magic.views.live.schema import Tone
from sgpu_magic.views.metric_charts import metrics_html
from sgpu_magic.views.output import ShownDisplay, TextSegment, last_text, segments, share_of
from sgpu_magic.views.output_buffer import (
    HEAD_SHARE,
    MIN_BYTES,
    SHOWN_LINES,
    DisplayItem,
    GapItem,
    Item,
    LineItem,
    display_text,
    gap_lines,
    html_limit,
    text_bytes,
    trim,
)
from sgpu_magic.views.ranks import ended_ranks_html, live_ranks_html
from sgpu_magic.views.run_notes import finishing_text, other_lines
from sgpu_magic.views.stacks import stall_html
from sgpu_magic.views.units import ROW_CHARS
from sgpu_magic.wire.base import RunState

_COLOURS: dict[Tone, str] = {"plain": "inherit", "busy": ACCENT, "good": GOOD, "bad": BAD, "warn": WARN}
_PILL = f"border:1px solid {LINE};border-radius:9px;padding:0 7px;font-size:11px;{SOFT}"
_MAX_LIVE_LINES = 100
_LABEL = "output of the ranks"
# bytes of a segment's box, and of the lines about dropped lines
_FRAME_BYTES = len(BOX) + len(PRE) + 200
_SCROLL_BYTES = len(boxed(scroll(fold("", ""), _LABEL))) + 3 * len(PRE)


def render_html(view: RunView) -> str:
    """Return the whole run; displays are included as text, since only Jupyter's renderers may render them."""
    parts = segments(view)
    end = last_text(parts)
    markup = ""
    for at, part in enumerate(parts):
        if isinstance(part, ShownDisplay):
            rank, width = part.item.rank, rank_width(view)
            markup += _pre(_line(LineItem(rank, "stdout", line), width) for line in display_text(part.item).split("\n"))
        elif isinstance(part, TextSegment):
            markup += render_segment_html(view, part, at == 0, at == end)
    return markup


def render_segment_html(view: RunView, segment: TextSegment, first: bool, last: bool, limit: int | None = None) -> str:
    """Return one segment: the first has the header, the failure or the ranks; the last the rest.

    The rest are the ended ranks, the metrics and the footer.

    Args:
        view: The run.
        segment: One of `segments(view)`.
        first: It is the first segment.
        last: It is the last segment.
        limit: Bytes allowed for a live form, which shows the newest lines; by default the segment's share of the
            HTML's part of `view.output_limit`.
    """
    if is_quiet(view):
        line = f'<div style="{SANS};font-size:12px;{SOFT};padding:1px 0">{safe(quiet_line(view))}</div>'
        return line if first else ""
    top = _header(view) + _standing(view) + _notes(view) if first else ""
    below, footer = (_below_lines(view), _footer(view)) if last else ("", "")
    # the share of the final form already excludes what is below the lines
    room = _share(view, segment) if limit is None else limit - len(below.encode())
    lines = _lines(view, segment, room - len((top + footer).encode()), live=limit is not None)
    body = f"{top}{lines}{below}{footer}"
    return boxed(body) if body else ""


def _below_lines(view: RunView) -> str:
    """Return an ended run's ranks and metrics."""
    if not view.is_final:
        return ""
    return ended_ranks_html(view) + metrics_html(view.metrics, html_limit(view.output_limit))


def _standing(view: RunView) -> str:
    """Return what is shown above the lines: the failure of an ended run, or an active run's ranks and stall."""
    idle = idle_lines(view)
    if view.is_final:
        return failure_html(view) + _sentences(idle, idle)
    return "" if view.left else live_ranks_html(view) + _sentences(idle, idle) + stall_html(view)


def _share(view: RunView, segment: TextSegment) -> int:
    """Return the bytes allowed for this segment's lines, header and footer, by its share of all lines."""
    displays = sum(isinstance(item, DisplayItem) for item in view.items)
    frames = _FRAME_BYTES * (displays + 1)
    room = max(html_limit(view.output_limit) - len(_below_lines(view).encode()) - frames, 0)
    return share_of(view, segment, room)


def _header(view: RunView) -> str:
    word = state_word(view)
    # a refused run has no duration
    meta, duration = [*format_placement(view), attempt_text(view)], view.times.text()
    if view.state is RunState.QUEUED and not view.left:
        meta += [f"position {view.position}" if view.position else "", view.waiting_for or view.reason]
    elif not view.left:
        meta += [finishing_text(view.finishing), duration, cost_text(view), *session_meta(view)]
        if view.session is None:
            meta.append(view.reason if view.state is RunState.CANCELLED or not view.is_final else "")
            meta += [billed_text(view), busy_text(view.usage)] if view.is_final else []
    whole = f'<span style="white-space:nowrap">{safe(duration)}</span>'
    line = " · ".join(whole if text == duration else safe(text) for text in meta if text)
    pill = f'<span style="{_PILL}">{mark_text(view)}</span> ' if view.spec.auto else ""
    return (
        f'<div style="display:flex;flex-wrap:wrap;align-items:baseline;gap:2px 10px;padding:6px 12px;'
        f'background:{PANEL};border-bottom:1px solid {LINE}">{pill}'
        f'<b style="font-weight:600;color:{_COLOURS[word.tone]}">{word.shape} {safe(word.text)}</b> '
        f'<b style="font-weight:600">{safe(view.name)}</b> '
        f'<span style="{SOFT}">{line}</span></div>'
    )


def _notes(view: RunView) -> str:
    """Return the notes: information in grey, and what asks the user for something as a warning."""
    dead = dead_rank_lines(view)
    return _sentences([*view.notes, *view.past_stall, *silence_lines(view), *dead], [*view.warnings, *dead])


def _sentences(lines: Sequence[str], warned: Sequence[str]) -> str:
    return "".join(
        f'<div style="padding:4px 12px;font-size:12px;border-bottom:1px solid {LINE}">'
        f'<span style="{f"color:{WARN}" if line in warned else SOFT}">{safe(line)}</span></div>'
        for line in lines
    )


def _lines(view: RunView, segment: TextSegment, room: int, live: bool) -> str:
    items: Sequence[Item] = segment.items
    if live:
        items = trim(items, [isinstance(item, LineItem) for item in items], _MAX_LIVE_LINES, head_share=0.0)
    width = rank_width(view)
    # keyed by the line object, so that kept lines are rendered only once
    rendered = {id(item): _line(item, width) for item in items if isinstance(item, LineItem)}
    sizes = [1 + text_bytes(rendered[id(item)]) if isinstance(item, LineItem) else 0 for item in items]
    room -= _SCROLL_BYTES if not live and len(sizes) > SCROLL_LINES else 0
    kept = trim(items, sizes, max(room, MIN_BYTES), head_share=0.0 if live else HEAD_SHARE)
    dropped = next((item for item in kept if isinstance(item, GapItem)), GapItem(0, 0))
    gaps = gap_lines(dropped, view.short_id, log_files(view))
    gap = "\n".join(f'<span style="{FAINT}">{escape(line, quote=False)}</span>' for line in gaps)

    def pre(items: Sequence[Item], padding: str = "") -> str:
        return _pre((rendered[id(item)] if isinstance(item, LineItem) else gap for item in items), padding)

    rows = [1 + len(item.text) // ROW_CHARS for item in kept if isinstance(item, LineItem)]
    if live or sum(rows) <= SCROLL_LINES:
        return pre(kept)
    below = ""
    if dropped.lines:
        style = f"padding:3px 12px 4px;font-size:12px;border-top:1px solid {LINE}"
        below = f'<div style="{style}"><span style="{SOFT}">{safe(gaps[0])}</span></div>'
    body = pre(kept)
    if len(rows) > 2 * SHOWN_LINES:
        lines = [at for at, item in enumerate(kept) if isinstance(item, LineItem)]
        first, last = lines[SHOWN_LINES - 1] + 1, lines[-SHOWN_LINES]
        more = count_of(len(rows) - 2 * SHOWN_LINES, "more line")
        middle = fold(more, pre(kept[first:last], padding=";padding:2px 0"), "padding:2px 12px")
        body = pre(kept[:first], padding=";padding-bottom:0") + middle + pre(kept[last:], padding=";padding-top:0")
    return scroll(body, _LABEL) + below


def _pre(lines: Iterable[str], padding: str = "") -> str:
    text = "\n".join(lines)
    return f'<pre style="{PRE}{padding}">{text}</pre>' if text else ""


def _line(item: LineItem, width: int) -> str:
    text = stream_html(item.stream, item.text, ansi.to_html(item.text))
    return f'<span style="{FAINT}">{rank_label(item.rank, width)}</span> {text}'


def _footer(view: RunView) -> str:
    parts: list[str] = []
    if view.is_final and view.state is not RunState.SUCCEEDED and view.failure is None:
        parts += other_lines(view.others)[:6]
    parts += [*values_left_there(view), *format_moved(view), packages_text(view)]
    if not view.is_final and view.output.total_lines:
        parts.append(count_of(view.output.total_lines, "line"))
    # the sentence about a run that is not followed any more names it
    parts += [next_step(view)] if view.left else [next_step(view), f"run {view.short_id}"]
    *paragraphs, last = [safe(ansi.plain(part)[:1000]) for part in parts if part]
    text = " · ".join(filter(None, [*paragraphs, _tracked(view) if view.is_final else "", last]))
    return (
        f'<div class="sgpu-end" style="padding:4px 12px;font-size:12px;border-top:1px solid {LINE};background:{PANEL}">'
        f'<span style="{SOFT}">{text}</span></div>'
    )


def _tracked(view: RunView) -> str:
    """Return its MLflow run, as a link if it has a web page."""
    link = tracked_link(view)
    if link is None:
        return safe(tracked_text(view))
    style = "color:inherit;text-decoration:underline"
    url, text = escape(link.url), safe(link.text)
    return f'<a href="{url}" target="_blank" rel="noopener noreferrer" style="{style}">{text}</a>'
