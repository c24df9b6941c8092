"""Cells in ranks that stay, and in new processes on their lease."""

from __future__ import annotations

from tests.benchmarks.environment import Bench, distributed
from tests.benchmarks.kernel import BenchKernel
from tests.benchmarks.live_sessions import (
    NOTHING,
    PRINT,
    RANKS,
    ipyparallel_session,
    nbdistributed_session,
    our_session,
)
from tests.benchmarks.measure import (
    MeasurementFailed,
    Row,
    Series,
    at_least_times_faster,
    at_most_beyond,
    collect,
)
from tests.benchmarks.rows.launch import ALL_REDUCE, CLIENT, STANDBY_PAUSE_S, all_reduce, own_empty_cell

_PEERS = {"ipyparallel %%px": ipyparallel_session, "nbdistributed %%distributed": nbdistributed_session}
_PEERS_SHARE = {"ipyparallel %%px": 300, "nbdistributed %%distributed": 100}  # fewer of its cells, at 120 ms each


def empty_cell(bench: Bench) -> Row:
    row = Row("cell that does nothing, in a live session")
    with row.attempt(), our_session(bench) as session:
        row.ours = session.series(NOTHING, bench.count(500, 40))
        row.ours.append(own_empty_cell(session.kernel, bench.count(500, 40)))
    _compare(row, bench, NOTHING, median_s=0.004, p90_s=0.008)
    return row


def printing_cell(bench: Bench) -> Row:
    row = Row("cell that prints one line on each rank, in a live session")
    row.notes.append("A sample whose output has not one whole line of each rank counts as failed.")
    with row.attempt(), our_session(bench) as session:
        row.ours = session.series(PRINT, bench.count(500, 40))
        row.ours.append(own_empty_cell(session.kernel, bench.count(200, 20)))
    _compare(row, bench, PRINT, median_s=0.005)
    return row


def _compare(row: Row, bench: Bench, body: str, *, median_s: float, p90_s: float | None = None) -> None:
    """Add the peers and the limits, in seconds beyond an empty cell, to a row that has ours; the last is that cell."""
    row.notes.append(
        f"{RANKS} ranks, `{body}`, 0.05 s of rest before each cell where nothing else is said. At the front end: a "
        "cell `%%...` as a person sends it, until its reply. In the kernel: the magic's call. The peers the same way, "
        "in the same run."
    )
    for label, opened in _PEERS.items():
        try:
            with opened(bench) as peer:
                row.peers += peer.series(body, bench.count(_PEERS_SHARE[label], 20))
        except MeasurementFailed as reason:
            row.peers.append(Series(label, (), failures=(str(reason),)))
    row.checks = [at_most_beyond(row.series(0), row.series(4), median_s)]
    if p90_s is not None:
        row.checks.append(at_most_beyond(row.series(0), row.series(4), p90_s, of="p90"))
    ours = {series.label.partition(", ")[2]: series for series in row.ours}
    for peer in row.peers:
        if alike := ours.get(peer.label.partition(", ")[2]):
            row.checks.append(at_least_times_faster(alike, peer, 1))


def fresh_on_lease(bench: Bench) -> Row:
    row = Row("cell in new processes on a connected lease, `--fresh`: group, all_reduce, value back")
    row.notes.append(
        f"Default settings, {STANDBY_PAUSE_S} s of rest before each cell, in which the standby group is made anew. "
        "Beside it the same cell without a session."
    )

    def sample(kernel: BenchKernel) -> float:
        cell = distributed(kernel, "--fresh --out value", ALL_REDUCE, expression="value")
        if cell.value != RANKS:
            raise MeasurementFailed(f"the sum over {RANKS} ranks came back as {cell.value!r}")
        round_trips.append(cell.round_trip_s)
        return cell.kernel_s

    round_trips: list[float] = []
    count = bench.count(50, 8)
    with row.attempt(), our_session(bench) as session:
        for _ in range(3):
            sample(session.kernel)
        round_trips.clear()
        in_kernel = collect("in the kernel", lambda: sample(session.kernel), count, pause_s=STANDBY_PAUSE_S)
        row.ours = [Series(CLIENT, tuple(round_trips), failures=in_kernel.failures), in_kernel]
        row.ours.append(own_empty_cell(session.kernel, bench.count(100, 20)))
    with row.attempt(), bench.our_kernel() as kernel:
        for _ in range(3):
            all_reduce(kernel)
        label = "without a session, from the standby group"
        row.ours.append(collect(label, lambda: all_reduce(kernel).round_trip_s, count, pause_s=STANDBY_PAUSE_S))
    row.checks = [at_most_beyond(row.series(0), row.series(2), 0.012)]
    return row
