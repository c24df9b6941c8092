"""What ranks use, as the view of a run shows it. NVML is a stand-in, everything else is real."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import nvml_stub as nvml
import pytest
from kernels import Cell, Home, Kernel, eventually

from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.usage import detail_lines, use_text
from sgpu_magic.wire.events import Submitted
from sgpu_magic.wire.rank_events import RankSample, Sampled

nvml_stub = nvml.nvml_stub
UUIDS = [nvml.gpu_uuid(number) for number in range(4)]
GB = 1_000_000_000
SLICES = [
    nvml.StubSlice(f"MIG-{number}", "NVIDIA H100 MIG 1g.10gb", memory_bytes=10 * GB, used_bytes=number * GB // 10)
    for number in (1, 2)
]
WAIT = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)"


def gpu(number: int, **properties: Any) -> nvml.StubGpu:
    return nvml.StubGpu(uuid=UUIDS[number], bus=number + 1, **properties)


@pytest.fixture(scope="module")
def machine(nvml_stub: Callable[..., dict[str, str]]) -> dict[str, str]:
    """The variables of a machine with four idle A10s."""
    return nvml_stub()


@pytest.fixture(scope="module")
def home(machine: dict[str, str]) -> Iterator[Home]:
    made = Home(machine | {"SGPU_IDLE_GPU_S": "2"})
    yield made
    made.close()


def newest_view(home: Home, since: set[str]) -> RunView | None:
    """The view of the run that began after `since` was taken, as whoever attaches to it sees it."""
    new = [run for run in home.runs if run not in since]
    if not new:
        return None
    view: RunView | None = None
    with contextlib.suppress(FileNotFoundError):
        for event, frames in EventFile(home.run_dir(new[-1])).new_events():
            if isinstance(event.body, Submitted):
                view = RunView(event.body.spec)
            assert view is not None
            view.apply(event, frames)
    return view


class Watched:
    """A cell that was started, and the view of its run."""

    def __init__(self, kernel: Kernel, code: str) -> None:
        self._home = kernel.home
        self._before = set(kernel.home.runs)
        self.cell: Cell = kernel.start(code)

    @property
    def view(self) -> RunView:
        found = newest_view(self._home, self._before)
        assert found is not None
        return found

    def sample(self, rank: int) -> RankSample:
        usage = self.view.usage.ranks[rank].latest
        assert usage is not None
        return usage

    def until(self, wanted: Callable[[RunView], Any], timeout_s: float = 20.0, what: str = "") -> RunView:
        """Wait until the view is as it should be, and return it."""

        def as_wanted() -> bool:
            view = newest_view(self._home, self._before)
            return view is not None and bool(wanted(view))

        self.cell.until(as_wanted, timeout_s, what or "the view")
        return self.view

    def go(self) -> RunView:
        """Let the ranks that wait for it end, and return the view of the whole run."""
        (self._home.work / "go").touch()
        reply = self.cell.wait(30)
        assert reply.status == "ok", reply.story
        return self.view


Watch = Callable[[str], Watched]


@pytest.fixture
def watch(kernel: Kernel, machine: dict[str, str], home: Home) -> Iterator[Watch]:
    """Starts a cell: `watch(code)`. After the test no rank waits any more and the GPUs are idle."""
    started: list[Watched] = []

    def start(code: str) -> Watched:
        started.append(Watched(kernel, code))
        return started[-1]

    yield start
    nvml.change(machine, nvml.a10s(4))
    (home.work / "go").touch()
    for run in started:
        if not run.cell.idle:
            run.cell.wait(30)
    (home.work / "go").unlink()
    eventually(lambda: "4 A10" in kernel.check("%sgpu_status").text, 20, "the pool knows of the idle GPUs again")


def has_samples(view: RunView, ranks: int = 1) -> bool:
    return len(view.usage.ranks) == ranks and all(usage.latest for usage in view.usage.ranks.values())


def cores_of(run: Watched, rank: int) -> float:
    cores = run.sample(rank).cpu_cores
    assert cores is not None
    return cores


def times_sampled(home: Home, view: RunView) -> int:
    return sum(isinstance(event.body, Sampled) for event, _ in EventFile(home.run_dir(view.run_id)).new_events())


def change(machine: Mapping[str, str], **properties: Any) -> None:
    """All four GPUs do the same, but for their memory, by which they are told apart."""
    nvml.change(machine, [gpu(number, used_bytes=(number + 1) * GB // 10, **properties) for number in range(4)])


def test_every_rank_shows_what_its_own_gpu_does(kernel: Kernel, machine: dict[str, str], watch: Watch):
    run = watch(f"%%distributed -n 4\n{WAIT}")
    run.until(lambda view: has_samples(view, 4))
    used = [int(0.2 * GB), int(0.4 * GB), int(0.6 * GB), int(0.8 * GB)]
    gpus = [
        gpu(n, utilization_pct=10 * (n + 1), used_bytes=used[n], power_w=100 + n, temperature_c=50 + n)
        for n in range(4)
    ]
    nvml.change(machine, gpus)
    run.until(lambda view: [run.sample(rank).used_bytes for rank in range(4)] == used)
    samples = [run.sample(rank) for rank in range(4)]
    assert [sample.uuid for sample in samples] == UUIDS
    assert [use_text(sample) for sample in samples] == [f"{n}0 % · 0.{2 * n} GB" for n in range(1, 5)]
    lines = detail_lines(samples[3])
    assert {"power: 103 W", "temperature: 53 °C", "memory: 0.8 of 24.1 GB"} <= set(lines)
    view = run.go()
    curves = {curve.name: curve.series.values for curve in view.usage.ranks[3].curves()}
    assert curves["GPU"][-1] == 40
    assert curves["power"][-1] == 103
    assert 0 < (view.usage.busy_pct or 0) <= 25


@pytest.mark.slow
def test_the_share_of_the_runs_own_processes_is_told(kernel: Kernel, machine: dict[str, str], watch: Watch):
    run = watch(f"%%distributed -n 1\nimport os\nprint('pid', os.getpid())\n{WAIT}")
    run.until(has_samples)
    log = kernel.home.log(run.view.run_id, 0).splitlines()
    (pid,) = [int(line.split()[1]) for line in log if line.startswith("pid ")]
    everybody = [nvml.StubProcess(pid, GB), nvml.StubProcess(1 << 22, 2 * GB)]
    uses = [(pid, 70), (1 << 22, 20)]
    # on whichever of them the rank is placed
    nvml.change(machine, [gpu(index, utilization_pct=90, used_bytes=3 * GB, processes=everybody, uses=uses)
                          for index in range(4)])  # fmt: skip
    run.until(lambda view: run.sample(0).own_bytes is not None)
    sample = run.sample(0)
    assert (sample.utilization_pct, sample.own_utilization_pct) == (90, 70)
    assert (sample.used_bytes, sample.own_bytes) == (3 * GB, GB)
    run.go()


@pytest.mark.slow
def test_a_gpu_that_waits_for_the_data_loader_stands_out(kernel: Kernel, machine: dict[str, str], watch: Watch):
    change(machine, utilization_pct=60)
    code = (
        "%%distributed -n 2\n"
        "import os, time\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Slow(Dataset):\n"
        "    def __len__(self): return 2\n"
        "    def __getitem__(self, index):\n"
        "        while rank == 1 and not os.path.exists('go'): time.sleep(0.02)\n"
        "        return index\n"
        "for batch in DataLoader(Slow()): pass\n" + WAIT
    )
    run = watch(code)
    run.until(lambda view: has_samples(view, 2))
    assert run.view.usage.idle_sentences == []
    gpus = [gpu(number, utilization_pct=0 if number == 1 else 60) for number in range(4)]
    nvml.change(machine, gpus)
    view = run.until(lambda view: view.usage.idle_sentences)
    (sentence,) = view.usage.idle_sentences
    assert sentence.startswith("rank 1's GPU has been under 5 % for ")
    assert sentence.endswith(" s: it waits in the DataLoader")
    assert view.usage.ranks[1].idle_text.startswith("GPU under 5 % for")
    assert view.usage.ranks[0].idle is None
    change(machine, utilization_pct=70)
    run.until(lambda view: not view.usage.idle_sentences)
    assert run.go().usage.idle_sentences == []


@pytest.mark.slow
def test_idle_gpus_with_one_cause_are_told_together(kernel: Kernel, machine: dict[str, str], watch: Watch):
    run = watch("%%distributed -n 4\nimport time\ntime.sleep(7)")
    view = run.until(lambda view: sum(usage.idle is not None for usage in view.usage.ranks.values()) == 4)
    (sentence,) = view.usage.idle_sentences
    assert sentence.startswith("the GPUs of ranks 0-3 have been under 5 % for ")
    assert sentence.endswith(": they wait in time.sleep")
    assert run.cell.wait(30).status == "ok"
    assert run.view.usage.idle_sentences == []


@pytest.mark.slow
def test_a_gpu_that_falls_off_the_bus_is_named_once_and_the_run_goes_on(
    kernel: Kernel, machine: dict[str, str], watch: Watch
):
    change(machine, utilization_pct=60)
    run = watch(f"%%distributed -n 4\n{WAIT}")
    run.until(lambda view: has_samples(view, 4))
    nvml.change(machine, [gpu(number, utilization_pct=60, error=15 if number == 3 else 0) for number in range(4)])
    run.until(lambda view: run.sample(3).problem)
    assert use_text(run.sample(3)) == "can't be read"
    assert "it has fallen off the bus; reset it" in run.sample(3).problem
    reported = times_sampled(kernel.home, run.view)
    run.until(lambda view: times_sampled(kernel.home, view) > reported + 1)
    notes = [note for note in run.view.notes if "fallen off the bus" in note]
    assert len(notes) == 1
    assert notes[0].startswith(f"rank 3's GPU ({UUIDS[3]}) has fallen off the bus; reset it with ")
    assert run.sample(0).utilization_pct == 60
    view = run.go()
    assert view.usage.ranks[3].mean_utilization_pct == pytest.approx(60)


@pytest.mark.slow
def test_a_driver_call_that_blocks_hangs_neither_the_run_nor_the_pool(
    kernel: Kernel, machine: dict[str, str], watch: Watch
):
    change(machine, utilization_pct=60)
    run = watch(f"%%distributed -n 2\n{WAIT}")
    run.until(lambda view: has_samples(view, 2))
    blocked = gpu(0, utilization_pct=61, blocks="nvmlDeviceGetPowerUsage")
    nvml.change(machine, [blocked, *(gpu(number, utilization_pct=62) for number in range(1, 4))])
    run.until(lambda view: "does not answer" in (run.sample(0).problem or ""))
    run.until(lambda view: run.sample(1).utilization_pct == 62)
    began = time.monotonic()
    assert kernel.home.pool_pid() is not None
    view = run.go()
    assert time.monotonic() - began < 5
    assert view.usage.ranks[0].mean_utilization_pct == pytest.approx(60)


@pytest.mark.slow
def test_nvml_is_closed_when_the_last_run_is_over(kernel: Kernel, machine: dict[str, str], watch: Watch):
    run = watch(f"%%distributed -n 2\n{WAIT}")
    run.until(lambda view: has_samples(view, 2))
    agents = kernel.home.agent_pids()
    assert any(nvml.times_open(machine, pid) for pid in agents)
    run.go()
    eventually(lambda: not any(nvml.times_open(machine, pid) for pid in agents), 10, "NVML closed")


def test_slices_show_memory_and_say_what_is_absent(kernel: Kernel, machine: dict[str, str], watch: Watch):
    nvml.change(machine, [gpu(0, name="NVIDIA H100", slices=SLICES, utilization_pct=80, power_w=300)])
    eventually(lambda: kernel.check("%sgpu_status").text.lower().count("h100-1g.10gb") >= 1, 10, "the pool's view")
    run = watch(f"%%distributed -n 2 --type h100-1g.10gb\n{WAIT}")
    run.until(lambda view: has_samples(view, 2))
    run.until(lambda view: run.sample(1).used_bytes is not None)
    assert [use_text(run.sample(rank)) for rank in range(2)] == ["MIG · 0.1 GB", "MIG · 0.2 GB"]
    lines = detail_lines(run.sample(1))
    assert lines[0] == "device: a MIG slice, MIG-2"
    assert "memory: 0.2 of 10.0 GB" in lines
    assert "GPU: reported for the whole GPU only, not for a MIG slice of it" in lines
    assert run.view.usage.ranks[0].curves()[0].name == "memory"
    view = run.go()
    assert view.usage.busy_pct is None
    assert view.usage.idle_sentences == []


def test_cpu_ranks_show_their_cores_and_memory(kernel: Kernel, watch: Watch):
    code = (
        "%%distributed -n 2 --type cpu\n"
        "import os, time\n"
        "kept = bytearray(200_000_000 if rank == 1 else 0)\n"
        "while not os.path.exists('spin'): time.sleep(0.02)\n"
        "while not os.path.exists('go'):\n"
        "    if rank == 0: time.sleep(0.02)"
    )
    spin = kernel.home.work / "spin"
    run = watch(code)
    try:
        run.until(lambda view: has_samples(view, 2))
        sample = run.sample(1)
        assert (sample.kind, sample.uuid) == ("cpu", "")
        assert " cores · " in use_text(sample)
        assert sample.total_bytes is not None
        assert sample.total_bytes > 1e8
        run.until(lambda view: cores_of(run, 1) < 0.1)
        spin.touch()
        # a busy machine gives it less than a whole one
        run.until(lambda view: cores_of(run, 1) > 0.2 + cores_of(run, 0), 40)
        more = (run.sample(1).rss_bytes or 0) - (run.sample(0).rss_bytes or 0)
        assert more == pytest.approx(200e6, abs=30e6)
        view = run.go()
    finally:
        spin.unlink(missing_ok=True)
    assert view.usage.busy_pct is None
    assert view.usage.idle_sentences == []
    assert [curve.name for curve in view.usage.ranks[1].curves()] == ["CPU", "memory"]


def test_a_short_run_has_no_samples(kernel: Kernel):
    before = set(kernel.home.runs)
    kernel.check("%%distributed -n 2 --ui none\npass")
    view = newest_view(kernel.home, before)
    assert view is not None
    assert view.usage.ranks == {}
