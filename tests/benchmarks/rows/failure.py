"""Failure: one rank raises while the others wait in a barrier."""

from __future__ import annotations

from tests.benchmarks import peers
from tests.benchmarks.environment import Bench, distributed
from tests.benchmarks.measure import Check, MeasurementFailed, Row, Series, at_most, collect
from tests.benchmarks.rows.launch import all_reduce

BODY = """
import torch.distributed as dist
if rank == 2:
    raise ValueError("the culprit")
dist.barrier()
"""


def one_rank_raises(bench: Bench) -> Row:
    row = Row("one rank raises while the others wait in a barrier")
    row.notes.append(
        "From the client's request to the error message at the client; the cell is sent as a person would. "
        "The next cell, an all_reduce on 4 ranks, follows at once and is timed by its round trip."
    )
    following: list[float] = []

    def sample() -> float:
        reply = kernel.execute(f"%%distributed --gpus 4\n{BODY}", timeout_s=30)
        if reply.error_s is None:
            raise MeasurementFailed(f"no error came; the cell's status is {reply.status!r}")
        if "the culprit" not in reply.error:
            raise MeasurementFailed(f"the error is not the culprit's: {reply.error[:200]}")
        following.append(all_reduce(kernel).round_trip_s)
        return reply.error_s

    count = bench.count(20, 4)
    with row.attempt(), bench.our_kernel() as kernel:
        distributed(kernel, "--gpus 4", "rank")
        row.ours = [collect("until the error is at the client", sample, count, pause_s=0.6)]
    if row.ours:
        row.ours.append(Series("the next cell", tuple(following)))
    met = len(following) == count if row.ours else None
    row.checks = [
        at_most(row.series(0), 0.5, of="slowest"),
        Check("the next cell runs", f"{len(following)} of {count}" if row.ours else "not measured", met),
    ]
    for series, text in (peers.accelerate_raise(bench), peers.ipyparallel_raise(bench)):
        row.peers.append(series)
        if text:
            row.notes.append(f"{series.label}: {text}.")
    return row
