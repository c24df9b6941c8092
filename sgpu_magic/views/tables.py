"""Tables of what a magic lists, as text and as HTML."""

from __future__ import annotations

from collections.abc import Sequence

from sgpu_magic.views import ansi
from sgpu_magic.views.html_style import BAD, LINE, SOFT, safe

__all__ = ["Row", "aligned", "safe", "table"]

Row = tuple[str, ...]


def aligned(rows: Sequence[Row], right: tuple[int, ...] = ()) -> list[str]:
    """Return the rows with their columns below each other, those in `right` at the right."""
    rows = [tuple(ansi.plain(cell) for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def table(heads: Row, rows: Sequence[Row], right: tuple[int, ...] = ()) -> str:
    """Return heads and rows as an HTML table with inline style; the columns of `right` to the right."""

    def cells(row: Row, tag: str, style: str) -> str:
        drawn = ""
        for column, cell in enumerate(row):
            align = "right" if column in right else "left"
            colour = f";color:{BAD}" if cell in ("failed", "timed out") else ""
            drawn += (
                f'<{tag} style="text-align:{align};padding:2px 12px;white-space:nowrap;'
                f'font-variant-numeric:tabular-nums{style}{colour}">{safe(cell)}</{tag}>'
            )
        return f"<tr>{drawn}</tr>"

    head = cells(heads, "th", f";font-weight:400;{SOFT}")
    body = "".join(cells(row, "td", "") for row in rows)
    return (
        f'<table style="border-collapse:collapse;table-layout:auto;width:auto;margin:0;border:0;'
        f"border-top:1px solid {LINE};"
        f'font-size:12.5px"><thead>{head}</thead><tbody>{body}</tbody></table>'
    )
