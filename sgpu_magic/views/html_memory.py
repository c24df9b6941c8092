"""What held the memory when an allocation failed, as static HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sgpu_magic.views.html_style import BAD, LINE, MONO, SOFT
from sgpu_magic.views.memory import RANK_HEADS, TITLE, TensorRow, memory_table
from sgpu_magic.views.view import RunView

# what tensors hold, what torch's allocator keeps besides, what others hold
_BAR_OPACITIES = (0.85, 0.45, 0.2)
_BAR_NAMES = ("used", "reserved besides", "of others")
_TABLE = "border-collapse:collapse;table-layout:auto;width:auto;margin:0;border:0;font-size:12px"
_CELL = "padding:1px 14px 1px 0;white-space:nowrap;border:0;background:none;font-variant-numeric:tabular-nums"
_NUMBERS = range(2, 6)


def memory_html(view: RunView) -> str:
    """Return the ranks' memory as a table with bars, and the culprit's largest tensors; "" where nobody has looked."""
    table = memory_table(view, view.failure)
    if table is None:
        return ""
    heads = "".join(_cell(head, at in _NUMBERS, f";font-weight:400;{SOFT}", "th") for at, head in enumerate(RANK_HEADS))
    rows = ""
    for row in table.rows:
        colour = f";color:{BAD};font-weight:600" if row.is_culprit else ""
        cells = _cell(f"{row.rank}", False, colour)
        cells += "".join(_cell(cell, at + 1 in _NUMBERS) for at, cell in enumerate(row.cells))
        rows += f'<tr style="background:none">{cells}<td style="{_CELL};width:160px">{_bar(row.shares)}</td></tr>'
    more = f'<div style="{SOFT}">{escape(table.more)}</div>' if table.more else ""
    drawn = (
        f'<div>{TITLE}</div><table style="{_TABLE}"><thead style="border:0"><tr>{heads}<th></th></tr></thead>'
        f"<tbody>{rows}</tbody></table>{more}"
    )
    if table.tensors:
        named = "".join(map(_tensor, table.tensors))
        drawn += f'<div style="padding-top:4px">{escape(table.largest)}</div>'
        drawn += f'<table style="{_TABLE}"><tbody>{named}</tbody></table>'
    box = f"padding:4px 12px 8px 9px;font-size:12px;border-top:1px solid {LINE};overflow-x:auto"
    return f'<div style="{box}">{drawn}</div>'


def _tensor(tensor: TensorRow) -> str:
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
