"""What the tests on GPUs measure: rows beside torchrun and accelerate, and the file that they are written to."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import real_gpus

from sgpu_magic.packages.nvidia_driver import driver_version
from tests.benchmarks.measure import Series, show
from tests.benchmarks.report import machine

ROWS = (
    "first kernel, cold",
    "first kernel, no standby",
    "first kernel, standby",
    "first kernel, session",
    "all_reduce",
    "training loop",
    "tensor there and back",
    "idle memory",
    "after a kill",
)
"""The rows, by a short name, in the order of the table."""


@dataclass(frozen=True)
class Figure:
    """One row.

    Args:
        work: What is measured, in the table's words.
        ours: Our series; the first is the one that others are compared with.
        peers: The same work of torchrun and accelerate.
        note: How it was measured, a paragraph.
    """

    work: str
    ours: Sequence[Series]
    peers: Sequence[Series] = ()
    note: str = ""


class Figures:
    """Rows of one session of tests, by their names in `ROWS`."""

    def __init__(self) -> None:
        self._rows: dict[str, Figure] = {}

    def add(self, name: str, figure: Figure) -> None:
        if name not in ROWS:
            raise ValueError(f"{name!r} is no row of the table")
        self._rows[name] = figure

    def write(self, path: Path) -> str:
        """Write the table if every row was measured; return what was done, and the rows in any case."""
        missing = [name for name in ROWS if name not in self._rows]
        text = self.text()
        if missing:
            return f"{text}\n{path} is left as it was: not measured were {', '.join(missing)}"
        path.write_text(text)
        return f"{text}\nwritten to {path}"

    def text(self) -> str:
        """The whole file, Markdown."""
        rows = [self._rows[name] for name in ROWS if name in self._rows]
        lines = [
            "# On a GPU",
            "",
            f"{datetime.date.today().isoformat()}, `make test-gpu`.",
            "",
            f"Machine: {machine()}.",
            f"GPUs: {_gpus()}. Peers: {_peers()}; same Python, same machine, in the same minutes.",
            "",
            "Medians, the slowest sample in brackets. The factor behind a peer is its median over our first one.",
            "",
            "| work | ours | peers |",
            "|---|---|---|",
        ]
        lines += [f"| {row.work} | {_cell(row.ours)} | {_cell(row.peers, row.ours[0])} |" for row in rows]
        for row in rows:
            samples = ", ".join(f"{series.label} {len(series.values)}" for series in (*row.ours, *row.peers))
            failed = [f"{one.label}: {why}" for one in (*row.ours, *row.peers) for why in one.failures]
            lines += ["", f"**{row.work}** {row.note} Samples: {samples}.", *(f"Failed: {text}." for text in failed)]
        return "\n".join(lines) + "\n"


def _cell(all_series: Sequence[Series], ours: Series | None = None) -> str:
    return "<br>".join(_text(one, ours) for one in all_series) or "-"


def _text(series: Series, ours: Series | None) -> str:
    if not series.values:
        return f"{series.label}: not measured"
    text = f"{series.label}: {show(series.median, series.unit)}"
    if len(series.values) > 1:
        text += f" ({show(series.slowest, series.unit)})"
    if ours is not None and not math.isnan(ours.median) and series.unit == ours.unit:
        text += f", {series.median / ours.median:.3g} times"
    return text


def _gpus() -> str:
    names = [device.name for device in real_gpus.at_start()]
    return f"{len(names)} {', '.join(sorted(set(names)))}, driver {driver_version() or '?'}"


def _peers() -> str:
    found = [f"torchrun of torch {importlib.metadata.version('torch')}"]
    try:
        found.append(f"accelerate {importlib.metadata.version('accelerate')}")
    except importlib.metadata.PackageNotFoundError:
        found.append("accelerate is not installed and was not measured")
    return ", ".join(found)
