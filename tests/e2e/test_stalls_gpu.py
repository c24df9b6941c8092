"""A GPU that computes is progress. NVML is a stand-in, everything else is real."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import nvml_stub as nvml
import pytest
from kernels import Home, Kernel

from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.wire.rank_events import Stalled

nvml_stub = nvml.nvml_stub

RANK_1_IS_LATE = (
    "%%distributed -n 2 --type a10\n"
    "import os, time, torch, torch.distributed as dist\n"
    "print('up', flush=True)\n"
    "if rank == 1:\n"
    "    while not os.path.exists('changed'): time.sleep(0.02)\n"
    "    time.sleep(3)\n"
    "dist.all_reduce(torch.ones(1))"
)


@pytest.fixture(scope="module")
def machine(nvml_stub: Callable[..., dict[str, str]]) -> dict[str, str]:
    """The variables of a machine with two idle A10s."""
    return nvml_stub(devices=nvml.a10s(2))


@pytest.fixture(scope="module")
def home(machine: dict[str, str]) -> Iterator[Home]:
    made = Home(machine | {"SGPU_STALL_S": "1"})
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize(("busy", "reported"), [(0, 1), (1, 0), (None, 1)], ids=["waiting", "late", "none"])
def test_a_busy_gpu_is_progress_only_where_nobody_waits(
    kernel: Kernel, machine: dict[str, str], busy: int | None, reported: int
):
    # NCCL keeps the GPU of a rank that waits (0) busy
    cell = kernel.start(RANK_1_IS_LATE)
    try:
        cell.until_shown("[1] up")
        gpus = nvml.a10s(2)
        if busy is not None:
            gpus[busy] = nvml.StubGpu(uuid=nvml.gpu_uuid(busy), bus=busy + 1, utilization_pct=97)
        nvml.change(machine, gpus)
        (kernel.home.work / "changed").touch()
        reply = cell.wait(30)
        assert reply.status == "ok", reply.story
    finally:
        nvml.change(machine, nvml.a10s(2))
        (kernel.home.work / "changed").unlink(missing_ok=True)
    newest = max((kernel.home.state / "runs").glob("*/events.msgpack"), key=lambda path: path.stat().st_ctime_ns)
    stalls = [event for event, _ in EventFile(newest.parent).new_events() if isinstance(event.body, Stalled)]
    assert len(stalls) == reported
