"""What failed, as static HTML: the failure with the cell's own lines, a stall, and what held the memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from sgpu_magic.views.failure import ends_of_others, failure_block, stall_lines
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.html_style import BAD, LINE, MONO, PRE, SOFT, WARN, fold, safe, scroll
from sgpu_magic.views.live.schema import FailureLine, MemoryBlock, MemoryTensor
from sgpu_magic.views.output_buffer import html_limit
from sgpu_magic.views.tracebacks import clipped, cut_lines
from sgpu_magic.wire.states import FailureKind, RunState

_MAX_STACK_CHARS = 8_000
_MAX_WHOLE_SHARE = 0.2
_MAX_OTHERS = 6
_NAMED = re.compile(r"[A-Za-z][\w.]*:")


def failure_html(view: RunView) -> str:
    """Return the failure with the cell's own lines, "" for a run that has not failed."""
    failure = view.failure
    if failure is None or view.state is RunState.SUCCEEDED:
        return ""
    block = failure_block(view, failure, _MAX_STACK_CHARS, int(html_limit(view.output_limit) * _MAX_WHOLE_SHARE))
    newline = "\n"
    lines = newline.join(_form_line(line, failure.kind) for line in block.lines)
    whole = ""
    if block.whole:
        body = newline.join(_form_line(line, failure.kind) for line in block.whole)
        title = "the whole traceback" if failure.traceback_text.strip() else "the whole message"
        whole = fold(title, scroll(f'<pre style="{PRE};padding:4px 0 0">{body}</pre>', title))
    style = f"padding:0 12px 4px 9px;font-size:12px;{SOFT}"
    others = "".join(f'<div style="{style}">{safe(clipped(line))}</div>' for line in ends_of_others(view, _MAX_OTHERS))
    return (
        f'<div style="border-bottom:1px solid {LINE};border-left:3px solid {BAD}">'
        f'<pre style="{PRE};padding-left:9px">{lines}</pre>{whole}{_memory(block.memory)}{others}</div>'
    )


def stall_html(view: RunView) -> str:
    """Return where the ranks of a stalled run wait, "" for a run that makes progress."""
    newline = "\n"
    lines = [escape(line, quote=False) for line in cut_lines(stall_lines(view), _MAX_STACK_CHARS)]
    if not lines:
        return ""
    lines[0] = f'<b style="font-weight:600;color:{WARN}">{lines[0]}</b>'
    return (
        f'<div style="border-bottom:1px solid {LINE};border-left:3px solid {WARN}">'
        f'<pre style="{PRE};padding-left:9px">{newline.join(lines)}</pre></div>'
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
