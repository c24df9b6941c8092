"""Building blocks of static HTML: colours, boxes, tables, curves. Inline styles only, with the theme's colours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby

from sgpu_magic.views import ansi
from sgpu_magic.views.live.log_streams import is_stderr_text
from sgpu_magic.views.units import Row
from sgpu_magic.views.usage import thinned

# the greys suit light and dark themes; the other colours come from JupyterLab's theme, else from VS Code's
LINE = "rgba(128,128,128,.28)"
PANEL = "rgba(128,128,128,.07)"
SANS = "font-family:var(--jp-ui-font-family,var(--vscode-font-family,system-ui,sans-serif))"
MONO = "font-family:var(--jp-code-font-family,ui-monospace,'DejaVu Sans Mono',Menlo,monospace)"
SOFT = "opacity:.68"
FAINT = "opacity:.64"
# with the text's colour mixed in: a theme's own colours have too little contrast
ACCENT = "color-mix(in srgb,var(--jp-brand-color1,var(--vscode-textLink-foreground,#1e88e5)) 80%,currentColor)"
GOOD = "color-mix(in srgb,var(--jp-success-color1,var(--vscode-testing-iconPassed,#2e9e44)) 72%,currentColor)"
BAD = "color-mix(in srgb,var(--jp-error-color1,var(--vscode-errorForeground,#d9403c)) 78%,currentColor)"
WARN = "color-mix(in srgb,var(--jp-warn-color0,var(--vscode-editorWarning-foreground,#c77800)) 66%,currentColor)"

# a ground that leaves text enough contrast in light and dark themes
STDERR = "background:rgba(230,140,0,.13)"
PRE = (
    f"margin:0;padding:6px 12px;{MONO};font-size:12px;line-height:1.5;white-space:pre-wrap;word-break:normal;"
    "overflow-wrap:anywhere"
)
SCROLL_LINES = 20
# height of `SCROLL_LINES` lines of a `PRE`, with its padding
_SCROLL_PX = 18 * SCROLL_LINES + 12
BOX = f"border:1px solid {LINE};border-radius:6px;overflow:hidden;{SANS};font-size:13px;line-height:1.45;margin:2px 0"
_BREAKS = "white-space:normal;overflow-wrap:anywhere;min-width:7em"

# print everything, as paper can't be scrolled; where front ends strip this element, the inline styles apply
_PRINTED = (
    "<style>@media print{.sgpu-scroll,.sgpu-scrolls{max-height:none!important;overflow:visible!important}"
    ".sgpu-saved-fold::details-content{content-visibility:visible!important;block-size:auto!important}}</style>"
)
_SCROLLS = 'class="sgpu-scroll"'
WIDTH = 132
HEIGHT = 18
_MAX_POINTS = 44
# height in the SVG's coordinates, so that integer coordinates are precise enough
_UNITS = 2 * HEIGHT
_PAD = 3.0


class Markup(str):
    """HTML that `table` inserts as it is."""

    __slots__ = ()


def safe(text: str) -> str:
    """Return untrusted text as HTML.

    JupyterLab renders text between two dollar signs as mathematics, even amounts of money, so each sign gets its own
    element.
    """
    return escape(ansi.plain(text)).replace("$", "<span>$</span>")


def boxed(body: str) -> str:
    """Return HTML in the box of a run."""
    scrolls, printed = (" sgpu-scrolls", _PRINTED) if _SCROLLS in body else ("", "")
    return f'<div class="sgpu-box{scrolls}" style="{BOX}">{printed}{body}</div>'


def stream_html(stream: str, line: str, markup: str) -> str:
    """Return a line of the log with the ground of stderr if it is set apart.

    Args:
        stream: `stdout` or `stderr`.
        line: The line.
        markup: The line as HTML.
    """
    if stream != "stderr" or not is_stderr_text(line):
        return markup
    return f'<span style="{STDERR}">{markup}</span>'


def scroll(body: str, label: str) -> str:
    """Return HTML in a box of at most twenty lines that scrolls, shows its end at first, and is printed whole."""
    # a box whose items are laid out from the bottom is scrolled to its end, without a script
    style = f"max-height:{_SCROLL_PX}px;overflow:auto;display:flex;flex-direction:column-reverse"
    return (
        f'<div {_SCROLLS} role="group" aria-label="{label}" tabindex="0" style="{style}">'
        f'<div style="flex:none">{body}</div></div>'
    )


def fold(summary: str, body: str, style: str = "padding:0 12px 6px") -> str:
    """Return HTML behind a summary, which opens it."""
    return (
        f'<details class="sgpu-saved-fold" style="{style};font-size:12px"><summary style="cursor:pointer;{SOFT}">'
        f"{summary}</summary>{body}</details>"
    )


def table(
    heads: Row, rows: Sequence[Row], right: Sequence[int] = (), breaks: Sequence[int] = (), below: int | None = None
) -> str:
    """Return heads and rows as an HTML table with inline style.

    Args:
        heads: The heads of the columns.
        rows: The rows.
        right: The right-aligned columns.
        breaks: The columns that break their lines, so that the table fits into a box whose width is limited.
        below: The column whose texts are drawn below their rows, as wide as the table; None for no such column.
    """
    columns = [column for column in range(len(heads)) if column != below]

    def cells(row: Row, tag: str, style: str) -> str:
        markup = ""
        for column in columns:
            align = "right" if column in right else "left"
            colour = f";color:{BAD}" if row[column] in ("failed", "timed out") else ""
            lines = _BREAKS if column in breaks else "white-space:nowrap"
            cell = row[column]
            content = cell if isinstance(cell, Markup) else safe(cell)
            markup += (
                f'<{tag} style="text-align:{align};padding:2px 8px;{lines};vertical-align:top;'
                f'font-variant-numeric:tabular-nums{style}{colour}">{content}</{tag}>'
            )
        markup = f'<tr style="background:none">{markup}</tr>'
        if tag == "th" or below is None or not row[below]:
            return markup
        text = f"{heads[below]} {row[below]}".strip()
        # `max-width:0` keeps this cell from widening the columns
        style = f"text-align:left;padding:0 12px 4px 24px;max-width:0;white-space:normal;overflow-wrap:anywhere;{SOFT}"
        return (
            f'{markup}<tr style="background:none"><td colspan="{len(columns)}" style="{style}">{safe(text)}</td></tr>'
        )

    head = cells(heads, "th", f";font-weight:400;{SOFT}")
    body = "".join(cells(row, "td", "") for row in rows)
    style = f"border-collapse:collapse;table-layout:auto;width:100%;margin:0;border:0;border-top:1px solid {LINE}"
    return f'<table style="{style};font-size:12.5px"><thead>{head}</thead><tbody>{body}</tbody></table>'


def titled_box(title: str, beside: str, body: str, style: str = SOFT) -> str:
    """Return an HTML box with a title, the text `beside` it in `style`, and `body`, which is HTML, below.

    The box is never wider than the output, which would get a second scroll bar, and scrolls what does not fit.
    """
    edge = f";border-bottom:1px solid {LINE}" if body else ""
    return (
        f'<div class="sgpu-box" style="display:inline-block;box-sizing:border-box;min-width:min(420px,100%);'
        f"max-width:100%;vertical-align:top;border:1px solid {LINE};"
        f'border-radius:6px;overflow:auto;{SANS};font-size:13px;line-height:1.45">'
        f'<div style="padding:6px 12px;background:{PANEL}{edge}">'
        f'<b style="font-weight:600">{safe(title)}</b> <span style="{style}">{safe(beside)}</span></div>{body}</div>'
    )


def sentences(lines: Iterable[str], style: str = "") -> str:
    """Return lines for a box, one below another."""
    return "".join(f'<div style="padding:3px 12px;{style}">{safe(line)}</div>' for line in lines)


def sparkline(values: Sequence[float | None], top: float | None, title: str, colour: str) -> str:
    """Return the curve as SVG; renderers without SVG show the title's text.

    Args:
        values: Oldest first, evenly spaced; None where nothing was reported.
        top: End of the axis; None for the largest value.
        title: What it shows, in words.
        colour: A CSS colour, which may be a variable.
    """
    points, _ = thinned(values, _MAX_POINTS)
    top = top or max((value for value in points if value is not None), default=0.0)
    lines: list[str] = []
    areas: list[str] = []
    step = WIDTH / max(len(points) - 1, 1)
    for first, stretch in _stretches(points):
        xs = [(first + at) * step for at in range(len(stretch))]
        if len(stretch) == 1:
            # a single value is a short horizontal line, as a dot would be invisible
            xs, stretch = [max(xs[0] - step / 2, 0.0), min(xs[0] + step / 2, WIDTH)], stretch * 2
        path = " ".join(f"{x:.0f},{_height(value, top):.0f}" for x, value in zip(xs, stretch, strict=True))
        lines.append(f"M{path}")
        areas.append(f"M{xs[0]:.0f},{_UNITS} {path} {xs[-1]:.0f},{_UNITS}Z")
    return (
        f'<svg role="img" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {_UNITS}" preserveAspectRatio="none" '
        f'style="color:{colour};vertical-align:middle"><title>{escape(title)}</title>'
        f'<path d="{"".join(areas)}" fill="currentColor" opacity=".13"/>'
        f'<path d="{"".join(lines)}" fill="none" stroke="currentColor" stroke-width="1.3" '
        'vector-effect="non-scaling-stroke"/></svg>'
    )


def _stretches(points: Sequence[float | None]) -> Iterator[tuple[int, list[float]]]:
    """Split the points where values are missing; yield each stretch's first index and its values."""
    for is_missing, stretch in groupby(enumerate(points), lambda point: point[1] is None):
        if not is_missing:
            indexes, values = zip(*stretch, strict=True)
            yield indexes[0], list(values)


def _height(value: float, top: float) -> float:
    share = min(max(value / top, 0.0), 1.0) if top > 0 else 0.0
    return _UNITS - _PAD - share * (_UNITS - 2 * _PAD)
