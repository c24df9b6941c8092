"""Static HTML of a run: inline styles only, text from ranks escaped, the theme's colours where available.

Without styles it is still the same sentences in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from msgspec.structs import replace

from sgpu_magic.views import ansi
from sgpu_magic.views.failure import failure_html
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.html_style import (
    ACCENT,
    BAD,
    BOX,
    FAINT,
    GOOD,
    LINE,
    PANEL,
    PRE,
    SCROLL_LINES,
    SOFT,
    WARN,
    boxed,
    fold,
    safe,
    scroll,
)
from sgpu_magic.views.live.schema import Tone
from sgpu_magic.views.output import ShownDisplay, TextSegment, segments, share_of
from sgpu_magic.views.output_buffer import (
    HEAD_SHARE,
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
from sgpu_magic.views.run_notes import other_lines
from sgpu_magic.views.stacks import stall_html
from sgpu_magic.views.summary_words import (
    billed_text,
    busy_text,
    cost_text,
    dead_rank_lines,
    idle_lines,
    is_quiet,
    log_files,
    quiet_html,
    rank_label,
    rank_width,
    session_meta,
    silence_lines,
)
from sgpu_magic.views.units import ROW_CHARS, count_of
from sgpu_magic.views.words import (
    attempt_text,
    mark_text,
    moved_words,
    next_step,
    packages_text,
    place_words,
    state_word,
    tracked_link,
    tracked_text,
    values_left_there,
)
from sgpu_magic.wire.base import RunState

_COLOURS: dict[Tone, str] = {"plain": "inherit", "busy": ACCENT, "good": GOOD, "bad": BAD, "warn": WARN}
_PILL = f"border:1px solid {LINE};border-radius:9px;padding:0 7px;font-size:11px;{SOFT}"
_MAX_LIVE_LINES = 100
_LABEL = "output of the ranks"
# bytes of a segment's lines, however little is left
_MIN_BYTES = 500
# bytes of a segment's box, and of the lines about dropped lines
_FRAME_BYTES = len(BOX) + len(PRE) + 200
_SCROLL_BYTES = len(boxed(scroll(fold("", ""), _LABEL))) + 3 * len(PRE)


def render_html(view: RunView) -> str:
    """Return the whole run; displays are included as text, since only Jupyter's renderers may render them."""
    parts = segments(view)
    drawn: list[str] = []
    for at, part in enumerate(parts):
        if isinstance(part, ShownDisplay):
            rank, width = part.item.rank, rank_width(view)
            text = "\n".join(_line(rank, line, width) for line in display_text(part.item).split("\n"))
            drawn.append(f'<pre style="{PRE}">{text}</pre>')
        elif isinstance(part, TextSegment):
            drawn.append(render_segment_html(view, part, at == 0, at == len(parts) - 1))
    return "".join(drawn)


def render_segment_html(view: RunView, segment: TextSegment, first: bool, last: bool, limit: int | None = None) -> str:
    """Return one segment: the first has the header, the failure or the ranks; the last the ended ranks and the footer.

    Args:
        view: The run.
        segment: One of `segments(view)`.
        first: It is the first segment.
        last: It is the last segment.
        limit: Bytes allowed for a live form, which shows the newest lines; by default the segment's share of the
            HTML's part of `view.output_limit`.
    """
    if is_quiet(view):
        return quiet_html(view) if first else ""
    top = _header(view) + _standing(view) + _notes(view) if first else ""
    bottom = ended_ranks_html(view) + _footer(view) if last else ""
    if limit is None:
        footer = _footer(view) if last else ""
        room = _share(view, segment) - len(top.encode()) - len(footer.encode())
    else:
        room = limit - len(top.encode()) - len(bottom.encode())
    lines = _lines(view, segment, room, live=limit is not None)
    if not (top or bottom or lines):
        return ""
    return boxed(f"{top}{lines}{bottom}")


def _standing(view: RunView) -> str:
    """Return what is shown above the lines: the failure of an ended run, or an active run's ranks and stall."""
    if view.is_final:
        return failure_html(view) + _warnings(idle_lines(view))
    if view.left:
        return ""
    return live_ranks_html(view) + _warnings(idle_lines(view)) + stall_html(view)


def _share(view: RunView, segment: TextSegment) -> int:
    """Return the bytes allowed for this segment's lines, header and footer, by its share of all lines."""
    displays = sum(isinstance(item, DisplayItem) for item in view.items)
    frames = _FRAME_BYTES * (displays + 1)
    room = max(html_limit(view.output_limit) - len(ended_ranks_html(view).encode()) - frames, 0)
    return share_of(view, segment, room)


def _header(view: RunView) -> str:
    word = state_word(view)
    meta = [*place_words(view), attempt_text(view)]
    if view.left:
        pass
    elif view.state is RunState.QUEUED:
        meta += [f"position {view.position}"] if view.position else []
        meta.append(view.waiting_for or view.reason)
    else:
        # a refused run has no duration
        meta.append(view.times.text())
        meta.append(cost_text(view))
        if view.session is not None:
            meta += session_meta(view)
        elif view.reason and (view.state is RunState.CANCELLED or not view.is_final):
            meta.append(view.reason)
        meta += [billed_text(view), busy_text(view.usage)] if view.is_final and view.session is None else []
    whole = '<span style="white-space:nowrap">'
    said = " · ".join(
        f"{whole}{safe(text)}</span>" if text == view.times.text() else safe(text) for text in meta if text
    )
    mark = mark_text(view)
    pill = f'<span style="{_PILL}">{mark}</span> ' if mark else ""
    return (
        f'<div style="display:flex;flex-wrap:wrap;align-items:baseline;gap:2px 10px;padding:6px 12px;'
        f'background:{PANEL};border-bottom:1px solid {LINE}">{pill}'
        f'<b style="font-weight:600;color:{_COLOURS[word.tone]}">{word.shape} {safe(word.text)}</b> '
        f'<b style="font-weight:600">{safe(view.name)}</b> '
        f'<span style="{SOFT}">{said}</span></div>'
    )


def _notes(view: RunView) -> str:
    """Return the notes: information in grey, and what asks the user for something as a warning."""
    warned = frozenset(view.warnings)
    notes = "".join(_sentence(note, f"color:{WARN}" if note in warned else SOFT) for note in view.notes)
    grey = [*view.past_stall, *silence_lines(view)]
    return notes + "".join(_sentence(line, SOFT) for line in grey) + _warnings(dead_rank_lines(view))


def _warnings(sentences: list[str]) -> str:
    return "".join(_sentence(sentence, f"color:{WARN}") for sentence in sentences)


def _sentence(sentence: str, style: str) -> str:
    return (
        f'<div style="padding:4px 12px;font-size:12px;border-bottom:1px solid {LINE}">'
        f'<span style="{style}">{safe(sentence)}</span></div>'
    )


def _lines(view: RunView, segment: TextSegment, room: int, live: bool) -> str:
    if live and len(segment.items) > _MAX_LIVE_LINES:
        segment = replace(segment, items=_newest(segment.items))
    width = rank_width(view)
    # keyed by the line object, so that kept lines are rendered only once
    drawn = {id(item): _line(item.rank, item.text, width) for item in segment.items if isinstance(item, LineItem)}
    sizes = [1 + text_bytes(drawn[id(item)]) if isinstance(item, LineItem) else 0 for item in segment.items]
    room -= _SCROLL_BYTES if not live and len(sizes) > SCROLL_LINES else 0
    kept = trim(segment.items, sizes, max(room, _MIN_BYTES), head_share=0.0 if live else HEAD_SHARE)

    def pre(items: Sequence[Item], padding: str = "") -> str:
        lines: list[str] = []
        for item in items:
            if isinstance(item, GapItem):
                lines += [_faint(line) for line in gap_lines(item, view.short_id, log_files(view))]
            elif isinstance(item, LineItem):
                lines.append(drawn[id(item)])
        newline = "\n"
        return f'<pre style="{PRE}{padding}">{newline.join(lines)}</pre>' if lines else ""

    rows = [1 + len(item.text) // ROW_CHARS for item in kept if isinstance(item, LineItem)]
    if live or sum(rows) <= SCROLL_LINES:
        return pre(kept)
    below = ""
    gap = next((item for item in kept if isinstance(item, GapItem) and item.lines), None)
    if gap is not None:
        told = gap_lines(gap, view.short_id, log_files(view))[0]
        style = f"padding:3px 12px 4px;font-size:12px;border-top:1px solid {LINE}"
        below = f'<div style="{style}"><span style="{SOFT}">{safe(told)}</span></div>'
    if len(rows) <= 2 * SHOWN_LINES:
        return scroll(pre(kept), _LABEL) + below
    first = _nth_line(kept, SHOWN_LINES)
    last = len(kept) - _nth_line(kept[::-1], SHOWN_LINES)
    between = kept[first:last]
    more = count_of(sum(isinstance(item, LineItem) for item in between), "more line")
    middle = fold(more, pre(between, padding=";padding:2px 0"), "padding:2px 12px")
    body = pre(kept[:first], padding=";padding-bottom:0") + middle + pre(kept[last:], padding=";padding-top:0")
    return scroll(body, _LABEL) + below


def _nth_line(items: Sequence[Item], number: int) -> int:
    """Return the index after the first `number` lines."""
    at = [at for at, item in enumerate(items) if isinstance(item, LineItem)]
    return at[number - 1] + 1


def _faint(text: str) -> str:
    return f'<span style="{FAINT}">{escape(text, quote=False)}</span>'


def _newest(items: tuple[LineItem | GapItem, ...]) -> tuple[LineItem | GapItem, ...]:
    """Return one gap and the last lines, as a live form shows only the newest ones."""
    kept = trim(items, [isinstance(item, LineItem) for item in items], _MAX_LIVE_LINES, head_share=0.0)
    return tuple(item for item in kept if not isinstance(item, DisplayItem))


def _line(rank: int, text: str, width: int) -> str:
    return f'<span style="{FAINT}">{rank_label(rank, width)}</span> {ansi.to_html(text)}'


def _footer(view: RunView) -> str:
    parts: list[str] = []
    if view.is_final and view.state is not RunState.SUCCEEDED and view.failure is None:
        parts += other_lines(view.others)[:6]
    parts += [*values_left_there(view), *moved_words(view), packages_text(view)]
    if not view.is_final and view.output.total_lines:
        parts.append(count_of(view.output.total_lines, "line"))
    parts.append(next_step(view) or f"run {view.short_id}")
    said = [safe(ansi.plain(part)[:1000]) for part in parts if part]
    text = " · ".join([*said[:-1], *_tracked(view), *said[-1:]])
    return (
        f'<div style="padding:4px 12px;font-size:12px;border-top:1px solid {LINE};background:{PANEL}">'
        f'<span style="{SOFT}">{text}</span></div>'
    )


def _tracked(view: RunView) -> list[str]:
    """Return its MLflow run, as a link if it has a web page."""
    if not view.is_final:
        return []
    link = tracked_link(view)
    if link is None:
        return [safe(text) for text in (tracked_text(view),) if text]
    url, text = escape(link.url), safe(link.text)
    style = "color:inherit;text-decoration:underline"
    return [f'<a href="{url}" target="_blank" rel="noopener noreferrer" style="{style}">{text}</a>']
