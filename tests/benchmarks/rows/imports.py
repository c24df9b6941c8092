"""Imports that take long, in the first cell of a notebook and in those that follow."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

from tests.benchmarks.environment import Bench
from tests.benchmarks.kernel import BenchKernel
from tests.benchmarks.measure import MeasurementFailed, Row, Series, at_most_beyond, collect
from tests.benchmarks.processes import run
from tests.benchmarks.rows.launch import STANDBY_PAUSE_S

_IMPORTS = {
    "transformers": "from transformers import Trainer",
    "pandas": "import pandas, sklearn.linear_model, matplotlib.pyplot",
}
_EXECUTED_AHEAD_S = 300.0


def of_later_cells(bench: Bench) -> Row:
    row = Row("imports that take long, in new processes")
    row.notes.append(
        "4 ranks. The first run executes the imports; later ones follow when they have been executed ahead. In one "
        "process alone: `python -c`, with the files read before."
    )
    for package, statement in _IMPORTS.items():
        if importlib.util.find_spec(package) is None:
            row.notes.append(f"`{statement}`: {package} is not installed.")
            continue
        with row.attempt(), bench.our_kernel() as kernel:
            row.ours += _series(kernel, statement, bench.count(30, 5))
            row.peers.append(_alone(bench, statement))
            row.checks.append(at_most_beyond(row.ours[-3], row.ours[-2], 0.03))
    return row


def _series(kernel: BenchKernel, statement: str, count: int) -> list[Series]:
    cell = f"%%distributed --gpus 4\n{statement}"
    first_s = kernel.check(cell, timeout_s=120).round_trip_s
    _await_execution(kernel.folder / "state" / "preload.json", statement.split()[1].rstrip(","))
    taken = {
        label: collect(label, lambda code=code: kernel.check(code).round_trip_s, count, pause_s=STANDBY_PAUSE_S)
        for label, code in {
            f"`{statement}`, later": cell,
            "a cell without imports": "%%distributed --gpus 4\npass",
        }.items()
    }
    return [*taken.values(), Series(f"`{statement}`, first", (first_s,))]


def _await_execution(report: Path, package: str) -> None:
    until = time.monotonic() + _EXECUTED_AHEAD_S
    while time.monotonic() < until:
        rows = json.loads(report.read_text()) if report.exists() else []
        if any(package in row["roots"] for row in rows):
            # the standby group is made of the processes that have them
            time.sleep(3.0)
            return
        time.sleep(0.2)
    raise MeasurementFailed(f"{package} was not executed ahead within {_EXECUTED_AHEAD_S:.0f} s")


def _alone(bench: Bench, statement: str) -> Series:
    def sample() -> float:
        began = time.perf_counter()
        run([bench.python, "-c", statement], timeout_s=120, environment=bench.environment(bench.new_folder()))
        return time.perf_counter() - began

    return collect(f"one process alone: `{statement}`", sample, 3)
