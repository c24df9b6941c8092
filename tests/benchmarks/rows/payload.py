"""Payload: 1 GiB to all ranks, and 256 MiB back from each."""

from __future__ import annotations

import functools
import itertools
import time

from tests.benchmarks import peers
from tests.benchmarks.environment import Bench, distributed
from tests.benchmarks.kernel import BenchKernel
from tests.benchmarks.measure import (
    Check,
    MeasurementFailed,
    Row,
    Series,
    at_most,
    at_most_times,
    collect,
)
from tests.benchmarks.rows.launch import CLIENT

FLOATS, FLOATS_PER_PAGE, PAGES = 2**28, 1024, 2**18

# read one number per MiB, or one per page, which is bound by the page tables of four processes
SPARSE = "touched = float(big[::262144].sum())\ntouched"
TOUCH = "touched = float(big[::1024].sum())\ntouched"

PSS = """
import re, torch.distributed as dist
dist.barrier()
text = open("/proc/self/smaps_rollup").read()
pss_mib = int(re.search(r"^Pss:\\s+(\\d+) kB", text, re.M).group(1)) / 1024
dist.barrier()
"""


def _summed_pss_mib(kernel: BenchKernel, before: str = "") -> float:
    """PSS of four ranks after the lines `before`, in MiB; each reads its own while all are alive."""
    cell = distributed(kernel, "--gpus 4 --out pss_mib:all", f"import torch\n{before}\n{PSS}", expression="pss_mib")
    return sum(cell.value)  # type: ignore[arg-type]


def _ship(kernel: BenchKernel, round_number: int, body: str = SPARSE) -> float:
    """Seconds of a cell that touches `big` on every rank; its content is new each time."""
    kernel.check("big.add_(1); None")
    cell = distributed(kernel, "--gpus 4 --out touched:all", body, expression="touched")
    if cell.value != [float(round_number * (1024 if body is SPARSE else PAGES))] * 4:
        raise MeasurementFailed(f"the ranks saw other numbers than the notebook's: {cell.value!r}")
    return cell.round_trip_s


def to_all_ranks(bench: Bench) -> Row:
    row = Row("1 GiB torch tensor captured and touched in all ranks")
    row.notes.append(
        "One number of every MiB is read on every rank and checked (of every page in the third series, which the "
        "page tables of four processes bound); the tensor is changed before every cell. First time: a fresh kernel, "
        "whose pool has run one small cell. Peers have warm processes and read all. PSS: summed over the ranks of a "
        "cell that touched the tensor, less that of a cell without it."
    )
    again: list[float] = []
    again_failures: list[str] = []
    growths: list[float] = []
    every_page: list[float] = []

    def first() -> float:
        with bench.our_kernel() as kernel:
            kernel.check(f"import torch; big = torch.zeros({FLOATS})")
            distributed(kernel, "--gpus 4", "rank")
            time.sleep(0.6)
            seconds = _ship(kernel, 1)
            rounds = itertools.count(2)
            repeated = collect("again", lambda: _ship(kernel, next(rounds)), bench.count(4, 3), pause_s=0.6)
            again.extend(repeated.values)
            again_failures.extend(repeated.failures)
            whole = collect("whole", lambda: _ship(kernel, next(rounds), TOUCH), bench.count(4, 3), pause_s=0.6)
            every_page.extend(whole.values)
            growths.append(_summed_pss_mib(kernel, TOUCH) - _summed_pss_mib(kernel))
            return seconds

    row.ours = [collect("first time", first, bench.count(5, 1))]
    row.ours.append(Series("again", tuple(again), failures=tuple(again_failures)))
    row.ours.append(Series("summed growth of PSS", tuple(growths), unit="MiB"))
    row.ours.append(Series("again, a number of every page read", tuple(every_page)))
    row.checks = [at_most(row.ours[0], 0.5, what="first"), at_most(row.ours[1], 0.15, what="again")]
    grown = row.ours[2].slowest
    implausible = not growths or min(growths) < 512  # less than one copy: the measurement is wrong
    met = None if implausible else grown <= 1.1 * 1024
    row.checks.append(
        Check(
            "one copy on the node (1,024 MiB, not 4,096)",
            f"{grown:,.0f} MiB" if growths else "not measured",
            met,
        )
    )
    arguments = (str(bench.count(5, 3)),)
    floor = ("ours", "forked_ranks.py", "fresh-memory", *arguments)
    cloudpickle = ("peers", "forked_ranks.py", "cloudpickle", *arguments)
    ray = ("peers", "ray_payload.py", *arguments)
    labels = ("cloudpickle file", "Ray", "(the machine: 1 GiB of fresh memory written once)")
    for label, command in zip(labels, (cloudpickle, ray, floor), strict=True):
        row.peers.append(bench.once(label, functools.partial(peers.seconds_of, bench, *command, label=label)))
    return row


def back_from_each(bench: Bench) -> Row:
    row = Row("256 MiB from each rank back with `--out x:all`")
    row.notes.append(
        "Making the tensor on each rank, the way back, and reading one number of every page in the "
        "notebook. The "
        "same through shared memory: four forked processes that wait, one shared-memory file each."
    )
    body = "import torch\nx = torch.full((2**26,), float(rank + 1))"
    touch = "globals().__setitem__('bench_sums', [float(one[::1024].sum()) for one in x])"

    def sample() -> float:
        cell = distributed(kernel, "--gpus 4 --out x:all", body, then=touch, expression="bench_sums")
        if cell.value != [float((rank + 1) * PAGES // 4) for rank in range(4)]:
            raise MeasurementFailed(f"other numbers came back than were sent: {cell.value!r}")
        return cell.round_trip_s

    with row.attempt(), bench.our_kernel() as kernel:
        kernel.check("import torch")
        distributed(kernel, "--gpus 4", "rank")
        row.ours = [collect(CLIENT, sample, bench.count(10, 3), pause_s=0.6)]
    arguments = ("shared", str(bench.count(10, 3)))
    label = "one shared-memory file each"
    floor = bench.once(label, lambda: peers.seconds_of(bench, "ours", "forked_ranks.py", *arguments, label=label))
    row.checks = [at_most_times(row.series(0), floor, 2)]
    row.peers = [floor, peers.ipyparallel_return(bench)]
    return row
