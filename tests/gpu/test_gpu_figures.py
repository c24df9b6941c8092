"""How long things take on a GPU, beside torchrun and accelerate: the rows of tests/benchmarks/GPU.md.

Nothing is held against a limit here. A row that could not be measured fails its test, and the file stays as it was.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import real_gpus
from driver_errors import ENDLESS_KERNEL
from figures import Figure, Figures
from kernels import Home, Kernel, eventually
from peer_scripts import ALL_REDUCE, FIRST_KERNEL, TRAINING, Scripts, has_accelerate

from sgpu_magic.wire.devices import Device
from tests.benchmarks.measure import Series, collect

pytestmark = [pytest.mark.needs_gpu, pytest.mark.slow, pytest.mark.timeout(900)]

RUNS = 10
PEER_RUNS = 3
COLD_RUNS = 3
PAIRS = 5
TENSOR_BYTES = 1 << 30

# seconds from the magic's call to the moment that the rank recorded
SINCE = "moment - began"


@pytest.fixture
def all_scripts(tmp_path: Path, gpus: tuple[Device, ...]) -> Scripts:
    """Starts a rank on each GPU."""
    return Scripts(tmp_path, [gpu.uuid for gpu in gpus])


def cell_s(kernel: Kernel, options: str, body: str) -> float:
    """Seconds from the magic's call until `moment`, a time that rank 0 has taken, as the notebook's clock shows it."""
    line = f"{options} --ui none --out moment"
    kernel.check(
        f"import time\nbegan = time.time()\nget_ipython().run_cell_magic('distributed', {line!r}, {body!r})", 120
    )
    return kernel.value(SINCE)


def rested(home: Home) -> None:
    """Wait as a person does between two cells: until the next group stands by."""
    eventually(home.standby_pids, 20, "a group stands by")


def peers_of(measure: Callable[[str], Callable[[], float]], count: int = PEER_RUNS) -> list[Series]:
    """The series of each peer that is there."""
    names = ["torchrun", *(["accelerate"] if has_accelerate() else [])]
    return [collect(name, measure(name), count) for name in names]


def started_to_moment(scripts: Scripts, body: str, *, group: bool) -> Callable[[str], Callable[[], float]]:
    """For `peers_of`: seconds from the launcher's start until the script's moment."""

    def of(name: str) -> Callable[[], float]:
        def sample() -> float:
            began, moment = getattr(scripts, name)(body, group=group)
            return moment - began

        return sample

    return of


@pytest.fixture(scope="module")
def first_kernel_of_peers(tmp_path_factory: pytest.TempPathFactory, gpus: tuple[Device, ...]) -> list[Series]:
    """Measured once for the four rows that they stand beside."""
    scripts = Scripts(tmp_path_factory.mktemp("first"), [gpus[0].uuid])
    return peers_of(started_to_moment(scripts, FIRST_KERNEL, group=False))


# ---------------------------------------------------------------- from a submit to the first kernel


def test_first_kernel_of_a_cold_pool(
    new_home: Callable[..., Home], figures: Figures, first_kernel_of_peers: list[Series]
):
    def sample() -> float:
        kernel = Kernel(new_home(), load=False)
        try:
            kernel.check("%load_ext sgpu_magic")
            return cell_s(kernel, "-n 1", FIRST_KERNEL)
        finally:
            kernel.close()

    series = collect("ours", sample, COLD_RUNS)
    note = (
        "From the call of `%%distributed` right after `%load_ext`, no pool running, until a kernel on the GPU is done. "
        "The peers' time is from the launcher's start, without a process group."
    )
    figures.add(
        "first kernel, cold", Figure("submit to first CUDA kernel, no pool yet", [series], first_kernel_of_peers, note)
    )
    assert series.values


@pytest.mark.parametrize(("name", "standby"), [("no standby", "0"), ("standby", "1")])
def test_first_kernel_of_a_run(
    new_home: Callable[..., Home], figures: Figures, first_kernel_of_peers: list[Series], name: str, standby: str
):
    home = new_home({"SGPU_STANDBY": standby})
    kernel = Kernel(home)
    try:
        cell_s(kernel, "-n 1", FIRST_KERNEL)

        def sample() -> float:
            if standby == "1":
                rested(home)
            return cell_s(kernel, "-n 1", FIRST_KERNEL)

        series = collect("ours", sample, RUNS)
    finally:
        kernel.close()
    note = "A warm pool; the rank makes its CUDA context, and joins NCCL and gloo, within this time."
    work = f"submit to first CUDA kernel, {'from a standby group' if standby == '1' else 'without a standby group'}"
    figures.add(f"first kernel, {name}", Figure(work, [series], first_kernel_of_peers, note))
    assert len(series.values) == RUNS


def test_first_kernel_in_a_session(session: Kernel, figures: Figures, first_kernel_of_peers: list[Series]):
    cell_s(session, "", FIRST_KERNEL)
    in_session = collect("in its ranks", lambda: cell_s(session, "", FIRST_KERNEL), RUNS)

    def fresh() -> float:
        # once the memory in use is stable, the next group has its context
        _settled(real_gpus.used_bytes)
        return cell_s(session, "--fresh", FIRST_KERNEL)

    fresh()
    beside = collect("`--fresh`", fresh, RUNS)
    note = "The session's ranks have their context; so has the group that stands by for `--fresh`."
    figures.add(
        "first kernel, session",
        Figure("submit to first CUDA kernel in a session", [in_session, beside], first_kernel_of_peers, note),
    )
    assert len(in_session.values) == len(beside.values) == RUNS


# ---------------------------------------------------------------- collectives, training, tensors


def test_all_reduce(kernel: Kernel, home: Home, figures: Figures, all_scripts: Scripts, gpus: tuple[Device, ...]):
    options = f"-n {len(gpus)}"
    cell_s(kernel, options, ALL_REDUCE)

    def sample() -> float:
        rested(home)
        return cell_s(kernel, options, ALL_REDUCE)

    series = collect("ours", sample, RUNS)
    peers = peers_of(started_to_moment(all_scripts, ALL_REDUCE, group=True))
    note = "NCCL makes its communicator within this time, on each side. 4 MiB are reduced."
    figures.add("all_reduce", Figure(f"submit to first all_reduce over {len(gpus)} GPU(s)", [series], peers, note))
    assert len(series.values) == RUNS


def test_training_loop(kernel: Kernel, figures: Figures, all_scripts: Scripts, gpus: tuple[Device, ...]):
    """The loop alone, in the same text; pairs whose order changes."""
    options = f"-n {len(gpus)} --ui none --out moment"
    ours: list[float] = []
    theirs: dict[str, list[float]] = {"torchrun": []} | ({"accelerate": []} if has_accelerate() else {})

    def measure_ours() -> None:
        kernel.check(f"get_ipython().run_cell_magic('distributed', {options!r}, {TRAINING!r})", 180)
        ours.append(kernel.value("moment"))

    def measure_theirs() -> None:
        for name, values in theirs.items():
            values.append(getattr(all_scripts, name)(TRAINING)[1])

    for pair in range(PAIRS):
        for turn in (measure_ours, measure_theirs) if pair % 2 == 0 else (measure_theirs, measure_ours):
            turn()
    note = f"300 steps of DDP in bfloat16, 4 layers of 2,048, batch 512 on each GPU; only the loop, in {PAIRS} pairs."
    peers = [Series(name, tuple(values)) for name, values in theirs.items()]
    figures.add(
        "training loop", Figure(f"training loop on {len(gpus)} GPU(s)", [Series("ours", tuple(ours))], peers, note)
    )


def test_a_tensor_there_and_back(session: Kernel, figures: Figures):
    count = TENSOR_BYTES // 4
    # one thread: torch's others would stay in the kernel
    session.check(f"import torch\ntorch.set_num_threads(1)\nsent = torch.ones({count})", 60)
    there = "import time, torch\nx = sent.to(device)\ntorch.cuda.synchronize()\nmoment = time.time()"

    def send() -> float:
        # a changed tensor is sent again
        session.check("sent += 1", 60)
        return cell_s(session, "", there)

    def fetch() -> float:
        session.check(
            "import time\nbegan = time.time()\nget_ipython().run_line_magic('sgpu_pull', 'back')\nmoment = time.time()",
            120,
        )
        return session.value(SINCE)

    to_gpu = collect("notebook to GPU", send, 5)
    session.check("%%distributed\nback = (x * 2).cpu()", 60)
    from_gpu = collect("rank's memory to notebook", fetch, 5)
    session.check("del sent, back")
    note = "1 GiB of float32 in a session: captured and copied to the GPU; pulled from the rank's memory."
    figures.add("tensor there and back", Figure("a tensor of 1 GiB", [to_gpu, from_gpu], (), note))
    assert to_gpu.values
    assert from_gpu.values


# ---------------------------------------------------------------- memory, and after a kill


def test_idle_memory(new_home: Callable[..., Home], figures: Figures):
    """What waiting groups cost: on the GPU, and of the machine's memory."""
    home = new_home()
    kernel = Kernel(home)
    try:
        before = real_gpus.used_bytes()
        kernel.check(f"%%distributed -n 1 --ui none\n{FIRST_KERNEL}", 120)
        pids = eventually(home.standby_pids, 20, "a group stands by")
        eventually(real_gpus.is_free, 30, "only what was in use before", poll_s=0.2)
        for_runs = _mb(real_gpus.used_bytes() - before)
        own = own_mb(pids[0])
    finally:
        kernel.close()
    with_session = {standby: _session_mb(new_home, standby) for standby in ("0", "1")}
    rank = Series("a session's idle rank, GPU", (with_session["0"],), unit="MB")
    standby = Series("a session's standby rank, GPU", (with_session["1"] - with_session["0"],), unit="MB")
    series = [
        Series("a run's standby rank, GPU", (max(for_runs, 0.0),), unit="MB"),
        Series("the same, its own memory", (own,), unit="MB"),
        rank,
        standby,
    ]
    note = "On the GPU: what the driver counts beyond what was in use before. Own memory: private pages of the process."
    figures.add("idle memory", Figure("memory of idle ranks, each", series, (), note))


def _session_mb(new_home: Callable[..., Home], standby: str) -> float:
    """Memory on the GPU of a session of one idle rank, and of the group that stands by for it, in MB."""
    home = new_home({"SGPU_STANDBY": standby})
    kernel = Kernel(home)
    try:
        before = real_gpus.used_bytes()
        kernel.check("s = %sgpu_connect -n 1\ns.wait(60)", 120)
        kernel.check("%%distributed --out own\nimport os\nown = os.getpid()", 60)
        if standby == "1":
            kernel.check(f"%%distributed --fresh --ui none\n{FIRST_KERNEL}", 60)
            # it has taken its place in the notebook's directory, as a rank does
            eventually(lambda: len(home.rank_pids()) == 2, 20, "a group stands by")
        return _mb(_settled(real_gpus.used_bytes) - before)
    finally:
        kernel.close()
        eventually(real_gpus.is_free, 30, "it is given back", poll_s=0.2)


def _settled(read: Callable[[], int]) -> int:
    """A number that was the same ten times in a row, 0.3 s apart."""
    seen = [read()]

    def same() -> bool:
        seen.append(read())
        return len(seen) > 10 and len(set(seen[-10:])) == 1

    eventually(same, 60, lambda: f"it does not settle: {seen[-10:]}", poll_s=0.3)
    return seen[-1]


def _mb(count: int) -> float:
    return count / 1e6


def own_mb(pid: int) -> float:
    """Private pages of a process, in MB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(kb) for kb in re.findall(r"^Private_(?:Clean|Dirty):\s+(\d+) kB", text, re.MULTILINE)) * 1024 / 1e6


def test_after_a_kill(kernel: Kernel, figures: Figures):
    def sample() -> float:
        cell = kernel.start(f"%%distributed -n 1\n{ENDLESS_KERNEL}")
        cell.until_shown("pid ", 60)
        found = re.search(r"pid (\d+)", cell.reply.text)
        assert found
        struck = time.time()
        os.kill(int(found[1]), signal.SIGKILL)
        assert cell.wait(60).ename == "WorkerDied", cell.reply.story
        cell_s(kernel, "-n 1", FIRST_KERNEL)
        return kernel.value("moment") - struck

    series = collect("ours", sample, 5)
    note = "From SIGKILL of a rank within an endless kernel to the next run's first kernel, its error shown between."
    figures.add("after a kill", Figure("a rank killed in a kernel: until the next run computes", [series], (), note))
    assert len(series.values) == 5
