"""How views describe a run's failure, as text and HTML: its traceback, its other ranks, what held the memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import accumulate
from typing import Literal

from sgpu_magic.formatting import clipped, count_of, ends, format_bytes, format_gb
from sgpu_magic.views import ansi
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.format_run import failed_line, failure_sentence
from sgpu_magic.views.html_style import BAD, LINE, MONO, PRE, SOFT, fold, safe, scroll
from sgpu_magic.views.live.schema import FailureBlock, FailureLine, MemoryBlock, MemoryCard, MemoryTensor
from sgpu_magic.views.output_buffer import html_limit
from sgpu_magic.views.run_notes import death_sentence, error_line, last_part, other_lines
from sgpu_magic.views.stacks import ending_stacks, last_python_line
from sgpu_magic.views.tracebacks import (
    beginning,
    cut_lines,
    excerpt_of,
    line_of_cell,
    source_of,
    split_traceback,
    stack_of,
    traceback_body,
)
from sgpu_magic.views.units import aligned
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.rank_events import Failure, RankMemory, TensorUse

# limits for the frames, and for the message
_MAX_TRACEBACK_LINES = 80
_MAX_TRACEBACK_CHARS = 8_000
_MAX_OTHERS = 40
# the exception's type at the beginning of a message
_NAMED = re.compile(r"[^\W\d_][\w.]*:")
_LAST_LINE = "its last Python line"

_LineKind = Literal["title", "code", "culprit", "error", "text"]
_MAX_RANKS = 16
_MAX_TENSORS = 10
_MAX_NAME = 80
_BAR_CHARS = 20
_BAR = "█▓▒░"
_MAX_STACK_CHARS = 8_000
_MAX_WHOLE_SHARE = 0.2
_MAX_OTHERS_IN_HTML = 6

# held by tensors, cached by torch's allocator, held by others
_BAR_OPACITIES = (0.85, 0.45, 0.2)
_BAR_NAMES = ("used", "reserved, unused", "other processes")
_TABLE = "border-collapse:collapse;table-layout:auto;width:auto;margin:0;border:0;font-size:12px"
_CELL = "padding:1px 14px 1px 0;white-space:nowrap;border:0;background:none;font-variant-numeric:tabular-nums"
_NUMBERS = range(2, 6)


def failure_block(view: RunView, failure: Failure, most_chars: int, most_whole_chars: int) -> FailureBlock:
    """Return a failure for the static HTML and the live view, the cell's own lines first.

    The exception's type, its rank, the cell's line and the beginning of the message are always included.

    Args:
        view: The run.
        failure: Its root cause, or a rank's failure while the run is still stopping.
        most_chars: Maximum characters of the ranks' stacks.
        most_whole_chars: Maximum characters of the whole traceback and message.
    """
    if failure.kind is FailureKind.USER_CODE:
        name = clipped(last_part(failure.type_name)) or "error"
        where = [f"on rank {failure.rank}" if failure.rank is not None else "", clipped(failure.host)]
        lines = [_line(f"{name} {' · '.join(filter(None, where))}".rstrip(), "title")]
        excerpt = excerpt_of(failure, source_of(view.spec))
        lines += [_line(line, _kind(line)) for line in excerpt.code]
        lines += [_line(line, "text" if at else "error") for at, line in enumerate(excerpt.message)]
        whole = [] if excerpt.is_whole else traceback_body(failure) or failure.message.split("\n")
    else:
        sentence = failure_sentence(view) if view.is_final else death_sentence(failure, view.ranks)
        (title, *rest), is_all = beginning(sentence.split("\n"))
        lines = [_line(title, "title"), *(_line(line, "text") for line in rest)]
        lines += _last_position(view, failure) if view.is_final else []
        body = traceback_body(failure)
        whole = [*([] if is_all else [*sentence.split("\n"), ""]), *body]
    lines += [_line(line, "text") for line in cut_lines(ending_stacks(view), most_chars)]
    memory = memory_block(view, failure)
    behind = tuple(_line(line, _kind(ansi.plain(line))) for line in cut_lines(whole, most_whole_chars))
    return FailureBlock(rank=failure.rank, lines=tuple(lines), whole=behind, memory=memory)


def _last_position(view: RunView, failure: Failure) -> list[FailureLine]:
    """Return the last line that a dead rank executed, with the lines around it, and its last output."""
    words = output_tail(view, failure)
    context = line_of_cell(failure, source_of(view.spec)) if failure.rank is not None else []
    lines: list[FailureLine] = []
    if context:
        at, *code = context
        is_in_message = bool(words) and words[0].startswith(_LAST_LINE)
        lines = [_line(f"{_LAST_LINE}: {at}" if is_in_message else at, "text")]
        lines += [_line(clipped(line), _kind(line)) for line in code]
        words = words[1:] if is_in_message else words
    return [*lines, *(_line(clipped(word), "text") for word in words)]


def _kind(line: str) -> _LineKind:
    if line.startswith("--"):
        return "culprit"
    return "error" if _NAMED.match(line) else "code"


def _line(text: str, kind: _LineKind) -> FailureLine:
    return FailureLine(text=ansi.plain(text), kind=kind)


def failure_lines(view: RunView, failure: Failure) -> list[str]:
    """Return the failed rank with its whole traceback and the other ranks in single lines, without the run's id."""
    lines = [failed_line(view)]
    parts = split_traceback(failure)
    if any(parts):
        for part in parts:
            left_out = f"... {len(part) - _MAX_TRACEBACK_LINES:,} lines of the traceback ..."
            lines += cut_lines(ends(part, _MAX_TRACEBACK_LINES, left_out), _MAX_TRACEBACK_CHARS)
    elif failure.kind is FailureKind.USER_CODE:
        lines.append(error_line(failure))
    elif failure.kind is FailureKind.WORKER_DIED:
        lines += output_tail(view, failure)
    return [*lines, *memory_lines(view, failure), *ending_stacks(view), *ends_of_others(view, _MAX_OTHERS)]


def ends_of_others(view: RunView, most: int) -> list[str]:
    """Return at most `most` lines about how the other ranks ended, and how many are left out."""
    lines = other_lines(view.others, view.failure.rank if view.failure else None)
    rest = len(lines) - most
    return [*lines[:most], f"... and {rest:,} more: sgpu logs {view.short_id}"] if rest > 0 else lines


def output_tail(view: RunView, failure: Failure) -> list[str]:
    """Return the last Python line and output of a rank that died without a traceback, unless its message has them."""
    if failure.rank is None:
        return []
    lines: list[str] = []
    cell, last_line = view.spec.cell, ansi.plain(view.output.last_lines.get(failure.rank, "")).strip()
    known = failure.death
    if known is None or not known.last_line:
        at = last_python_line(stack_of(failure, cell, failure.where), cell)
        lines += [f"{_LAST_LINE}: {at}"] if at else []
    if last_line and (known is None or not known.last_output):
        lines.append(f"its last output: {last_line}")
    return lines


# ---------------------------------------------------------------- memory


def memory_block(view: RunView, failure: Failure | None) -> MemoryBlock | None:
    """Return what held the memory; None for other failures than out of memory, or when it was not recorded.

    Args:
        view: The run.
        failure: Its root cause, or a rank's failure while the run is still stopping.
    """
    if failure is None or not failure.out_of_memory:
        return None
    others = (failure, *(view.others if view.is_final else view.rank_failures.values()))
    by_rank: dict[int, RankMemory] = {}
    for each in others:
        if each.memory is not None and each.rank is not None:
            by_rank.setdefault(each.rank, each.memory)
    ranks = sorted(by_rank, key=lambda rank: (rank != failure.rank, rank))
    if not ranks:
        return None
    largest = by_rank[failure.rank].largest if failure.rank in by_rank else ()
    left_out = len(ranks) - _MAX_RANKS
    return MemoryBlock(
        title="memory when it failed",
        heads=("rank", "device", "used", "reserved", "free", "total"),
        rows=tuple(_row(rank, by_rank[rank], rank == failure.rank) for rank in ranks[:_MAX_RANKS]),
        tensors=tuple(map(_tensor, largest[:_MAX_TENSORS])),
        largest=f"largest tensors of rank {failure.rank}" if largest else "",
        more=f"and {count_of(left_out, 'more rank')}" if left_out > 0 else "",
    )


def memory_lines(view: RunView, failure: Failure | None) -> list[str]:
    """Return `memory_block` as text, with a bar: held by tensors, cached by torch, held by others, free."""
    block = memory_block(view, failure)
    if block is None:
        return []
    rows = [(f"{row.rank}", *row.cells, _bar(row.shares)) for row in block.rows]
    lines = [f"{block.title}:", *_indented(aligned([(*block.heads, ""), *rows], right=(2, 3, 4, 5)))]
    lines += [f"  {block.more}"] if block.more else []
    if block.tensors:
        tensors = [(tensor.name, *tensor.cells) for tensor in block.tensors]
        lines += [f"{block.largest}:", *_indented(aligned(tensors, right=(3,)))]
    return lines


def _row(rank: int, memory: RankMemory, culprit: bool) -> MemoryCard:
    total = memory.total_bytes
    kept = max(memory.reserved_bytes - memory.used_bytes, 0)
    foreign = max(total - memory.free_bytes - memory.used_bytes - kept, 0)
    shares: list[float] = []
    for count in (memory.used_bytes, kept, foreign):
        shares.append(max(min(count / total, 1.0 - sum(shares)), 0.0) if total > 0 else 0.0)
    reserved = format_gb(memory.reserved_bytes) if memory.reserved_bytes else "-"
    words = (format_gb(memory.used_bytes), reserved, format_gb(memory.free_bytes), format_gb(total) if total else "-")
    device = ansi.plain(memory.device)[:_MAX_NAME]
    rounded = tuple(round(share, 4) for share in shares)
    return MemoryCard(rank=rank, cells=(device, *words), shares=rounded, culprit=culprit)


def _tensor(use: TensorUse) -> MemoryTensor:
    name = clipped(ansi.plain(use.name) or "(unnamed)", _MAX_NAME)
    shape = f"({', '.join(map(str, use.shape))}{',' if len(use.shape) == 1 else ''})"
    cells = (shape[:_MAX_NAME], ansi.plain(use.dtype)[:_MAX_NAME], format_bytes(use.size_bytes))
    return MemoryTensor(name=name, cells=cells)


def _bar(shares: Sequence[float]) -> str:
    bar = ""
    for end, mark in zip(accumulate(shares), _BAR, strict=False):
        bar += mark * (round(end * _BAR_CHARS) - len(bar))
    return bar.ljust(_BAR_CHARS, _BAR[-1])


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


# ---------------------------------------------------------------- as static HTML


def failure_html(view: RunView) -> str:
    """Return the failure with the cell's own lines, "" for a run that has not failed."""
    failure = view.failure
    if failure is None or view.state is RunState.SUCCEEDED:
        return ""
    block = failure_block(view, failure, _MAX_STACK_CHARS, int(html_limit(view.output_limit) * _MAX_WHOLE_SHARE))
    lines = "\n".join(_form_line(line, failure.kind) for line in block.lines)
    whole = ""
    if block.whole:
        body = "\n".join(_form_line(line, failure.kind) for line in block.whole)
        title = "the whole traceback" if failure.traceback_text.strip() else "the whole message"
        whole = fold(title, scroll(f'<pre style="{PRE};padding:4px 0 0">{body}</pre>', title))
    style = f"padding:0 12px 4px 9px;font-size:12px;{SOFT}"
    other_ends = map(clipped, ends_of_others(view, _MAX_OTHERS_IN_HTML))
    others = "".join(f'<div style="{style}">{safe(line)}</div>' for line in other_ends)
    return (
        f'<div style="border-bottom:1px solid {LINE};border-left:3px solid {BAD}">'
        f'<pre style="{PRE};padding-left:9px">{lines}</pre>{whole}{_memory_html(block.memory)}{others}</div>'
    )


def _form_line(line: FailureLine, failure: FailureKind) -> str:
    text = escape(line.text, quote=False)
    match line.kind:
        case "title" if failure is FailureKind.USER_CODE:
            name, _, where = text.partition(" ")
            return f'<b style="font-weight:600;color:{BAD}">{name}</b> {where}'
        case "culprit":
            # the class by which JupyterLab's extension finds the line
            return f'<span class="sgpu-failure-culprit" style="color:{BAD}">{text}</span>'
        case "error" if _NAMED.match(text):
            name, _, rest = text.partition(":")
            return f'<span style="color:{BAD}">{name}</span>:{rest}'
        case _:
            return text


def _memory_html(block: MemoryBlock | None) -> str:
    """Return the ranks' memory as a table with bars, and the failed rank's largest tensors; "" if not recorded."""
    if block is None:
        return ""
    style = f";font-weight:400;{SOFT}"
    heads = "".join(_cell(head, at in _NUMBERS, style, "th") for at, head in enumerate(block.heads))
    rows = ""
    for row in block.rows:
        colour = f";color:{BAD};font-weight:600" if row.culprit else ""
        cells = _cell(f"{row.rank}", False, colour)
        cells += "".join(_cell(cell, at + 1 in _NUMBERS) for at, cell in enumerate(row.cells))
        rows += f'<tr style="background:none">{cells}<td style="{_CELL};width:160px">{_bar_html(row.shares)}</td></tr>'
    more = f'<div style="{SOFT}">{escape(block.more)}</div>' if block.more else ""
    markup = (
        f'<div>{block.title}</div><table style="{_TABLE}"><thead style="border:0"><tr>{heads}<th></th></tr></thead>'
        f"<tbody>{rows}</tbody></table>{more}"
    )
    if block.tensors:
        named = "".join(map(_tensor_html, block.tensors))
        markup += f'<div style="padding-top:4px">{escape(block.largest)}</div>'
        markup += f'<table style="{_TABLE}"><tbody>{named}</tbody></table>'
    box = f"padding:4px 12px 8px 9px;font-size:12px;border-top:1px solid {LINE};overflow-x:auto"
    return f'<div style="{box}">{markup}</div>'


def _tensor_html(tensor: MemoryTensor) -> str:
    shape, dtype, size = tensor.cells
    style = f"{_CELL};{MONO};text-align:left;white-space:normal;overflow-wrap:anywhere"
    name = f'<td style="{style}">{escape(tensor.name)}</td>'
    cells = _cell(shape, False, f";{SOFT}") + _cell(dtype, False, f";{SOFT}") + _cell(size, True)
    return f'<tr style="background:none">{name}{cells}</tr>'


def _cell(text: str, right: bool, style: str = "", tag: str = "td") -> str:
    align = "right" if right else "left"
    return f'<{tag} style="{_CELL};text-align:{align}{style}">{escape(text)}</{tag}>'


def _bar_html(shares: Sequence[float]) -> str:
    parts = ""
    for share, opacity, name in zip(shares, _BAR_OPACITIES, _BAR_NAMES, strict=True):
        style = f"width:{share * 100:.1f}%;background:currentColor;opacity:{opacity}"
        parts += f'<div style="{style}" title="{name}"></div>' if share > 0 else ""
    return f'<div style="display:flex;height:8px;border-radius:2px;overflow:hidden;background:{LINE}">{parts}</div>'
