"""The snapshot of an environment beside what `uv pip freeze` and `pip freeze` take."""

from __future__ import annotations

import subprocess
import sys
import time

from sgpu_magic.packages.uv_command import uv_path
from tests.benchmarks.environment import Bench
from tests.benchmarks.measure import MeasurementFailed, Row, Series, at_least_times_faster, at_most, collect

_MOST_S_FOR_100 = 0.05
_MOST_WARM_S = 0.001
# the first snapshot of a new process, and the mean of a thousand later ones
_COLD = """
import time
from sgpu_magic.packages.snapshot import take_snapshot
began = time.perf_counter()
digest = (taken := take_snapshot()).digest
cold = time.perf_counter() - began
began = time.perf_counter()
for _ in range(1000):
    take_snapshot()
print(cold, (time.perf_counter() - began) / 1000, len(taken.distributions))
"""


def of_this_environment(bench: Bench) -> Row:
    row = Row("snapshot of the notebook's packages: where each is from, hash of its contents, digest")
    warm: list[float] = []
    packages = 0

    def cold() -> float:
        nonlocal packages
        seconds, later, count = _printed([sys.executable, "-c", _COLD]).split()
        warm.append(float(later))
        packages = int(count)
        return float(seconds)

    with row.attempt():
        first = collect("first look in a process", cold, bench.count(20, 3))
        row.ours = [first, Series("later looks, nothing changed", tuple(warm), failures=first.failures)]
    count = bench.count(10, 2)
    row.peers = [
        collect("uv pip freeze", lambda: _process([uv_path(), "pip", "freeze", "--python", sys.executable]), count),
        collect("pip freeze", lambda: _process([sys.executable, "-m", "pip", "freeze"]), count),
    ]
    row.notes.append(
        f"The environment of the benchmarks, {packages} distributions, files in the system's cache. Ours is a call in "
        "a process that runs already, without the import of its module; the others are timed as processes."
    )
    row.checks = [
        at_most(row.series(0), _MOST_S_FOR_100 * packages / 100, what=f"50 ms for 100, here {packages}"),
        at_most(row.series(1), _MOST_WARM_S),
        at_least_times_faster(row.series(0), row.peers[1], 1),
    ]
    return row


def _printed(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise MeasurementFailed(f"{command[0]} failed: {done.stderr.strip()[-300:]}")
    return done.stdout


def _process(command: list[str]) -> float:
    began = time.perf_counter()
    _printed(command)
    return time.perf_counter() - began
