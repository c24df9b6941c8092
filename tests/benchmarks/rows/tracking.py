"""The cost of tracking for users who do not use it: a step loop, a launch, and a cell that does nothing."""

from __future__ import annotations

import functools
import math
import time

from tests.benchmarks.environment import SCRIPTS, Bench, distributed
from tests.benchmarks.kernel import BenchKernel
from tests.benchmarks.live_sessions import NOTHING
from tests.benchmarks.measure import Check, MeasurementFailed, Row, Series, collect, ratio_with_upper_bound
from tests.benchmarks.rows.launch import ALL_REDUCE, STANDBY_PAUSE_S

STEPS = 1500
_LIMIT = 1.02
_WRITTEN_S = 60.0
_ALL_WRITTEN = """
import json, os
from pathlib import Path
def bench_unsent():
    found = Path(os.environ["SGPU_STATE_DIR"], "runs").glob("*/tracking.json")
    return sum(not json.loads(path.read_text()).get("complete") for path in found)
def bench_tracked():
    return len(list(Path(os.environ["SGPU_STATE_DIR"], "runs").glob("*/tracking.json")))
"""


# a run of less than five seconds is MLflow's only if it logs something
LOGS = "import mlflow\nif rank == 0:\n    mlflow.log_metric('begun', 1.0)\n"


def overhead(bench: Bench) -> Row:
    row = Row("tracking of the quickstart's step loop, interleaved pairs with and without `--no-track`")
    pairs = bench.count(20, 8)
    row.notes.append(
        f"{STEPS:,} steps of DistributedDataParallel on 2 ranks as in the row of the training; only the loop is timed, "
        f"by rank 0. {pairs} pairs whose order alternates, in one kernel, into the default store; before each loop all "
        "that was tracked before is written, so that no loop pays for another. System metrics are written each second "
        "of a loop. The bound is one-sided, Student's t on the ratios' logarithms."
    )
    text = (SCRIPTS / "training_loop.py").read_text().split('if __name__ == "__main__":')[0]
    loop = f"loop_s = loop_seconds(rank, world_size, {STEPS})\n"
    bodies = {"": f"{text}\n{LOGS}{loop}", "--no-track": f"{text}\n{loop}"}
    times: dict[str, list[float]] = {"": [], "--no-track": []}
    with row.attempt(), bench.our_kernel(SGPU_STANDBY="0", SGPU_LOCK_ENVIRONMENTS="off") as kernel:
        _warm(kernel)
        for pair in range(pairs):
            for option in ("", "--no-track") if pair % 2 == 0 else ("--no-track", ""):
                _wait_until_written(kernel)
                cell = distributed(kernel, f"--gpus 2 --out loop_s {option}", bodies[option], expression="loop_s")
                times[option].append(float(cell.value))  # type: ignore[arg-type]
        _wait_until_written(kernel)
        tracked = kernel.check("None", expression="bench_tracked()").value
        row.notes.append(f"{tracked} runs were tracked.")
    row.ours = [Series("tracked", tuple(times[""])), Series("`--no-track`", tuple(times["--no-track"]))]
    whole = min(map(len, times.values()))
    mean, bound = ratio_with_upper_bound(times[""][:whole], times["--no-track"][:whole])
    met = None if math.isnan(bound) else bound <= _LIMIT
    row.checks = [Check(f"ratio's 95 % upper bound at most {_LIMIT}", f"{bound:.3f}", met)]
    row.notes.append(f"Ratio over {whole} pairs: mean {mean:.3f}, upper bound {bound:.3f}.")
    return row


def launches(bench: Bench) -> Row:
    row = Row("tracking beside short cells: a standby launch, and a cell that does nothing in a session")
    count = bench.count(60, 10)
    row.notes.append(
        f"4 ranks; {count} cells with and as many without `--no-track`, in turn in blocks of 10, while what was "
        f"tracked before is written beside them. {STANDBY_PAUSE_S} s of rest before each launch, 0.05 s before a cell "
        "in the session."
    )
    with row.attempt(), bench.our_kernel(SGPU_LOCK_ENVIRONMENTS="off") as kernel:
        _warm(kernel)
        for _ in range(3):
            distributed(kernel, "--gpus 4 --out value", ALL_REDUCE)
        row.ours += _in_turn("standby launch", kernel, "--gpus 4 --out value", ALL_REDUCE, count, STANDBY_PAUSE_S)
        kernel.check("%sgpu_connect --gpus 4", timeout_s=60)
        for _ in range(5):
            distributed(kernel, "", NOTHING)
        row.ours += _in_turn("session's cell", kernel, "", NOTHING, 4 * count, 0.05)
        kernel.check("%sgpu_disconnect")
    for tracked, plain in zip(row.ours[::2], row.ours[1::2], strict=True):
        more = tracked.median - plain.median
        met = None if math.isnan(more) else more <= 0.001
        row.checks.append(Check(f"{tracked.label}: at most 1 ms more than without", f"{more * 1e3:.2f} ms", met))
    return row


def _in_turn(label: str, kernel: BenchKernel, line: str, body: str, count: int, pause_s: float) -> list[Series]:
    values: dict[str, list[float]] = {"": [], "--no-track": []}
    for _ in range(max(1, count // 10)):
        for option, found in values.items():
            command = f"{line} {option}".strip()
            cell = functools.partial(distributed, kernel, command, body)
            block = collect(label, lambda: cell().round_trip_s, 10, pause_s=pause_s)  # noqa: B023
            found.extend(block.values)
    return [Series(label, tuple(values[""])), Series(f"{label}, `--no-track`", tuple(values["--no-track"]))]


def _warm(kernel: BenchKernel) -> None:
    """Have the writer's process and its store made before anything is timed."""
    kernel.check(_ALL_WRITTEN)
    distributed(kernel, "--gpus 2", LOGS)
    time.sleep(2)
    _wait_until_written(kernel)
    if not kernel.check("None", expression="bench_tracked()").value:
        raise MeasurementFailed("runs are not tracked")


def _wait_until_written(kernel: BenchKernel) -> None:
    # a run's file is there a second after its start
    time.sleep(1.2)
    until = time.monotonic() + _WRITTEN_S
    while kernel.check("None", expression="bench_unsent()").value:
        if time.monotonic() > until:
            raise MeasurementFailed("what is tracked is not written")
        time.sleep(0.2)
