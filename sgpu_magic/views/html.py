"""Static HTML of a run: inline styles only, text from ranks escaped, the theme's colours where available.

Without styles it is still the same sentences in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from msgspec.structs import replace

from sgpu_magic.views import ansi
from sgpu_magic.views.failure import cut_lines, failure_block, stall_lines
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.html_ranks import ended_ranks_html, live_ranks_html
from sgpu_magic.views.html_style import ACCENT, BAD, BOX, FAINT, GOOD, LINE, MONO, PANEL, PRE, SOFT, WARN, safe
from sgpu_magic.views.live.schema import FailureLine, MemoryBlock, MemoryTensor, Tone
from sgpu_magic.views.output import TextSegment, segments
from sgpu_magic.views.output_buffer import (
    HEAD_SHARE,
    DisplayItem,
    GapItem,
    LineItem,
    display_text,
    gap_lines,
    text_bytes,
    trim,
)
from sgpu_magic.views.run_notes import other_lines
from sgpu_magic.views.summary_words import (
    billed_text,
    busy_text,
    cost_text,
    idle_lines,
    is_quiet,
    quiet_html,
    session_meta,
    standing_warnings,
)
from sgpu_magic.views.units import count_of
from sgpu_magic.views.words import (
    attempt_text,
    label_text,
    mark_text,
    packages_text,
    place_words,
    returned_text,
    shipped_text,
    state_word,
    tracked_link,
    tracked_text,
    values_left_there,
)
from sgpu_magic.wire.states import FailureKind, RunState

_COLOURS: dict[Tone, str] = {"plain": "inherit", "busy": ACCENT, "good": GOOD, "bad": BAD, "warn": WARN}
_PILL = f"border:1px solid {LINE};border-radius:9px;padding:0 7px;font-size:11px;{SOFT}"
_MAX_LIVE_LINES = 100
# bytes of a segment's box, and of the lines about dropped lines and the following display
_FRAME_BYTES = len(BOX) + len(PRE) + 200


def render_html(view: RunView) -> str:
    """Return the whole run; displays are included as text, since only Jupyter's renderers may render them."""
    parts = segments(view)
    drawn: list[str] = []
    for at, part in enumerate(parts):
        if isinstance(part, DisplayItem):
            text = "\n".join(_line(part.rank, line) for line in display_text(part).split("\n"))
            drawn.append(f'<pre style="{PRE}">{text}</pre>')
        else:
            drawn.append(render_segment_html(view, part, at == 0, at == len(parts) - 1))
    return "".join(drawn)


def render_segment_html(view: RunView, segment: TextSegment, first: bool, last: bool, limit: int | None = None) -> str:
    """Return one segment: the first has the header, the failure or the ranks; the last the ended ranks and the footer.

    Args:
        view: The run.
        segment: One of `segments(view)`.
        first: It is the first segment.
        last: It is the last segment.
        limit: Bytes allowed for a live form, which shows the newest lines; by default the segment's share of
            `view.output_limit`.
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
    lines = _lines(view, segment, max(room, 2000), live=limit is not None)
    if not (top or bottom or lines):
        return ""
    return f'<div style="{BOX}">{top}{lines}{bottom}</div>'


def _standing(view: RunView) -> str:
    """Return what is shown above the lines: the failure of an ended run, or an active run's ranks and stall."""
    if view.is_final:
        return failure_html(view) + _warnings(idle_lines(view))
    if view.left:
        return ""
    return live_ranks_html(view) + _warnings(idle_lines(view)) + stall_html(view)


def _share(view: RunView, segment: TextSegment) -> int:
    """Return the bytes allowed for this segment's lines, header and footer, by its share of all lines."""
    every = sum(1 for item in view.items if not isinstance(item, DisplayItem))
    # the first display's caption has a separate box
    frames = _FRAME_BYTES * (len(view.items) - every + 2)
    room = max(view.output_limit - len(ended_ranks_html(view).encode()) - frames, 0)
    return room * (len(segment.items) + 1) // (every + 1)


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
    said = " · ".join(safe(text) for text in meta if text)
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
    return _warnings([*view.notes, *standing_warnings(view)])


def _warnings(sentences: list[str]) -> str:
    return "".join(
        f'<div style="padding:4px 12px;font-size:12px;color:{WARN};border-bottom:1px solid {LINE}">'
        f"{safe(sentence)}</div>"
        for sentence in sentences
    )


def _lines(view: RunView, segment: TextSegment, room: int, live: bool) -> str:
    if live and len(segment.items) > _MAX_LIVE_LINES:
        segment = replace(segment, items=_newest(segment.items))
    # keyed by the line object, so that kept lines are rendered only once
    drawn = {id(item): _line(item.rank, item.text) for item in segment.items if isinstance(item, LineItem)}
    sizes = [1 + text_bytes(drawn[id(item)]) if isinstance(item, LineItem) else 0 for item in segment.items]
    lines: list[str] = []
    for item in trim(segment.items, sizes, room, head_share=0.0 if live else HEAD_SHARE):
        if isinstance(item, GapItem):
            lines += [f'<span style="{FAINT}">{line}</span>' for line in gap_lines(item, view.short_id)]
        elif isinstance(item, LineItem):
            lines.append(drawn[id(item)])
    if segment.next_rank is not None:
        lines.append(f'<span style="{FAINT}">[{segment.next_rank}] displays:</span>')
    newline = "\n"
    return f'<pre style="{PRE}">{newline.join(lines)}</pre>' if lines else ""


def _newest(items: tuple[LineItem | GapItem, ...]) -> tuple[LineItem | GapItem, ...]:
    """Return one gap and the last lines, as a live form shows only the newest ones."""
    kept = trim(items, [isinstance(item, LineItem) for item in items], _MAX_LIVE_LINES, head_share=0.0)
    return tuple(item for item in kept if not isinstance(item, DisplayItem))


def _line(rank: int, text: str) -> str:
    return f'<span style="{FAINT}">[{rank}]</span> {ansi.to_html(text)}'


def _footer(view: RunView) -> str:
    parts: list[str] = []
    if view.is_final and view.state is not RunState.SUCCEEDED:
        culprit = view.failure.rank if view.failure else None
        parts += other_lines(view.others, culprit)[:6]
    parts += values_left_there(view)
    if not view.is_final or view.state is RunState.SUCCEEDED:
        parts += [returned_text(view), shipped_text(view), label_text(view), packages_text(view)]
    if not view.is_final and view.output.total_lines:
        parts.append(count_of(view.output.total_lines, "line"))
    if view.left:
        parts.append(view.left)
    elif view.is_final and view.state is RunState.FAILED:
        parts.append(f"sgpu logs {view.short_id}")
    else:
        parts.append(f"run {view.short_id}")
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


_MAX_EXCERPT_CHARS = 12_000
_MAX_WHOLE_CHARS = 40_000
_NAMED = re.compile(r"[A-Za-z][\w.]*:")


def failure_html(view: RunView) -> str:
    """Return the failure with the cell's own lines, "" for a run that has not failed."""
    failure = view.failure
    if failure is None or view.state is RunState.SUCCEEDED:
        return ""
    block = failure_block(view, failure, _MAX_EXCERPT_CHARS, _MAX_WHOLE_CHARS)
    lines = [_form_line(line, failure.kind) for line in block.lines]
    whole = ""
    if block.whole:
        body = "\n".join(_form_line(line, failure.kind) for line in block.whole)
        whole = (
            f'<details style="padding:0 12px 6px;font-size:12px"><summary style="cursor:pointer;{SOFT}">'
            f'the whole traceback</summary><pre style="{PRE};padding:4px 0 0">{body}</pre></details>'
        )
    newline = "\n"
    return (
        f'<div style="border-bottom:1px solid {LINE};border-left:3px solid {BAD}">'
        f'<pre style="{PRE};padding-left:9px">{newline.join(lines)}</pre>{whole}{_memory(block.memory)}</div>'
    )


def stall_html(view: RunView) -> str:
    """Return where the ranks of a stalled run wait, "" for a run that makes progress."""
    newline = "\n"
    lines = [escape(line, quote=False) for line in cut_lines(stall_lines(view), _MAX_EXCERPT_CHARS)]
    if not lines:
        return ""
    lines[0] = f'<b style="font-weight:600;color:{WARN}">{lines[0]}</b>'
    return (
        f'<div style="border-bottom:1px solid {LINE};border-left:3px solid {WARN}">'
        f'<pre style="{PRE};padding-left:9px">{newline.join(lines)}</pre></div>'
    )


def _form_line(line: FailureLine, failure: FailureKind) -> str:
    safe = escape(line.text, quote=False)
    match line.kind:
        case "title" if failure is FailureKind.USER_CODE:
            name, _, where = safe.partition(" ")
            return f'<b style="font-weight:600;color:{BAD}">{name}</b> {where}'
        case "culprit":
            return f'<span style="color:{BAD}">{safe}</span>'
        case "error" if _NAMED.match(safe):
            name, _, rest = safe.partition(":")
            return f'<span style="color:{BAD}">{name}</span>:{rest}'
        case _:
            return safe


# held by tensors, cached by torch's allocator, held by others
_BAR_OPACITIES = (0.85, 0.45, 0.2)
_BAR_NAMES = ("used", "reserved, unused", "other processes")
_TABLE = "border-collapse:collapse;table-layout:auto;width:auto;margin:0;border:0;font-size:12px"
_CELL = "padding:1px 14px 1px 0;white-space:nowrap;border:0;background:none;font-variant-numeric:tabular-nums"
_NUMBERS = range(2, 6)


def _memory(block: MemoryBlock | None) -> str:
    """Return the ranks' memory as a table with bars, and the failed rank's largest tensors; "" if not recorded."""
    if block is None:
        return ""
    heads = "".join(
        _cell(head, at in _NUMBERS, f";font-weight:400;{SOFT}", "th") for at, head in enumerate(block.heads)
    )
    rows = ""
    for row in block.rows:
        colour = f";color:{BAD};font-weight:600" if row.culprit else ""
        cells = _cell(f"{row.rank}", False, colour)
        cells += "".join(_cell(cell, at + 1 in _NUMBERS) for at, cell in enumerate(row.cells))
        rows += f'<tr style="background:none">{cells}<td style="{_CELL};width:160px">{_bar(row.shares)}</td></tr>'
    more = f'<div style="{SOFT}">{escape(block.more)}</div>' if block.more else ""
    drawn = (
        f'<div>{block.title}</div><table style="{_TABLE}"><thead style="border:0"><tr>{heads}<th></th></tr></thead>'
        f"<tbody>{rows}</tbody></table>{more}"
    )
    if block.tensors:
        named = "".join(map(_tensor, block.tensors))
        drawn += f'<div style="padding-top:4px">{escape(block.largest)}</div>'
        drawn += f'<table style="{_TABLE}"><tbody>{named}</tbody></table>'
    box = f"padding:4px 12px 8px 9px;font-size:12px;border-top:1px solid {LINE};overflow-x:auto"
    return f'<div style="{box}">{drawn}</div>'


def _tensor(tensor: MemoryTensor) -> str:
    shape, dtype, size = tensor.cells
    style = f"{_CELL};{MONO};text-align:left;white-space:normal;overflow-wrap:anywhere"
    name = f'<td style="{style}">{escape(tensor.name)}</td>'
    told = _cell(shape, False, f";{SOFT}") + _cell(dtype, False, f";{SOFT}") + _cell(size, True)
    return f'<tr style="background:none">{name}{told}</tr>'


def _cell(text: str, right: bool, style: str = "", tag: str = "td") -> str:
    align = "right" if right else "left"
    return f'<{tag} style="{_CELL};text-align:{align}{style}">{escape(text)}</{tag}>'


def _bar(shares: Sequence[float]) -> str:
    parts = "".join(
        f'<div style="width:{share * 100:.1f}%;background:currentColor;opacity:{opacity}" title="{name}"></div>'
        for share, opacity, name in zip(shares, _BAR_OPACITIES, _BAR_NAMES, strict=True)
        if share > 0
    )
    return f'<div style="display:flex;height:8px;border-radius:2px;overflow:hidden;background:{LINE}">{parts}</div>'
