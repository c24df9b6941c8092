"""The agent's measurements: processes, GPUs through a stand-in for NVML, samples, idle GPUs."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import nvml_stub as nvml
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import eventually

from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.agent.ranks.rank_process import NotebookFrames
from sgpu_magic.agent.ranks.run_processes import ProcessTable, TreeUse
from sgpu_magic.agent.watch.gpus import IdleWatch, waits_in
from sgpu_magic.agent.watch.nvml import GpuReading
from sgpu_magic.agent.watch.sampling import RunSampler, merged
from sgpu_magic.agent.watch.shared_pages import SharedPages
from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.system.processes import core_count
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.events import Noted
from sgpu_magic.wire.node import RunEvent
from sgpu_magic.wire.rank_events import Collective, DeviceBusy, DeviceIdle, RankSample, RankStack, Sampled, StackFrame
from sgpu_magic.wire.run import CellSource

nvml_stub = nvml.nvml_stub
Stub = Callable[..., dict[str, str]]
ROOT = Path(__file__).parents[3]
GB = 1_000_000_000

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


# ---------------------------------------------------------------- processes

SPIN = "import time; end = time.monotonic() + 60\nwhile time.monotonic() < end: pass"


@pytest.fixture
def processes() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts processes in their own sessions; they and their descendants are ended after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        os.killpg(process.pid, 9)
        process.wait()


@linux_only
def test_a_rank_uses_what_it_and_its_children_use(processes: Callable[..., subprocess.Popen[bytes]]):
    idle = processes("sleep", "100")
    parent = processes(
        sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"
    )
    table = ProcessTable()
    roots = [idle.pid, parent.pid]
    eventually(lambda: len(table.trees(roots)[parent.pid].pids) == 2, 20)
    before, began = table.trees(roots), time.monotonic()
    eventually(lambda: table.trees(roots)[parent.pid].cpu_s > before[parent.pid].cpu_s + 0.3, 20)
    after, took_s = table.trees(roots), time.monotonic() - began
    assert after[parent.pid].cpu_s - before[parent.pid].cpu_s < took_s + 0.1, "one core at most"
    assert after[idle.pid].cpu_s == before[idle.pid].cpu_s
    assert after[idle.pid].pids == {idle.pid}
    page = os.sysconf("SC_PAGE_SIZE")
    statm = Path(f"/proc/{idle.pid}/statm").read_text().split()
    assert after[idle.pid].rss_bytes == pytest.approx(int(statm[1]) * page, abs=64 * page)
    assert after[parent.pid].rss_bytes > 8e6, "two Pythons"


@linux_only
def test_time_of_children_that_have_ended_still_counts(processes: Callable[..., subprocess.Popen[bytes]]):
    # the system's count may be a hundredth of a second low for each child
    burn = "import time\nwhile time.process_time() < 0.22: pass"
    code = f"import subprocess, sys\nfor _ in range(2): subprocess.run([sys.executable, '-c', {burn!r}])\ninput()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True)
    try:
        table = ProcessTable()
        seen: list[float] = []

        def alone_again() -> bool:
            tree = table.trees([process.pid])[process.pid]
            seen.append(tree.cpu_s)
            return tree.cpu_s > 0.39 and len(tree.pids) == 1

        eventually(alone_again, 30)
        assert seen == sorted(seen), "it never goes back"
    finally:
        process.communicate(b"\n")


# a 200 MB parent with three forked children, each of which writes to a tenth of its pages
FORKS = """
import os, signal
data = bytearray(os.urandom(1 << 20) * 200)
for _ in range(3):
    if not os.fork():
        data[: 20 << 20] = os.urandom(20 << 20)
        # one call, so that lines of several children are not mixed
        os.write(1, b"written\\n")
        signal.pause()
signal.pause()
"""


@linux_only
def test_memory_that_forked_children_share_counts_once():
    table = ProcessTable()

    async def measured(pid: int) -> TreeUse:
        pages, deadline = SharedPages(), time.monotonic() + 20
        while True:
            tree = pages.counted_once(table.trees([pid]))[pid]
            assert tree.rss_bytes >= tree.own_rss_bytes
            if tree.rss_bytes > tree.own_rss_bytes or time.monotonic() > deadline:
                return tree
            await asyncio.sleep(0.01)

    with subprocess.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline() == b"written\n"
        raw = table.trees([process.pid])[process.pid]
        assert raw.rss_bytes > 700e6, "four times the same"
        tree = asyncio.run(measured(process.pid))
        assert 250e6 < tree.rss_bytes < 320e6
        os.killpg(process.pid, 9)


@linux_only
def test_a_look_is_shared_for_as_long_as_it_is_young(processes: Callable[..., subprocess.Popen[bytes]]):
    now = [0.0]
    table = ProcessTable(lambda: now[0])
    first, second = processes("sleep", "100"), processes("sleep", "100")
    seen = table.trees([first.pid])[first.pid]
    both = table.trees([first.pid, second.pid])
    now[0] = 0.5
    assert table.trees([first.pid], max_age_s=1)[first.pid] is both[first.pid]
    assert both[first.pid] is not seen, "one more root is a new look"
    now[0] = 2
    newer = table.trees([second.pid], max_age_s=1)
    assert newer[second.pid] is not both[second.pid]
    table.trees([first.pid], max_age_s=1)
    assert table.trees([second.pid], max_age_s=1)[second.pid] is newer[second.pid], "one look served both"


@linux_only
def test_a_process_that_is_gone_is_left_out(processes: Callable[..., subprocess.Popen[bytes]]):
    table = ProcessTable()
    with subprocess.Popen(["sleep", "100"]) as process:
        assert process.pid in table.trees([process.pid])
        process.kill()
    assert table.trees([process.pid]) == {}


@linux_only
def test_looking_at_64_ranks_costs_less_than_a_hundredth_of_a_core(processes: Callable[..., subprocess.Popen[bytes]]):
    roots = [processes("sleep", "100").pid for _ in range(64)]
    table = ProcessTable()
    table.trees(roots)
    looks = 50
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(looks):
        assert len(table.trees(roots)) == 64
    after = resource.getrusage(resource.RUSAGE_SELF)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used_s / looks < 0.01


# ---------------------------------------------------------------- GPUs

READ = """
import asyncio, sys, msgspec, os
from sgpu_magic.agent.watch.gpus import Gpus
async def main():
    gpus = Gpus()
    held = []
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        word, *uuids = line.split()
        began = loop.time()
        if word == "hold":
            gpus.hold(uuids)
            held = uuids
        elif word == "release":
            gpus.release(held)
        readings = {}
        if word == "read":
            done = loop.create_future()
            gpus.read(done.set_result)
            readings = await done
        answer = {"took_s": loop.time() - began, "readings": readings}
        print(msgspec.json.encode(answer).decode(), flush=True)
    gpus.close()
asyncio.run(main())
"""


class Reader:
    """A process on a stubbed machine that reads GPUs as the agent does."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.environ = environ
        self._process = subprocess.Popen(
            [sys.executable, "-c", READ],
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def ask(self, *words: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def read(self) -> dict[str, dict[str, Any]]:
        return self.ask("read")["readings"]

    @property
    def times_open(self) -> int:
        return nvml.times_open(self.environ, self.pid)

    def close(self) -> None:
        self._process.communicate(timeout=20)
        assert self._process.returncode == 0


@pytest.fixture
def reader(nvml_stub: Stub) -> Iterator[Callable[..., Reader]]:
    """Starts readers: `reader(devices)`."""
    made: list[Reader] = []

    def make(devices: list[nvml.StubGpu], **options: Any) -> Reader:
        made.append(Reader(nvml_stub(devices=devices, **options)))
        return made[-1]

    yield make
    for one in made:
        nvml.change(one.environ, [])
        one.close()


def gpu(number: int, **properties: Any) -> nvml.StubGpu:
    return nvml.StubGpu(uuid=nvml.gpu_uuid(number), bus=number + 1, **properties)


def wait_for(reader: Reader, wanted: Callable[[dict[str, dict[str, Any]]], bool], deadline_s: float = 20) -> None:
    last: dict[str, dict[str, Any]] = {}

    def found() -> bool:
        last.clear()
        last.update(reader.read())
        return wanted(last)

    eventually(found, deadline_s, lambda: str(last))


UUIDS = [nvml.gpu_uuid(number) for number in range(4)]


def test_everything_that_a_gpu_tells(reader: Callable[..., Reader]):
    process = nvml.StubProcess(4242, 3 * GB)
    busy = gpu(
        1,
        utilization_pct=97,
        used_bytes=5 * GB,
        power_w=143.4,
        temperature_c=61,
        processes=[process],
        uses=[(4242, 95), (4343, 2)],
    )
    one = reader([gpu(0), busy])
    one.ask("hold", *UUIDS[:2])
    wait_for(one, lambda found: len(found) == 2)
    found = one.read()[UUIDS[1]]
    assert found == {
        "utilization_pct": 97,
        "used_bytes": 5 * GB,
        "total_bytes": nvml.A10_BYTES,
        "power_w": 143,
        "temperature_c": 61,
        "process_bytes": {"4242": 3 * GB},
        "process_pct": {"4242": 95, "4343": 2},
        "problem": None,
        "lost": False,
    }


def test_what_a_gpu_does_not_tell_is_absent(reader: Callable[..., Reader]):
    one = reader([gpu(0, utilization_pct=None)])
    one.ask("hold", UUIDS[0])
    wait_for(one, lambda found: UUIDS[0] in found)
    found = one.read()[UUIDS[0]]
    absent = ("utilization_pct", "power_w", "temperature_c", "process_pct")
    assert [found[name] for name in absent] == [None] * 4
    assert (found["used_bytes"], found["problem"]) == (0, None)


def test_of_a_slice_only_memory_is_told(reader: Callable[..., Reader]):
    part = nvml.StubSlice(uuid="MIG-1", name="NVIDIA A100 MIG 1g.5gb", memory_bytes=5 * GB, used_bytes=GB, power_w=200)
    one = reader([gpu(0, slices=[part], power_w=200, temperature_c=50, utilization_pct=90)])
    one.ask("hold", "MIG-1")
    wait_for(one, lambda found: "MIG-1" in found)
    found = one.read()["MIG-1"]
    assert (found["used_bytes"], found["total_bytes"]) == (GB, 5 * GB)
    assert [found[name] for name in ("utilization_pct", "power_w", "temperature_c")] == [None] * 3


def test_values_change_and_processes_that_did_nothing_have_no_share(reader: Callable[..., Reader]):
    one = reader([gpu(0, utilization_pct=10, uses=[(7, 10)])])
    one.ask("hold", UUIDS[0])
    wait_for(one, lambda found: found.get(UUIDS[0], {}).get("process_pct") == {"7": 10})
    nvml.change(one.environ, [gpu(0, utilization_pct=0, uses=[])])
    found = one.read()[UUIDS[0]]
    assert (found["utilization_pct"], found["process_pct"]) == (0, {})


def test_a_lost_gpu_says_so_and_the_others_are_read_on(reader: Callable[..., Reader]):
    one = reader([gpu(0), gpu(1, utilization_pct=50)])
    one.ask("hold", *UUIDS[:2])
    wait_for(one, lambda found: len(found) == 2)
    nvml.change(one.environ, [gpu(0, error=15), gpu(1, utilization_pct=60)])
    found = one.read()
    assert found[UUIDS[0]]["lost"]
    assert found[UUIDS[0]]["problem"].startswith("it can't be read: it has fallen off the bus; reset it")
    assert found[UUIDS[0]]["utilization_pct"] is None
    assert found[UUIDS[1]]["utilization_pct"] == 60
    # the GPU was reset
    nvml.change(one.environ, [gpu(1), gpu(0, utilization_pct=5)])
    found = one.read()[UUIDS[0]]
    assert (found["lost"], found["utilization_pct"]) == (False, 5)


@pytest.mark.slow
def test_a_call_that_does_not_return_costs_only_its_device(reader: Callable[..., Reader]):
    one = reader([gpu(0, utilization_pct=10), gpu(1, utilization_pct=20), gpu(2, utilization_pct=30)])
    one.ask("hold", *UUIDS[:3])
    wait_for(one, lambda found: len(found) == 3)
    stuck = gpu(1, blocks="nvmlDeviceGetUtilizationRates")
    nvml.change(one.environ, [gpu(0, utilization_pct=11), stuck, gpu(2, utilization_pct=31)])
    answer = one.ask("read")
    assert answer["took_s"] < 20, "nobody waits for the driver"
    assert UUIDS[1] not in answer["readings"]
    threads = Path(f"/proc/{one.pid}/task")
    before = len(list(threads.iterdir()))
    wait_for(one, lambda found: "does not answer" in (found.get(UUIDS[1], {}).get("problem") or ""))
    wait_for(one, lambda found: found.get(UUIDS[0], {}).get("utilization_pct") == 11 and UUIDS[2] in found)
    assert one.read()[UUIDS[1]]["utilization_pct"] is None
    assert len(list(threads.iterdir())) <= before + 1, "slow calls do not pile up"
    nvml.change(one.environ, [gpu(0), gpu(1, utilization_pct=22), gpu(2)])
    wait_for(one, lambda found: found.get(UUIDS[1], {}).get("utilization_pct") == 22)


def test_nvml_is_open_only_while_a_run_holds_a_gpu(reader: Callable[..., Reader]):
    one = reader(nvml.a10s(4))
    assert one.read() == {}
    assert one.times_open == 0
    one.ask("hold", *UUIDS)
    wait_for(one, lambda found: len(found) == 4)
    assert one.times_open == 1
    one.ask("release")
    eventually(lambda: one.times_open == 0, 10)
    one.ask("hold", *UUIDS)
    wait_for(one, lambda found: len(found) == 4)


def test_a_driver_that_can_not_be_opened_is_said(reader: Callable[..., Reader]):
    one = reader(nvml.a10s(1), failures={"nvmlInitWithFlags": 18})
    one.ask("hold", UUIDS[0])
    wait_for(one, lambda found: "different versions" in (found.get(UUIDS[0], {}).get("problem") or ""))


# ---------------------------------------------------------------- samples


class _Rank:
    def __init__(self, rank: int) -> None:
        self.rank, self.pid, self.alive = rank, 100 + rank, True
        self.output = SimpleNamespace(total_bytes=0)
        self.stack = ""
        self.stack_file = SimpleNamespace(sampled=lambda: self.stack)


class _Ranks:
    """The part of a group that a sampler uses."""

    def __init__(self, count: int) -> None:
        self.ranks = [_Rank(rank) for rank in range(count)]


class Sampler:
    """A sampler of a run with its own clock, and the samples that it has sent."""

    def __init__(
        self,
        ranks: int,
        *,
        uuids: tuple[str, ...] = (),
        simulated: bool = False,
        notebook: NotebookFrames | None = None,
    ) -> None:
        self.sent: list[Sampled | Noted] = []
        self.used: list[dict[int, float | None]] = []
        self.group = _Ranks(ranks)
        lease = Lease(lease_id="l", device_type="a10", ranks=ranks, uuids=uuids, simulated=simulated)
        self.sampler = RunSampler(
            cast(Group, self.group), lease, self.sent.append, lambda use: self.used.append(dict(use)), notebook
        )
        self.now, self._cpu_s = 1000.0, 0.0
        self.sampler.begin(self.now, self._trees(0.0), 8 * GB)

    def _trees(self, cores: float) -> dict[int, TreeUse]:
        self._cpu_s += cores
        return {
            rank.pid: TreeUse(frozenset({rank.pid, rank.pid + 1000}), self._cpu_s, 400_000_000, 400_000_000)
            for rank in self.group.ranks
            if rank.alive
        }

    def step(self, readings: dict[str, GpuReading] | None = None, cores: float = 0.5, seconds: float = 1.0) -> None:
        self.now += seconds
        self.sampler.sample(self.now, self._trees(cores * seconds), readings or {})

    @property
    def samples(self) -> list[Sampled]:
        return [body for body in self.sent if isinstance(body, Sampled)]


def test_a_rank_says_where_it_is_until_it_has_printed_something():
    cell = CellSource(magic_line="%%distributed -n 2", body="import os\nimport torch\n", execution_count=9)
    run = Sampler(2, notebook=NotebookFrames(cell))
    import_line = '  File "<ipython-input-9-a>", line 3 in <module>\n'
    run.group.ranks[0].stack = '  File "/env/torch/__init__.py", line 40 in <module>\n' + import_line
    run.group.ranks[1].stack = '  File "/env/sgpu_magic/worker/process/rank.py", line 40 in run\n'
    run.step()
    run.group.ranks[0].output.total_bytes = 6
    run.step()
    assert [[sample.line for sample in shown.samples] for shown in run.samples] == [
        ["line 3: import torch", ""],
        ["", ""],
    ]


def test_a_rank_that_waits_for_others_for_some_seconds_says_so_until_it_goes_on():
    cell = CellSource(magic_line="%%distributed -n 2", body="dist.barrier()\nstep()\n", execution_count=9)
    run = Sampler(2, notebook=NotebookFrames(cell))
    in_barrier = '  File "/env/torch/distributed/distributed_c10d.py", line 4 in barrier\n'
    for rank in run.group.ranks:
        rank.stack = in_barrier + '  File "<ipython-input-9-a>", line 2 in <module>\n'
        # it has printed something
        rank.output.total_bytes = 6

    def waits() -> list[list[str]]:
        shown, run.sent[:] = run.samples, []
        return [[sample.waits_in for sample in each.samples] for each in shown]

    for _ in range(5):
        run.step(cores=0.0)
    assert waits() == [["", ""]] * 5
    run.step(cores=0.0)
    assert waits() == [["barrier", "barrier"]]
    run.group.ranks[0].output.total_bytes = 12
    run.step(cores=0.0)
    assert waits() == [["", "barrier"]]
    # collectives that follow each other use the processor
    run.step(cores=0.3)
    assert waits() == [["", ""]]


def test_a_wait_is_reported_at_once_also_when_samples_are_collected():
    run = Sampler(1, notebook=NotebookFrames(CellSource(body="dist.barrier()", execution_count=9)))
    run.step(cores=0.9, seconds=601)
    run.sent.clear()
    (rank,) = run.group.ranks
    rank.stack = (
        '  File "/env/torch/distributed/c10d.py", line 4 in barrier\n  File "<ipython-input-9-a>", line 1 in <module>\n'
    )
    seen: list[int] = []
    for step in range(8):
        run.step(cores=0.0)
        seen += [step for shown in run.samples if shown.samples[0].waits_in]
        run.sent.clear()
    assert seen[0] == 5


def test_cpu_ranks_are_sampled_by_their_processes():
    run = Sampler(2)
    run.step(cores=1.9)
    assert run.samples == [
        Sampled(
            seconds=1.0,
            samples=tuple(
                RankSample(
                    rank=rank,
                    kind="cpu",
                    total_bytes=8 * GB,
                    cpu_cores=1.9,
                    rss_bytes=400_000_000,
                    cores=max(1, core_count() // 2),
                )
                for rank in range(2)
            ),
        )
    ]
    run.step(cores=0)
    assert run.samples[1].samples[0].cpu_cores == 0
    again = run.samples[1].samples[0]
    assert (again.total_bytes, again.cores) == (None, None), "what does not change is told once"
    assert run.used == []


def test_a_simulated_device_is_cpu_and_never_busy():
    run = Sampler(1, uuids=("SIM-a10-0",), simulated=True)
    run.step({"SIM-a10-0": GpuReading(utilization_pct=99)})
    sample = run.samples[0].samples[0]
    assert (sample.kind, sample.uuid, sample.utilization_pct) == ("cpu", "SIM-a10-0", None)
    assert run.sampler.gpus == ()
    assert run.used == []


def test_the_own_share_is_that_of_the_rank_and_its_children():
    run = Sampler(1, uuids=("GPU-0",))
    everybody = {100: 3 * GB, 1100: GB, 555: 4 * GB}
    reading = GpuReading(90, 9 * GB, 24 * GB, 143, 61, everybody, {100: 60.0, 1100: 10.0, 555: 20.0})
    run.step({"GPU-0": reading})
    sample = run.samples[0].samples[0]
    assert (sample.kind, sample.uuid, sample.own_bytes, sample.own_utilization_pct) == ("gpu", "GPU-0", 4 * GB, 70)
    assert (sample.utilization_pct, sample.used_bytes, sample.total_bytes) == (90, 9 * GB, 24 * GB)
    assert (sample.power_w, sample.temperature_c, sample.cpu_cores) == (143, 61, 0.5)
    assert run.used == [{0: 90}]


def test_where_pids_are_the_hosts_the_own_share_is_absent():
    run = Sampler(1, uuids=("GPU-0",))
    run.step({"GPU-0": GpuReading(90, process_bytes={987654: GB}, process_pct={987654: 90.0})})
    sample = run.samples[0].samples[0]
    assert (sample.own_bytes, sample.own_utilization_pct, sample.utilization_pct) == (None, None, 90)


def test_a_gpu_that_has_not_answered_leaves_only_the_rank():
    run = Sampler(2, uuids=("GPU-0", "GPU-1"))
    run.step({"GPU-1": GpuReading(90, GB, 24 * GB)})
    first, second = run.samples[0].samples
    assert (first.utilization_pct, first.used_bytes, first.cpu_cores, first.problem) == (None, None, 0.5, None)
    assert second.utilization_pct == 90


def test_a_lost_gpu_is_noted_once():
    run = Sampler(4, uuids=tuple(UUIDS))
    lost = GpuReading(problem="it can't be read: it has fallen off the bus; reboot", lost=True)
    for _ in range(3):
        run.step({UUIDS[3]: lost})
    notes = [body.text for body in run.sent if isinstance(body, Noted)]
    assert notes == [f"rank 3's GPU ({UUIDS[3]}) has fallen off the bus; reboot"]
    assert [sample.samples[3].problem for sample in run.samples] == [lost.problem] * 3


def test_ranks_that_have_ended_are_left_out():
    run = Sampler(2)
    run.group.ranks[1].alive = False
    run.step()
    assert [sample.rank for sample in run.samples[0].samples] == [0]


def test_after_ten_minutes_every_five_seconds_are_one_sample():
    run = Sampler(1, uuids=("GPU-0",))
    reading = GpuReading(50, GB, 24 * GB)
    for _ in range(600):
        run.step({"GPU-0": reading})
    assert len(run.samples) == 600
    for pct, used in ((0, 1), (100, 5), (50, 2), (50, 1), (20, 1)):
        run.step({"GPU-0": GpuReading(pct, used * GB, 24 * GB, power_w=pct)}, cores=pct / 100)
    assert len(run.samples) == 601
    last = run.samples[-1]
    sample = last.samples[0]
    assert last.seconds == 5
    assert (sample.utilization_pct, sample.used_bytes, sample.power_w) == (44, 5 * GB, 44)
    assert sample.cpu_cores == pytest.approx(0.44)
    run.step({"GPU-0": reading})
    assert len(run.samples) == 601
    run.sampler.publish()
    assert (len(run.samples), run.samples[-1].seconds) == (602, 1.0)
    assert len(run.used) == 606, "idle GPUs are looked for every second"


def test_a_tick_at_once_after_another_is_no_sample():
    run = Sampler(1)
    run.step(seconds=0.1)
    assert run.samples == []
    run.step(seconds=0.9)
    assert run.samples[0].seconds == 1.0


@given(st.lists(st.one_of(st.none(), st.integers(0, 100)), min_size=1, max_size=10))
def test_what_nobody_told_does_not_count_in_a_mean(values: list[int | None]):
    sample = merged([RankSample(rank=0, kind="gpu", utilization_pct=value) for value in values])
    shown = [value for value in values if value is not None]
    if shown:
        assert sample.utilization_pct == pytest.approx(sum(shown) / len(shown), abs=0.06)
    else:
        assert sample.utilization_pct is None


def test_the_log_of_a_day_with_8_ranks_stays_under_10_mb(tmp_path: Path):
    run = Sampler(8, uuids=tuple(nvml.gpu_uuid(number) for number in range(8)))

    def readings(step: int) -> dict[str, GpuReading]:
        return {
            nvml.gpu_uuid(number): GpuReading(
                (37 * step + number) % 101,
                18_203_123_456 + step * 4096,
                24 * GB,
                143 + step % 50,
                61,
                {100 + number: 18_000_123_456 + step},
                {100 + number: 93.0},
            )
            for number in range(8)
        }

    log = RunLog(tmp_path / "run", "0" * 26)
    try:
        for step in range(1200):
            run.step(readings(step), cores=1.234)
        for body in run.sent:
            at = 1_763_653_000.123
            log.append(body, at, report=RunEvent(run_id="0" * 26, number=12_345, at=at, body=body))
    finally:
        log.close()
    assert len(run.sent) == 720
    per_event = (tmp_path / "run" / "events.msgpack").stat().st_size / len(run.sent)
    events = 600 + (86_400 - 600) / 5
    assert events * per_event < 10e6, per_event
    kept = [event.body for event, _ in EventFile(tmp_path / "run").new_events()]
    assert kept == run.sent


# ---------------------------------------------------------------- idle GPUs


def test_a_gpu_is_idle_after_a_while_and_told_once():
    watch = IdleWatch(60)
    for now in range(100, 160):
        assert watch.detect(now, {0: 3, 1: 80}) == []
        assert watch.idle(now) == set()
    watch.detect(160, {0: 5, 1: 80})
    assert watch.idle(160) == {0}
    assert watch.explain(160, {0: "the DataLoader"}) == [DeviceIdle(rank=0, seconds=60, waits_in="the DataLoader")]
    watch.detect(161, {0: 0, 1: 80})
    assert watch.explain(161, {0: "the DataLoader"}) == []
    assert watch.explain(170, {0: "all_reduce"}) == [DeviceIdle(rank=0, seconds=70, waits_in="all_reduce")]
    assert watch.detect(171, {0: 30, 1: 80}) == [DeviceBusy(rank=0)]
    assert watch.detect(172, {0: 30, 1: 80}) == []
    assert watch.reported == set()


def test_a_gpu_that_worked_a_moment_is_not_idle():
    watch = IdleWatch(60)
    for now in range(600):
        watch.detect(now, {0: 100 if now % 50 == 0 else 0})
        assert watch.idle(now) == set()


@given(st.lists(st.tuples(st.sampled_from([None, 0, 4, 6, 100]), st.sampled_from(["", "the DataLoader"])), max_size=60))
def test_busy_is_told_only_after_idle_and_what_is_absent_is_never_idle(steps: list[tuple[int | None, str]]):
    watch = IdleWatch(3)
    shown: str | None = None
    since: int | None = None
    for now, (pct, cause) in enumerate(steps):
        since = (now if since is None else since) if pct is not None and pct < 5 else None
        busy = watch.detect(now, {0: pct})
        assert bool(busy) == (shown is not None and since is None)
        shown = None if busy else shown
        found = watch.explain(now, {0: cause})
        is_idle = since is not None and now - since >= 3
        assert bool(found) == (is_idle and shown != cause)
        for idle in found:
            assert since is not None
            assert (idle.seconds, idle.waits_in) == (now - since, cause)
            shown = cause


def test_a_rank_that_is_done_stands_out_no_more():
    watch = IdleWatch(1)
    watch.detect(0, {0: 0, 1: 0})
    watch.detect(1, {0: 0, 1: 0})
    assert len(watch.explain(1, {})) == 2
    assert watch.detect(2, {0: 0}) == [DeviceBusy(rank=1)]
    assert watch.idle(2) == {0}


NOTEBOOK = NotebookFrames(
    CellSource(body="for batch in loader:\n    time.sleep(3)\n    out = sleep_well(batch)", magic_line="%%distributed")
)


def cell(line: int) -> StackFrame:
    return StackFrame("<ipython-input-7-abc>", line, "<module>")


LOADER = StackFrame("/x/site-packages/torch/utils/data/dataloader.py", 700, "__next__")
QUEUE = StackFrame("/usr/lib/python3.11/queue.py", 180, "get")
REDUCE = StackFrame("/x/site-packages/torch/distributed/distributed_c10d.py", 2000, "all_reduce")


@pytest.mark.parametrize(
    ("stack", "cause"),
    [
        (RankStack(rank=0, frames=(QUEUE, LOADER, cell(2))), "the DataLoader"),
        (RankStack(rank=0, frames=(cell(3), LOADER, cell(2))), "the DataLoader"),
        (RankStack(rank=0, frames=(REDUCE, cell(2))), "all_reduce"),
        (
            RankStack(rank=0, frames=(cell(2),), collective=Collective(name="barrier", seq=3, pending=True)),
            "barrier",
        ),
        (RankStack(rank=0, frames=(cell(2),), collective=Collective(name="barrier", seq=3, pending=False)), ""),
        (RankStack(rank=0, frames=(cell(3),)), "time.sleep"),
        (RankStack(rank=0, frames=(cell(4),)), ""),
        (RankStack(rank=0, frames=(QUEUE, cell(3))), ""),
        (RankStack(rank=0, problem="its process has ended"), ""),
    ],
    ids=["workers", "own data set", "collective", "pending", "done", "sleep", "named alike", "elsewhere", "unknown"],
)
def test_only_what_the_stack_shows_is_said(stack: RankStack, cause: str):
    assert waits_in(stack, NOTEBOOK) == cause
