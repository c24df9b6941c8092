"""What runs show of the GPUs that they use, against nvidia-smi."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import real_gpus
from kernels import Kernel
from real_gpus import GB, MIB, number, smi
from watched_runs import WatchedRun

from sgpu_magic.agent.watch.gpus import Gpus
from sgpu_magic.agent.watch.nvml import GpuReading
from sgpu_magic.views.usage import detail_lines, use_text
from sgpu_magic.wire.devices import Device
from sgpu_magic.wire.rank_events import RankSample

pytestmark = pytest.mark.needs_gpu

HOME_VARIABLES = {"SGPU_IDLE_GPU_S": "3"}

# each rank prints its process and keeps its GPU busy until it may go
BUSY = """import os, torch
print('pid', os.getpid(), flush=True)
x = torch.randn(4096, 4096, device=device)
while not os.path.exists('go'):
    for _ in range(20): x = (x @ x).tanh()
    torch.cuda.synchronize()"""
HELD_BYTES = 512 * MIB
HOLDING = f"""import os, time, torch
held = torch.ones({HELD_BYTES}, dtype=torch.uint8, device=device)
torch.cuda.synchronize()
print('pid', os.getpid(), flush=True)
while not os.path.exists('go'): time.sleep(0.02)"""


def ended(run: WatchedRun, go: Callable[[], None]) -> None:
    """Let the run's ranks end."""
    go()
    reply = run.cell.wait(60)
    assert reply.status == "ok", reply.story


def test_the_driver_tells_what_a_gpu_does(gpus: tuple[Device, ...]):
    uuids = [device.uuid for device in gpus]

    async def read() -> dict[str, GpuReading]:
        asked = Gpus()
        asked.hold(uuids)
        loop = asyncio.get_running_loop()
        end = loop.time() + 20
        found: dict[str, GpuReading] = {}
        while len(found) < len(uuids) and loop.time() < end:
            done: asyncio.Future[Any] = loop.create_future()
            asked.read(done.set_result)
            found = dict(await done)
        asked.close()
        return found

    found = asyncio.run(read())
    assert found.keys() == set(uuids)
    for device in gpus:
        reading = found[device.uuid]
        assert reading.problem is None
        assert reading.total_bytes == device.memory_bytes
        assert reading.used_bytes is not None
        if not device.uuid.startswith("MIG-"):
            assert reading.temperature_c is not None
            assert 0 < reading.temperature_c < 120


def test_a_gpu_that_computes_shows_what_nvidia_smi_shows(
    kernel: Kernel, gpus: tuple[Device, ...], go: Callable[[], None]
):
    real_gpus.skip_slices()
    run = WatchedRun(kernel, f"%%distributed -n 1\n{BUSY}")
    run.until_sampled()
    run.until(lambda view: (run.sample().utilization_pct or 0) > 50, what="a busy GPU")
    uuid = run.sample().uuid
    assert uuid in {device.uuid for device in gpus}
    query = "uuid,utilization.gpu,memory.used,power.draw,temperature.gpu"

    def agrees() -> bool:
        (row,) = [row for row in smi(query) if row[0] == uuid]
        return agree(run.sample(), *map(number, row[1:]))

    # the load fluctuates, and the two readings are taken at different moments
    run.until(lambda view: agrees(), 30, f"agreement with nvidia-smi: {smi(query)} and {run.sample()}")
    lines = detail_lines(run.sample())
    assert any(line.startswith("memory: ") for line in lines)
    assert "%" in use_text(run.sample())
    ended(run, go)
    assert (run.view.usage.busy_pct or 0) > 20


def agree(
    sample: RankSample, busy_pct: float | None, used_mib: float | None, watts: float | None, celsius: float | None
) -> bool:
    """Whether a sample shows what nvidia-smi does; None is what that does not know."""
    reported = (sample.utilization_pct, (sample.used_bytes or 0) / MIB, sample.power_w, sample.temperature_c)
    pairs = zip(reported, (busy_pct, used_mib, watts, celsius), (30, 64, 60, 8), strict=True)
    return all((ours is None) if theirs is None else abs((ours or 0) - theirs) <= by for ours, theirs, by in pairs)


def test_the_share_of_the_runs_own_processes(kernel: Kernel, gpus: tuple[Device, ...], go: Callable[[], None]):
    foreign_bytes = int(0.1 * gpus[0].memory_bytes)
    with real_gpus.foreign_process(gpus[0].uuid, foreign_bytes):
        run = WatchedRun(kernel, f"%%distributed -n {len(gpus)} --allow-busy\n{HOLDING}")
        run.until_sampled(len(gpus))
        run.until(lambda view: len(run.pids) == len(gpus), what="the ranks' processes")
        run.until(lambda view: (run.sample().used_bytes or 0) > foreign_bytes + HELD_BYTES, what="what both hold")
        pid = run.pids[0]
        if pid not in real_gpus.smi_processes():
            # in a container, the driver lists the host's pids, which match no process here
            assert run.sample().own_bytes is None
            ended(run, go)
            pytest.skip("the driver lists no process of this machine: the share can't be told, and is not")
        run.until(lambda view: run.sample().own_bytes is not None, what="the share")
        sample = run.sample()
        own, used = sample.own_bytes or 0, sample.used_bytes or 0
        assert HELD_BYTES <= own <= used - foreign_bytes
        assert own / MIB == pytest.approx(real_gpus.smi_processes()[pid], abs=64)
        ended(run, go)
    assert (run.view.usage.ranks[0].peak_own_bytes or 0) >= HELD_BYTES


def test_the_share_of_the_gpus_time(kernel: Kernel, go: Callable[[], None]):
    run = WatchedRun(kernel, f"%%distributed -n 1\n{BUSY}")
    run.until(lambda view: len(run.pids) == 1, what="the rank's process")
    run.until_sampled()
    run.until(lambda view: (run.sample().utilization_pct or 0) > 50, what="a busy GPU")
    if run.pids[0] not in real_gpus.smi_processes() or run.sample().own_utilization_pct is None:
        ended(run, go)
        pytest.skip("the driver does not tell which process keeps the GPU busy")
    run.until(lambda view: (run.sample().own_utilization_pct or 0) > 50, what="the share")
    ended(run, go)


def test_a_gpu_that_does_nothing_stands_out(kernel: Kernel, go: Callable[[], None]):
    real_gpus.skip_slices()
    run = WatchedRun(
        kernel,
        "%%distributed -n 1\nimport os, time, torch\nx = torch.ones(1, device=device)\n"
        "while not os.path.exists('go'):\n    time.sleep(0.5)",
    )
    view = run.until(lambda view: view.usage.idle_sentences, 30, "the sentence about the idle GPU")
    (sentence,) = view.usage.idle_sentences
    assert sentence.startswith("rank 0's GPU has been under 5 % for ")
    assert sentence.endswith(": it waits in time.sleep")
    ended(run, go)


def test_a_rank_that_uses_no_gpu_memory_shows_the_whole_device(kernel: Kernel, go: Callable[[], None]):
    run = WatchedRun(kernel, "%%distributed -n 1\nimport os, time\nwhile not os.path.exists('go'): time.sleep(0.02)")
    run.until_sampled()
    sample = run.sample()
    assert sample.kind == ("mig" if sample.uuid.startswith("MIG-") else "gpu")
    assert (sample.total_bytes or 0) > GB
    assert sample.problem is None
    ended(run, go)
