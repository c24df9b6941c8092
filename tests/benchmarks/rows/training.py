"""Training: the step loop costs what it costs under torchrun."""

from __future__ import annotations

import math

from tests.benchmarks.environment import SCRIPTS, Bench, distributed
from tests.benchmarks.measure import Check, MeasurementFailed, Row, Series, ratio_with_upper_bound
from tests.benchmarks.processes import run_script

STEPS = 1500


def step_loop(bench: Bench) -> Row:
    pairs = bench.count(20, 8)
    row = Row("training step loop of the quickstart, interleaved pairs")
    row.notes.append(
        f"{STEPS:,} steps of DistributedDataParallel on 2 ranks, data shaped like scikit-learn's digits; "
        f"only the loop is timed, by rank 0, in the same text. {pairs} pairs whose order alternates. "
        "`SGPU_STANDBY=0`, so that no group of ours waits while torchrun is measured. The bound is "
        "one-sided, Student's t on the ratios' logarithms."
    )
    text = (SCRIPTS / "training_loop.py").read_text().split('if __name__ == "__main__":')[0]
    body = f"{text}\nloop_s = loop_seconds(rank, world_size, {STEPS})\n"
    command = bench.torchrun(2, "training_loop.py", str(STEPS))
    ours: list[float] = []
    theirs: list[float] = []
    folder = bench.new_folder()
    with row.attempt(), bench.our_kernel(SGPU_STANDBY="0") as kernel:

        def measure_ours() -> None:
            ours.append(float(distributed(kernel, "--gpus 2 --out loop_s", body, expression="loop_s").value))  # type: ignore[arg-type]

        def measure_theirs() -> None:
            for last_try in (False, False, True):
                try:
                    found = run_script(command, timeout_s=120, environment=bench.environment(folder))
                except MeasurementFailed:
                    # a rank that leaves its last barrier first fails the other one now and then
                    if last_try:
                        raise
                else:
                    theirs.append(float(found["loop_s"]))  # type: ignore[arg-type]
                    return

        distributed(kernel, "--gpus 2", "rank")
        for pair in range(pairs):
            turns = [measure_ours, measure_theirs]
            for turn in turns if pair % 2 == 0 else turns[::-1]:
                turn()
    row.ours = [Series("loop", tuple(ours))] if ours else []
    row.peers = [Series("torchrun", tuple(theirs))]
    whole = min(len(ours), len(theirs))
    mean, bound = ratio_with_upper_bound(ours[:whole], theirs[:whole])
    met = None if math.isnan(bound) else bound <= 1.02
    row.checks = [Check("ratio's 95 % upper bound at most 1.02", f"{bound:.3f}" if ours else "not measured", met)]
    row.notes.append(f"Ratio over {whole} pairs: mean {mean:.3f}, upper bound {bound:.3f}.")
    return row
