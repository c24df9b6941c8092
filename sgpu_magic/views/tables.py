"""Tables of what a magic lists, as text and as HTML, and a kernel's packages for `%sgpu_env`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sgpu_magic.views import ansi
from sgpu_magic.views.html_style import BAD, LINE, PANEL, SANS, SOFT, WARN, safe

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


def titled_box(title: str, beside: str, body: str) -> str:
    """Return a box of HTML with a title, a few words beside it, and `body`, which is HTML, below."""
    return (
        f'<div style="display:inline-block;min-width:420px;max-width:100%;border:1px solid {LINE};'
        f'border-radius:6px;overflow:auto;{SANS};font-size:13px;line-height:1.45">'
        f'<div style="padding:6px 12px;background:{PANEL};border-bottom:1px solid {LINE}">'
        f'<b style="font-weight:600">{safe(title)}</b> <span style="{SOFT}">{safe(beside)}</span></div>{body}</div>'
    )


def sentences(lines: Iterable[str], style: str = "") -> str:
    """Return lines for a box, one below the other."""
    return "".join(f'<div style="padding:3px 12px{";" * bool(style)}{style}">{safe(line)}</div>' for line in lines)


# ---------------------------------------------------------------- a kernel's packages

_MOST_ROWS = 400


@dataclass(frozen=True, slots=True)
class EnvironmentReport:
    """What `%sgpu_env` shows.

    Args:
        title: Python and its version.
        facts: Short texts beside the title.
        lines: Sentences that nobody has to act on.
        pending: What is installed but not used yet, with the remedy.
        broken: What will not work, with the remedy.
        compared_to: What the differences are to, "" when nothing was compared.
        differences: Rows of package, its version here, its version there, and a remark.
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
        lines += ["", _headline(report)]
        if report.differences:
            lines += aligned([_heads(report), *report.differences[:_MOST_ROWS]])
            lines += _more(report)
    return "\n".join(lines)


def environment_html(report: EnvironmentReport) -> str:
    """Return the report as HTML with inline style."""
    parts = [
        sentences(report.lines),
        sentences(report.pending, f"color:{WARN}"),
        sentences(report.broken, f"color:{BAD}"),
    ]
    if report.compared_to:
        parts.append(f'<div style="padding:6px 12px 3px">{safe(_headline(report))}</div>')
        if report.differences:
            parts.append(table(_heads(report), report.differences[:_MOST_ROWS]))
            parts.append(sentences(_more(report), SOFT))
    return titled_box(report.title, " · ".join(report.facts), "".join(parts))


def _headline(report: EnvironmentReport) -> str:
    if not report.differences:
        return f"no difference to {report.compared_to}"
    count = len(report.differences)
    return f"{count} difference{'s' * (count > 1)} to {report.compared_to}"


def _heads(report: EnvironmentReport) -> Row:
    return ("package", "here", report.compared_to, "")


def _more(report: EnvironmentReport) -> list[str]:
    more = len(report.differences) - _MOST_ROWS
    return [f"and {more} more"] if more > 0 else []
