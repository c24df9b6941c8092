"""Launching: a fresh group, a standby group, 300 in a row, the first cell of a kernel, and 64 ranks."""

from __future__ import annotations

import statistics
import time

from tests.benchmarks import peers
from tests.benchmarks.environment import Bench, CellTime, distributed
from tests.benchmarks.kernel import BenchKernel
from tests.benchmarks.measure import (
    MeasurementFailed,
    Row,
    Series,
    at_least_times_faster,
    at_most,
    at_most_beyond,
    at_most_p99,
    at_most_times,
    collect,
)
from tests.benchmarks.processes import run

ALL_REDUCE = """
import torch, torch.distributed as dist
value = torch.ones(1)
dist.all_reduce(value)
value = value.item()
"""
STANDBY_PAUSE_S = 0.6  # the standby group is renewed in the time between two cells of a user


CLIENT = "at the front end, from the request to the reply"


def own_empty_cell(kernel: BenchKernel, count: int) -> Series:
    """An empty cell of the kernel itself: what a front end's request takes at least."""
    return collect("the kernel's own empty cell", lambda: kernel.check("pass").round_trip_s, count, pause_s=0.05)


def all_reduce(kernel: BenchKernel, ranks: int = 4, timeout_s: float = 60.0) -> CellTime:
    """One cell: group, all_reduce, the sum back as a variable of the notebook."""
    cell = distributed(kernel, f"--gpus {ranks} --out value", ALL_REDUCE, expression="value", timeout_s=timeout_s)
    if cell.value != ranks:
        raise MeasurementFailed(f"the sum over {ranks} ranks came back as {cell.value!r}")
    return cell


def _launches(kernel: BenchKernel, count: int, *, pause_s: float = 0.0) -> list[Series]:
    """The same cells as the client sees them, and as its kernel does."""
    round_trips: list[float] = []

    def sample() -> float:
        cell = all_reduce(kernel)
        round_trips.append(cell.round_trip_s)
        return cell.kernel_s

    for _ in range(3):
        all_reduce(kernel)
    seen_by_kernel = collect("in the kernel", sample, count, pause_s=pause_s)
    return [Series(CLIENT, tuple(round_trips), failures=seen_by_kernel.failures), seen_by_kernel]


def fresh_group(bench: Bench) -> Row:
    row = Row("warm fresh-process cell, no standby: group, all_reduce, value back")
    row.notes.append(
        "4 ranks, `SGPU_STANDBY=0`, after 3 cells that are not counted, with 0.3 s of rest before each. The round trip "
        "is that of the execute request of the same cells. torchrun is timed as a process, accelerate inside "
        "its warm kernel."
    )
    with row.attempt(), bench.our_kernel(SGPU_STANDBY="0") as kernel:
        row.ours = _launches(kernel, bench.count(50, 8), pause_s=0.3)
        row.ours += [
            Series(f"{series.label}, without rest", series.values, failures=series.failures)
            for series in _launches(kernel, bench.count(30, 8))
        ]
    row.peers = [peers.torchrun_all_reduce(bench), peers.accelerate_all_reduce(bench)]
    row.checks = [
        at_most(row.series(2), 0.06),
        at_most_p99(row.series(2), 0.1),
        at_least_times_faster(row.series(0), row.peers[0], 80),
    ]
    return row


def standby_group(bench: Bench) -> Row:
    row = Row("the same from a standby group (the default)")
    row.notes.append(
        f"Default settings, {STANDBY_PAUSE_S} s of rest before each cell, in which the group is made anew."
    )
    with row.attempt(), bench.our_kernel() as kernel:
        row.ours = _launches(kernel, bench.count(50, 8), pause_s=STANDBY_PAUSE_S)
        row.ours.append(own_empty_cell(kernel, bench.count(100, 20)))
    row.peers = [peers.torchrun_all_reduce(bench), peers.accelerate_all_reduce(bench)]
    row.checks = [at_most_beyond(row.series(0), row.series(2), 0.012)]
    return row


def many_in_a_row(bench: Bench) -> Row:
    count = bench.count(300, 50)
    row = Row(f"the same {count} times in a row")
    row.notes.append("Default settings, no rest between cells.")
    with row.attempt(), bench.our_kernel() as kernel:
        row.ours = _launches(kernel, count)
    row.peers = [peers.accelerate_all_reduce(bench)]
    row.checks = [
        at_most(row.series(0), 0.06),
        at_most_p99(row.series(0), 0.1),
        at_least_times_faster(row.series(0), row.peers[0], 1),
    ]
    return row


def first_cell(bench: Bench) -> Row:
    row = Row("first cell in a fresh kernel, no pool running, 2 s after `%load_ext`")
    row.notes.append(
        "A new kernel and empty state for each sample. accelerate: first launch in a fresh kernel "
        "2 s after its import, and, as the client sees it, import and launch in one cell. `%load_ext` is over when its "
        "reply is there; most of the extension is imported after that, within the 2 s."
    )
    round_trips: list[float] = []
    loads: list[float] = []

    def sample() -> float:
        with bench.our_kernel(load=False) as kernel:
            loads.append(kernel.check("%load_ext sgpu_magic").round_trip_s)
            time.sleep(2)
            cell = all_reduce(kernel)
            round_trips.append(cell.round_trip_s)
            return cell.kernel_s

    in_kernel = collect("in the kernel", sample, bench.count(7, 2), most_failures=3)
    row.ours = [Series(CLIENT, tuple(round_trips), failures=in_kernel.failures), in_kernel]
    row.ours.append(Series("`%load_ext`, at the front end", tuple(loads)))
    row.peers = [peers.accelerate_first_cell(bench), peers.accelerate_first_cell_with_import(bench)]
    row.checks = [at_most(row.series(0), 0.35), at_most(row.series(2), 0.08, what="`%load_ext`")]
    return row


def first_cell_at_once(bench: Bench) -> Row:
    row = Row("the same with no pause after `%load_ext`")
    row.notes.append(
        "Extension and cell in one request, so that the cell waits for the extension's imports; "
        '`python -c "import torch"` runs right after each sample with the same interpreter. The limit is held against '
        "the cell; `%load_ext` with the cell is stated beside it."
    )
    both: list[float] = []
    imports: list[float] = []

    def sample() -> float:
        with bench.our_kernel(load=False) as kernel:
            code = (
                "bench_started = bench_time.perf_counter()\n"
                "get_ipython().run_line_magic('load_ext', 'sgpu_magic')\n"
                f"bench_s, _ = bench_cell('--gpus 4 --out value', {ALL_REDUCE!r})\n"
                "bench_both = bench_time.perf_counter() - bench_started\n"
            )
            seconds, with_load, value = kernel.check(code, expression="[bench_s, bench_both, value]").value
        if value != 4:
            raise MeasurementFailed(f"the sum came back as {value!r}")
        both.append(with_load)
        started = time.perf_counter()
        run([bench.python, "-c", "import torch"], timeout_s=60, environment=bench.environment(bench.scratch))
        imports.append(time.perf_counter() - started)
        return seconds

    row.ours = [collect("in the kernel", sample, bench.count(7, 2), most_failures=3)]
    row.ours.append(Series("`%load_ext` and the cell", tuple(both)))
    row.ours.append(Series('`python -c "import torch"`', tuple(imports)))
    row.peers = [peers.torchrun_all_reduce(bench)]
    row.checks = [at_most_times(row.ours[0], row.ours[2], 1.6)]
    return row


IDLE_MEMORY = """
import json, os, re
from pathlib import Path
from sgpu_magic.system.processes import descendants
def bench_is_zygote(pid):
    return b"worker.process.zygote" in Path(f"/proc/{pid}/cmdline").read_bytes()
def bench_parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
def bench_own_mb(pid):
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    numbers = re.findall(r"^Private_(?:Clean|Dirty):\\s+(\\d+) kB", text, re.M)
    return sum(map(int, numbers)) * 1024 / 1e6
bench_pool = json.loads(Path(os.environ["SGPU_STATE_DIR"], "pool.json").read_text())["pid"]
bench_zygotes = [pid for pid in descendants(bench_pool) if bench_is_zygote(pid)]
idle_mb = [bench_own_mb(pid) for pid in bench_zygotes if bench_is_zygote(bench_parent(pid))]
"""

OWN_MEMORY = """
import re, torch, torch.distributed as dist
text = open("/proc/self/smaps_rollup").read()
kib = sum(int(number) for number in re.findall(r"^Private_(?:Clean|Dirty):\\s+(\\d+) kB", text, re.M))
value = torch.ones(1)
dist.all_reduce(value)
value = value.item()
own_mb = kib * 1024 / 1e6
"""


def many_ranks(bench: Bench) -> Row:
    row = _ranks(bench, 64, 1.5)
    if bench.quick:
        row.notes.append("torchrun with 64 ranks takes minutes and is left out with `--quick`.")
    else:
        row.peers = [peers.torchrun_all_reduce(bench, ranks=64, count=1)]
    return row


def most_ranks(bench: Bench) -> Row:
    row = _ranks(bench, 256, 4.0)
    row.notes.append("torchrun is left out: 256 processes that each import torch do not fit this machine's memory.")
    return row


def _ranks(bench: Bench, count: int, most_s: float) -> Row:
    row = Row(f"{count} ranks, group + all_reduce")
    row.notes.append(
        "`SGPU_STANDBY=0`, after one cell that is not counted. Own memory: private "
        "pages in `smaps_rollup`; of an idle worker: of each rank of a standby group as large, read from outside; "
        "in a cell: read by each rank as its first act."
    )
    own = Series("own memory of an idle worker", (), unit="MB")
    with row.attempt(), bench.our_kernel(SGPU_CPU_SLOTS=str(count), SGPU_STANDBY="0") as kernel:
        all_reduce(kernel, count)
        row.ours = [collect(CLIENT, lambda: all_reduce(kernel, count).round_trip_s, bench.count(7, 2), pause_s=1)]
        cell = distributed(kernel, f"--gpus {count} --out own_mb:all", OWN_MEMORY, expression="own_mb")
        in_cell = Series("own memory in a cell", tuple(cell.value), unit="MB")  # type: ignore[arg-type]
    with row.attempt(), bench.our_kernel(SGPU_CPU_SLOTS=str(count)) as kernel:
        all_reduce(kernel, count)
        time.sleep(STANDBY_PAUSE_S + count / 30)
        idle = kernel.check(IDLE_MEMORY, expression="idle_mb").value
        if len(idle) != count:
            raise MeasurementFailed(f"there are {len(idle)} idle ranks, not {count}")
        own = Series("own memory of an idle worker", tuple(idle), unit="MB")
        row.ours += [own, in_cell]
        row.notes.append(f"Own memory over the idle ranks: mean {statistics.fmean(own.values):.1f} MB.")
    row.checks = [at_most(row.series(0), most_s), at_most(own, 8, of="largest", what="own memory of an idle worker")]
    return row
