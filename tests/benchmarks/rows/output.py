"""Output: 400,000 numbered lines, whole and in order, while the kernel still replies."""

from __future__ import annotations

from typing import Any

from tests.benchmarks import peers
from tests.benchmarks.environment import Bench, distributed
from tests.benchmarks.kernel import BenchKernel, CommProbe
from tests.benchmarks.measure import Check, MeasurementFailed, Row, Series, at_most, collect
from tests.benchmarks.rows.launch import CLIENT

LINES = peers.LINES_PER_RANK
BODY = f"for number in range({LINES}):\n    print(f'line {{number:06d}} of rank {{rank}}')\n"

COUNT = f"""
from pathlib import Path
def bench_whole(lines, rank):
    return sum(line == f"line {{number:06d}} of rank {{rank}}" for number, line in zip(range({LINES}), lines))
bench_counts = [
    {{
        "log": bench_whole(Path(bench_result.logs(rank)).read_text().splitlines(), rank),
        "log_lines": len(Path(bench_result.logs(rank)).read_text().splitlines()),
        "result": bench_result.lines[rank],
    }}
    for rank in range(4)
]
"""


def numbered_lines(bench: Bench) -> Row:
    row = Row("100,000 numbered lines printed by each rank")
    row.notes.append(
        "A line counts where it stands at its own place in its rank's log, letter by letter; the result "
        "object counts them. A comm is asked over a subshell all the while, 20 ms after each answer; "
        "the time is from the question to the answer's arrival at the client."
    )
    answers: list[float] = []
    counts: list[list[dict[str, Any]]] = []
    round_trips: list[float] = []
    probe = None
    with row.attempt(), bench.our_kernel() as kernel:
        distributed(kernel, "--gpus 4", "rank")
        try:
            probe = kernel.open_probe()
        except MeasurementFailed as reason:
            row.notes.append(f"Answers to a comm could not be measured: {reason}.")
        in_kernel = collect(
            "in the kernel", lambda: _sample(kernel, probe, counts, round_trips), bench.count(7, 2), pause_s=0.6
        )
        if probe:
            answers = probe.answers_s
        row.ours = [
            Series(CLIENT, tuple(round_trips), failures=in_kernel.failures),
            in_kernel,
            Series("comm's answer", tuple(answers)),
        ]
    row.checks = [at_most(row.series(0), 0.3), *_wholeness(counts)]
    row.checks.append(at_most(row.series(2), 0.2, of="slowest", what="answer to a comm"))
    for series, note in (peers.torchrun_lines(bench), peers.ipyparallel_lines(bench)):
        row.peers.append(series)
        row.notes.append(note)
    return row


def _sample(
    kernel: BenchKernel, probe: CommProbe | None, counts: list[list[dict[str, Any]]], round_trips: list[float]
) -> float:
    code = f"bench_s, bench_result = bench_cell('--gpus 4', {BODY!r})"
    reply = kernel.execute(code, expression="bench_s", probe=probe)
    if reply.status != "ok":
        raise MeasurementFailed(reply.error or reply.status)
    round_trips.append(reply.round_trip_s)
    counts.append(kernel.check(COUNT, expression="bench_counts").value)
    return reply.value


def _wholeness(counts: list[list[dict[str, Any]]]) -> list[Check]:
    """The least lines of any sample, in the logs and in the result."""
    checks: list[Check] = []
    for key, where in (("log", "whole and in order in the logs"), ("result", "counted in the result")):
        least = min((sum(rank[key] for rank in sample) for sample in counts), default=0)
        extra = any(rank["log_lines"] != LINES for sample in counts for rank in sample)
        met = least == 4 * LINES and not (key == "log" and extra) if counts else None
        checks.append(
            Check(
                f"all {4 * LINES:,} {where}",
                f"{least:,}" if counts else "not measured",
                met,
            )
        )
    return checks
