"""Where the time of a cell goes: when it passes which function, from the front end's request to idle.

    PYTHONPATH=tests/support python -m tests.benchmarks.trace [--cells N]

Traces an empty cell of a session, and one in new processes from the standby group. The functions are wrapped when
their modules are imported, in all processes, and write the time of each call; that costs about 2 % of the whole.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sgpu_magic.agent.reports import EventReports
from sgpu_magic.agent.runs.execution_kinds import SessionCell
from sgpu_magic.agent.service import Agent
from sgpu_magic.agent.session_lines import SessionLines
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.session_line import SessionLine
from sgpu_magic.magics.run_magics import DistributedMagics
from sgpu_magic.pool.instructions import LaunchHandler
from sgpu_magic.pool.reports import Reports
from sgpu_magic.pool.submissions import Submissions
from sgpu_magic.runs.follow.run_loop import Subscription
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.node import Launch
from sgpu_magic.worker.cell.cell_run import run_cell
from sgpu_magic.worker.process.rank import _Life
from tests.benchmarks.environment import ROOT, Bench
from tests.benchmarks.kernel import BenchKernel
from tests.benchmarks.processes import end_descendants

RANKS = 4


class Point(NamedTuple):
    """Where a cell passes.

    Args:
        process: The process.
        step: What it does there.
        function: The function: an object, so that a tool that renames it renames it here.
        when: Its start or its end.
        kind: Only calls with an argument, or an argument's body, of this class.
    """

    process: str
    step: str
    function: Callable[..., Any]
    when: Literal["start", "end"] = "start"
    kind: type | None = None


POINTS = (
    Point("kernel", "calls the magic", DistributedMagics._run),
    Point("kernel", "has packed the cell", Pool.submit),
    Point("pool", "has the request", Submissions.submit),
    Point("pool", "orders it from the agent", LaunchHandler.order),
    Point("agent", "has the order", Agent._execute, kind=Launch),
    Point("kernel", "sends the cell over the line", SessionLine.submit),
    Point("agent", "has the cell", SessionLines.submit),
    Point("agent", "says that the ranks have started", SessionCell._all_there),
    Point("first rank", "has the order", _Life._execute),
    Point("last rank", "begins the cell", run_cell),
    Point("last rank", "has executed it", run_cell, "end"),
    Point("last rank", "reports", _Life._reply),
    Point("agent", "reports the end", EventReports.report, kind=RunEnded),
    Point("kernel", "gets the end over the line", SessionLine._dispatch, kind=RunEnded),
    Point("pool", "has the end", Reports.on_run_event, kind=RunEnded),
    Point("kernel", "has the end", Subscription.apply, kind=RunEnded),
    Point("kernel", "returns from the magic", DistributedMagics._run, "end"),
)
_HOOK = """
import importlib.abc, importlib.machinery, os, sys, time

POINTS = {points!r}
FILE = {file!r}

def wrapped(plain, points):
    def note(number, kind, values):
        if not kind or any(kind in (type(v).__name__, type(getattr(v, "body", None)).__name__) for v in values):
            line = f"{{time.perf_counter():.6f}} {{number}}\\n".encode()
            # not kept open: a rank takes more steps at its end when it has a file open for writing
            file = os.open(FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, line)
            os.close(file)

    def call(*args, **more):
        for number, when, kind in points:
            if when == "start":
                note(number, kind, args)
        try:
            return plain(*args, **more)
        finally:
            for number, when, kind in points:
                if when == "end":
                    note(number, kind, args)

    return call

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in POINTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            for where, points in POINTS[name].items():
                *parents, last = where.split(".")
                owner = module
                for parent in parents:
                    owner = getattr(owner, parent)
                setattr(owner, last, wrapped(getattr(owner, last), points))

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.trace", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--cells", type=int, default=60, help="cells of each kind")
    options = parser.parse_args(arguments)
    scratch = Path(tempfile.mkdtemp(prefix="sb", dir="/tmp"))
    with _kernel(Bench(None, scratch)) as (kernel, trace):
        kernel.check("%load_ext sgpu_magic")
        for _ in range(5):
            kernel.check(f"%%distributed -n {RANKS} --type cpu\npass")
        print(f"\nnew processes, {options.cells} cells, a second apart\n")
        print(_table(kernel, trace, f"%%distributed -n {RANKS} --type cpu\npass", options.cells, 1.0))
        kernel.check(f"%sgpu_connect -n {RANKS} --type cpu")
        for _ in range(10):
            kernel.check("%%distributed\npass")
        print(f"\na session, {options.cells} cells, 0.1 s apart\n")
        print(_table(kernel, trace, "%%distributed\npass", options.cells, 0.1))
    return 0


@contextmanager
def _kernel(bench: Bench) -> Iterator[tuple[BenchKernel, Path]]:
    folder = bench.new_folder()
    file = folder / "trace"
    (folder / "sitecustomize.py").write_text(_HOOK.format(points=_by_module(), file=str(file)))
    places = {
        "SGPU_STATE_DIR": str(folder / "state"),
        "SGPU_RUNTIME_DIR": str(folder / "run"),
        "SGPU_LOCK_DIR": str(folder / "lock"),
        "SGPU_CONFIG": str(folder / "no-config.toml"),
        "PYTHONPATH": f"{folder}:{ROOT}",
    }
    try:
        with BenchKernel(bench.python, folder, bench.environment(folder, **places)) as kernel:
            yield kernel, file
    finally:
        end_descendants()


def _by_module() -> dict[str, dict[str, list[tuple[int, str, str]]]]:
    found: dict[str, dict[str, list[tuple[int, str, str]]]] = {}
    for number, point in enumerate(POINTS):
        kind = "" if point.kind is None else point.kind.__name__
        functions = found.setdefault(point.function.__module__, {})
        functions.setdefault(point.function.__qualname__, []).append((number, point.when, kind))
    return found


def _table(kernel: BenchKernel, trace: Path, cell: str, count: int, pause_s: float) -> str:
    """Return the medians of the cells' times at each point, and since the point before, as Markdown."""
    times: list[list[float]] = [[] for _ in POINTS]
    idle: list[float] = []
    for _ in range(count):
        time.sleep(pause_s)
        trace.write_bytes(b"")
        began = time.perf_counter()
        kernel.check(cell)
        idle.append(time.perf_counter() - began)
        passed: dict[int, list[float]] = {}
        for line in trace.read_text().splitlines():
            at, number = line.split()
            passed.setdefault(int(number), []).append(float(at) - began)
        for number, all_times in passed.items():
            last: Callable[[list[float]], float] = max if POINTS[number].process == "last rank" else min
            times[number].append(last(all_times))
    rows = [
        (point.process, point.step, statistics.median(at) * 1e3)
        for point, at in zip(POINTS, times, strict=True)
        if len(at) > count // 2
    ]
    rows.append(("front end", "has the reply, and idle", statistics.median(idle) * 1e3))
    # the pool service records a cell of a session after its end
    rows.sort(key=lambda row: row[2])
    lines = ["| where | what | at, ms | since the line above, ms |", "|---|---|---|---|"]
    before = 0.0
    for where, what, at in rows:
        lines.append(f"| {where} | {what} | {at:.1f} | {at - before:.1f} |")
        before = at
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
