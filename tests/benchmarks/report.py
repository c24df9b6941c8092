"""The table: Markdown for RESULTS.md."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.measure import Row, Series, show

_MET = {True: "yes", False: "**no**", None: "not measured"}
_PACKAGES = ("torch", "ipykernel", "ipython", "jupyter_client")


def machine() -> str:
    """One line about the machine and the versions that matter."""
    try:
        information = Path("/proc/cpuinfo").read_text()
        model = next(line.split(":", 1)[1].strip() for line in information.splitlines() if "model name" in line)
    except (OSError, StopIteration):
        model = platform.machine()
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    return (
        f"{len(os.sched_getaffinity(0))} cores ({model}), {memory_gb:.0f} GB, {platform.system()} "
        f"{platform.release()}, Python {platform.python_version()}, {packages}"
    )


def markdown(rows: Sequence[Row], *, command: str, load_before: float, load_after: float, peers: str) -> str:
    """Render the report.

    Args:
        rows: In the table's order.
        command: What was run.
        load_before: Load average over a minute when the run began.
        load_after: The same when it ended.
        peers: Names and versions of the peers.
    """
    lines = [
        "# Benchmarks",
        "",
        f"{datetime.date.today().isoformat()}, `{command}`.",
        "",
        f"Machine: {machine()}. Load average {load_before:.1f} before and {load_after:.1f} after.",
        f"Peers: {peers}. They ran in the same run, on the same machine.",
        "",
        "Times of ours are medians as a front end sees them, from its request to the reply, unless a row says",
        'otherwise; p99 of fewer than 100 samples is the slowest. The peers\' "times" are their medians over our first',
        "median of the row.",
        "",
        "| work, 4 ranks | ours: median (p99, slowest) | must | measured | met | peers: median, times ours |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_table_line(row) for row in rows]
    lines += ["", "## Row by row", ""]
    for row in rows:
        lines += [f"**{row.work}**", "", *row.notes, ""]
        lines += [f"- {_details(series)}" for series in (*row.ours, *row.peers)]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _table_line(row: Row) -> str:
    ours = "<br>".join(
        "{}: {} ({}, {})".format(one.label, *(show(value, one.unit) for value in (one.median, one.p99, one.slowest)))
        for one in row.ours
    )
    reference = row.ours[0].median if row.ours else math.nan
    others = "<br>".join(_peer(one, reference) for one in row.peers)
    must = "<br>".join(check.must for check in row.checks)
    measured = "<br>".join(check.measured for check in row.checks)
    met = "<br>".join(_MET[check.met] for check in row.checks) or _MET[None]
    return f"| {row.work} | {ours or '-'} | {must or '-'} | {measured or '-'} | {met} | {others or '-'} |"


def _peer(series: Series, reference: float) -> str:
    if not series.values:
        return f"{series.label}: failed"
    times = series.median / reference
    ratio = "" if math.isnan(times) else f", {times:.3g} times"
    return f"{series.label}: {show(series.median, series.unit)}{ratio}"


def _details(series: Series) -> str:
    text = f"{series.label}: {len(series.values)} samples"
    if series.values:
        text += (
            f", median {show(series.median, series.unit)}, p99 {show(series.p99, series.unit)}, "
            f"slowest {show(series.slowest, series.unit)}, fastest {show(min(series.values), series.unit)}"
        )
    return text + "".join(f"; failed: {reason}" for reason in series.failures)
