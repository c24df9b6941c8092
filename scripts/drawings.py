# ruff: noqa: T201
"""Draw the pictures of the docs that show structure: processes, a run's states, the layers of packages.

    python scripts/drawings.py DOCS

Writes `DOCS/understand/NAME.svg`. Each picture follows the page's light or dark theme and has a ground of its own, so
that it can be read where a viewer does not report the theme. The layers are those of the contract in pyproject.toml.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
# what a page has beside its navigation in a window of 1024 pixels
WIDTH = 720
_MARGIN = 14
_STYLE = """
  .ground { fill: #f6f8fa; }
  .box { fill: #ffffff; stroke: #57606a; }
  .end { fill: #ddf4ff; stroke: #0969da; }
  text { fill: #1f2328; font: 13px system-ui, "DejaVu Sans", sans-serif; text-anchor: middle; }
  .title { font-weight: 600; }
  .small { font-size: 11px; }
  .line { fill: none; stroke: #57606a; stroke-width: 1.5; }
  .head { fill: #57606a; }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #161b22; }
    .box { fill: #21262d; stroke: #9198a1; }
    .end { fill: #0c2d6b; stroke: #58a6ff; }
    text { fill: #e6edf3; }
    .line { stroke: #9198a1; }
    .head { fill: #9198a1; }
  }
"""
_HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    'markerUnits="userSpaceOnUse" orient="auto"><path class="head" d="M0 0 8 4 0 8z"/></marker>'
)


class Drawing:
    """A picture of boxes and arrows, as wide as a page.

    Args:
        title: What it shows, for readers who do not see it.
        height: Its height in pixels.
    """

    def __init__(self, title: str, height: int) -> None:
        self._title, self._height = title, height
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, *lines: str, kind: str = "box") -> None:
        """Draw a box; its first line is a heading if there are several."""
        self._parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>')
        step = 18
        first = y + height / 2 - step * (len(lines) - 1) / 2 + 4.5
        for number, line in enumerate(lines):
            heading = number == 0 and len(lines) > 1
            self.text(x + width / 2, first + number * step, line, "title" if heading else "")

    def text(self, x: float, y: float, line: str, kind: str = "small") -> None:
        name = f' class="{kind}"' if kind else ""
        self._parts.append(f'<text{name} x="{x:g}" y="{y:g}">{escape(line)}</text>')

    def arrow(self, path: str) -> None:
        """Draw an arrow along a path in SVG's notation."""
        self._parts.append(f'<path class="line" marker-end="url(#head)" d="{path}"/>')

    @property
    def svg(self) -> str:
        """Return the picture's source."""
        size = f'width="{WIDTH}" height="{self._height}" viewBox="0 0 {WIDTH} {self._height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(self._title)}</title>",
                f"<style>{_STYLE}</style>",
                f"<defs>{_HEAD}</defs>",
                f'<rect class="ground" width="{WIDTH}" height="{self._height}" rx="8"/>',
                *self._parts,
                "</svg>\n",
            ]
        )


def processes() -> str:
    """Return the processes that a cell passes, and what they send each other."""
    drawing = Drawing("The processes of a run: kernel, pool service, agent, zygote and ranks", 246)
    width, height = 132, 96
    gap = (WIDTH - 2 * _MARGIN - 4 * width) / 3
    kernel, pool, agent, zygote = (_MARGIN + at * (width + gap) for at in range(4))
    drawing.box(
        kernel, _MARGIN, width, height, "notebook kernel", "captures, packs,", "submits the cell,", "shows its output"
    )
    drawing.box(pool, _MARGIN, width, height, "pool service", "queue, leases,", "ledger: places", "and records runs")
    drawing.box(agent, _MARGIN, width, height, "agent", "launches ranks,", "reads output,", "collects results")
    drawing.box(zygote, _MARGIN, width, height, "zygote", "has imported", "torch once,", "forks ranks")
    below = _MARGIN + height
    drawing.text(kernel + width / 2, below + 18, "one for each notebook")
    drawing.text(pool + width / 2, below + 18, "one for each user")
    for left, there, back in ((kernel, "run", "events"), (pool, "launch", "events"), (agent, "fork", "exits")):
        begin, end = left + width + 3, left + width + gap - 3
        drawing.arrow(f"M{begin:g} 48H{end:g}")
        drawing.text((begin + end) / 2, 42, there)
        drawing.arrow(f"M{end:g} 84H{begin:g}")
        drawing.text((begin + end) / 2, 78, back)
    group, room = below + 56, 2 * width + gap
    drawing.box(agent, group, room, 64)
    for number, name in enumerate(("rank 0", "rank 1", "...")):
        drawing.box(agent + 14 + number * (room - 14) / 3, group + 14, (room - 14) / 3 - 14, 36, name, kind="end")
    drawing.arrow(f"M{agent + 36} {below + 3}V{group - 3}")
    drawing.text(agent + 20, below + 32, "cell")
    drawing.arrow(f"M{agent + 66} {group - 3}V{below + 3}")
    drawing.text(agent + 110, below + 32, "output, results")
    drawing.arrow(f"M{zygote + width / 2} {below + 3}V{group - 3}")
    drawing.text(zygote + width / 2 + 20, below + 32, "fork")
    return drawing.svg


def states() -> str:
    """Return the states of a run."""
    drawing = Drawing("The states of a run, from queued to its end", 214)
    width, height, gap, y = 92, 34, 28, 90
    queued, preparing, starting, running, leaving, ended = (_MARGIN + at * (width + gap) for at in range(6))
    middle, top, bottom = y + height / 2, y - 3, y + height + 3
    for left, name in ((queued, "queued"), (preparing, "preparing"), (starting, "starting"), (running, "running")):
        drawing.box(left, y, width, height, name)
        if left < running:
            drawing.arrow(f"M{left + width + 2} {middle}H{left + width + gap - 2}")
    drawing.box(leaving, 34, width, height, "finishing")
    drawing.box(leaving, 146, width, height, "cancelling")
    for number, name in enumerate(("succeeded", "failed", "cancelled", "timed out")):
        drawing.box(ended, 26 + number * 44, width, 30, name, kind="end")
    after = running + width + 2
    drawing.arrow(f"M{after} 98C{after + 16} 98 {leaving - 16} 54 {leaving - 2} 52")
    drawing.arrow(f"M{after} {middle}C{leaving + 40} {middle} {leaving + 70} 104 {ended - 2} 90")
    drawing.arrow(f"M{after} 116C{after + 16} 116 {leaving - 16} 160 {leaving - 2} 162")
    for begin, end in ((46, 41), (56, 81), (156, 133), (168, 173)):
        drawing.arrow(f"M{leaving + width + 2} {begin} {ended - 2} {end}")
    drawing.arrow(f"M{running + 30} {top}C{running + 20} 66 {starting + 72} 66 {starting + 62} {top}")
    drawing.text((starting + running + width) / 2, 66, "retry")
    drawing.arrow(f"M{running + 62} {top}C{running + 30} 20 {queued + 78} 20 {queued + 46} {top}")
    drawing.text((queued + running + width) / 2, 30, "retry after the loss of a node")
    drawing.arrow(f"M{queued + 46} {bottom}C{queued + 60} 172 {starting + 32} 172 {starting + 46} {bottom}")
    drawing.text((queued + starting + width) / 2, 178, "no packages to build")
    return drawing.svg


def layers() -> str:
    """Return the layers of packages, as the import contract has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract = next(each for each in project["tool"]["importlinter"]["contracts"] if each["type"] == "layers")
    rows = [[name.strip() for name in row.split("|")] for row in contract["layers"]]
    height, step = 28, 38
    drawing = Drawing("The layers of the packages; imports go down", 2 * _MARGIN + step * len(rows) - step + height)
    room = WIDTH - 3 * _MARGIN - 90
    for at, names in enumerate(rows):
        width = (room - 10 * (len(names) - 1)) / len(names)
        for number, name in enumerate(names):
            drawing.box(_MARGIN + number * (width + 10), _MARGIN + at * step, width, height, name)
    x, bottom = WIDTH - _MARGIN - 45, _MARGIN + step * (len(rows) - 1) + height
    drawing.arrow(f"M{x} {_MARGIN}V{bottom}")
    drawing.text(x - 26, bottom / 2 + 4, "imports")
    return drawing.svg


PICTURES = {"processes": processes, "states": states, "layers": layers}


def main(docs: Path) -> None:
    for name, draw in PICTURES.items():
        path = docs / "understand" / f"{name}.svg"
        path.write_text(draw())
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
