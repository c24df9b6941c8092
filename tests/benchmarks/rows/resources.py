"""What cells and waiting processes take of the machine: processor time and memory of all processes together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.benchmarks import peers
from tests.benchmarks.environment import Bench
from tests.benchmarks.kernel import BenchKernel
from tests.benchmarks.live_sessions import NOTHING, RANKS, ipyparallel_session, our_session
from tests.benchmarks.measure import MeasurementFailed, Row, Series, at_least_times_faster, at_most
from tests.benchmarks.rows.launch import all_reduce

# each value is the mean of so many cells, since the kernel counts processor time in 10 ms
_CELLS = 20
_QUIET_S = 2.0
# of a core; gloo's loops of four idle ranks take 0.01
_QUIET_SHARE = 0.04
# a session is tracked after five seconds, by a process that takes some seconds to import MLflow
_UNTIL_TRACKED_S = 7.0
_PATIENCE_S = 90.0
_WATCHED_S = 20.0
# the process that writes to MLflow leaves an idle session after five minutes
_TRACKED_S = 330.0
_MB = 1e6


def processor(bench: Bench) -> Row:
    row = Row("processor time of a cell, all processes together")
    row.notes.append(
        f"User and system time of the kernel and of all processes below it, dead ones included, over {_CELLS} cells "
        "without rest, divided by their number. Begun when what the first cells leave to do in the background is done. "
        "The fresh cell: group, all_reduce, value back. The session's cell does nothing, and is measured less the same "
        "number of the kernel's own empty cells."
    )
    with row.attempt(), bench.our_kernel() as kernel:
        row.ours.append(_of_cells("fresh cell, back to back", lambda: all_reduce(kernel), bench.count(5, 1)))
    with row.attempt(), our_session(bench) as session:
        time.sleep(_UNTIL_TRACKED_S)
        row.ours.append(_less_empty("session's no-op cell", session.kernel, session.magic, bench.count(5, 1)))
    with _peer(row, "accelerate notebook_launcher"), bench.peer_kernel() as kernel:
        kernel.check(peers.ACCELERATE)
        # one value: a launch hangs soon after
        row.peers.append(_of_cells("accelerate notebook_launcher", lambda: peers.accelerate_launch(kernel), 1))
    with _peer(row, "ipyparallel %%px, no-op"), ipyparallel_session(bench) as peer:
        row.peers.append(_less_empty("ipyparallel %%px, no-op", peer.kernel, peer.magic, bench.count(5, 1)))
    fresh, no_op = row.series(0), row.series(1)
    row.checks = [at_most(fresh, 0.12, what="fresh"), at_most(no_op, 0.008, what="session's")]
    for ours, peer in zip((fresh, no_op), row.peers, strict=False):
        row.checks.append(at_least_times_faster(ours, peer, 1))
    return row


def idle(bench: Bench) -> Row:
    row = Row("memory and processor time of what waits, all processes together")
    row.notes.append(
        "Memory: PSS of the kernel, which is a part of it, and of all processes below it, a while after a cell of "
        f"{RANKS} ranks. Processor: over {_WATCHED_S:g} s, in percent of a core. In a session most of it is that of "
        "gloo's loops, which wake up a hundred times a second on each rank. After 5.5 minutes: the process that writes "
        "to MLflow, which a session starts, has ended."
    )
    with row.attempt(), bench.our_kernel() as kernel:
        row.ours += [Series("the kernel before the extension's first cell: memory", (_pss_mb(),), unit="MB")]
        all_reduce(kernel)
        row.ours += _waiting("after a cell")
    with row.attempt(), our_session(bench):
        time.sleep(_UNTIL_TRACKED_S)
        row.ours += _waiting("with a session")
        if not bench.quick:
            time.sleep(_TRACKED_S)
            row.ours += _waiting("with a session, after 5.5 minutes")
    for series in row.ours[1:]:
        limit = 300 if series.unit == "MB" else 0.2
        row.checks.append(at_most(series, limit, what=series.label))
    return row


@contextlib.contextmanager
def _peer(row: Row, label: str) -> Iterator[None]:
    try:
        yield
    except MeasurementFailed as reason:
        row.peers.append(Series(label, (), failures=(str(reason),)))


def _of_cells(label: str, cell: Callable[[], object], count: int) -> Series:
    """Seconds of processor time of one cell, as many times as `count` says."""
    for _ in range(3):
        cell()
    _wait_until_quiet()
    values: list[float] = []
    for _ in range(count):
        before = _processor_s()
        for _ in range(_CELLS):
            cell()
        # include the exit of the last cell's processes
        _wait_until_quiet()
        values.append((_processor_s() - before) / _CELLS)
    return Series(label, tuple(values))


def _less_empty(label: str, kernel: BenchKernel, magic: str, count: int) -> Series:
    whole = _of_cells(label, lambda: kernel.check(f"%%{magic}\n{NOTHING}"), count)
    empty = _of_cells("empty", lambda: kernel.check(NOTHING), count)
    return Series(label, tuple(value - empty.median for value in whole.values))


def _waiting(when: str) -> list[Series]:
    _wait_until_quiet()
    before = _processor_s()
    time.sleep(_WATCHED_S)
    percent = 100 * (_processor_s() - before) / _WATCHED_S
    return [
        Series(f"{when}: memory", (_pss_mb(),), unit="MB"),
        Series(f"{when}: processor", (percent,), unit="%"),
    ]


def _wait_until_quiet() -> None:
    """Wait until all processes together take next to nothing.

    Raises:
        MeasurementFailed: They don't.
    """
    until = time.monotonic() + _PATIENCE_S
    while True:
        before = _processor_s()
        time.sleep(_QUIET_S)
        if _processor_s() - before < _QUIET_SHARE * _QUIET_S:
            return
        if time.monotonic() > until:
            raise MeasurementFailed(f"the processes did not come to rest within {_PATIENCE_S:g} s")


def _processor_s() -> float:
    """Processor time of all descendants so far; that of ended ones is counted in the process that reaped them."""
    own = psutil.Process()
    total = own.cpu_times().children_user + own.cpu_times().children_system
    for process in own.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


def _pss_mb() -> float:
    total = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError, IndexError):
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            total += int(text.split("\nPss:")[1].split()[0]) * 1024
    return total / _MB
