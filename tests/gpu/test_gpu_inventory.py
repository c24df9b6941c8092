"""What the pool knows of the machine's GPUs, against nvidia-smi, and GPUs that others use."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import real_gpus
from kernels import Home, Kernel, eventually
from real_gpus import MIB

from sgpu_magic.agent.watch.inventory import BUSY_MEMORY_SHARE
from sgpu_magic.wire.devices import Device

pytestmark = pytest.mark.needs_gpu


def test_the_inventory_is_what_nvidia_smi_lists(gpus: tuple[Device, ...]):
    real_gpus.skip_slices()
    listed = sorted(real_gpus.smi("pci.bus_id,uuid,name,memory.total"))
    assert [(device.uuid, device.name) for device in gpus] == [(row[1], row[2]) for row in listed]
    for device, row in zip(gpus, listed, strict=True):
        assert device.memory_bytes / MIB == pytest.approx(float(row[3]), abs=1)
        assert device.used_bytes is not None
        assert not device.simulated
    assert [device.index for device in gpus] == list(range(len(gpus)))


def test_status_lists_them(kernel: Kernel, gpus: tuple[Device, ...]):
    reply = kernel.check("%sgpu_status")
    assert gpus[0].type.upper() in reply.text.upper()
    assert "simulated" not in reply.text
    assert "in use outside the pool" not in reply.text


def test_doctor_finds_that_torch_can_use_them(home: Home, gpus: tuple[Device, ...]):
    command = [sys.executable, "-m", "sgpu_magic.cli", "doctor"]
    reported = subprocess.run(command, env=home.environ, capture_output=True, text=True, timeout=120)
    lines = [" ".join(line.split()) for line in reported.stdout.splitlines()]
    assert any(re.fullmatch(rf"ok gpu {len(gpus)} devices?: .*{re.escape(gpus[0].name)}.*", line) for line in lines)
    assert any(re.fullmatch(r"ok torch and gpu built for CUDA [\d.]+, with NCCL", line) for line in lines), (
        reported.stdout
    )


# ---------------------------------------------------------------- in use outside the pool


def held_by_others(gpus: tuple[Device, ...]) -> int:
    """Bytes that count as use by others, even where the driver does not show the process that holds them."""
    return int((BUSY_MEMORY_SHARE + 0.02) * gpus[0].memory_bytes)


def test_a_gpu_that_another_program_uses_is_not_leased(kernel: Kernel, gpus: tuple[Device, ...]):
    every = len(gpus)
    with real_gpus.foreign_process(gpus[0].uuid, held_by_others(gpus)) as foreign:
        eventually(lambda: "in use outside the pool" in kernel.check("%sgpu_status").text, 15, "the pool's view")
        reply = kernel.run(f"%%distributed -n {every} --wait 0\n1")
        assert (reply.status, reply.ename) == ("error", "CapacityError"), reply.story
        assert "--allow-busy" in reply.evalue
        if foreign.pid in real_gpus.smi_processes():
            assert f"process {foreign.pid}" in reply.evalue
        # the remedy that the error names
        body = "import torch\nprint(torch.ones(1, device=device).device)"
        allowed = kernel.check(f"%%distributed -n {every} --allow-busy\n{body}", 60)
        assert allowed.lines(0) == ["cuda:0"]
        assert foreign.poll() is None
    eventually(lambda: "in use outside the pool" not in kernel.check("%sgpu_status").text, 15, "the pool's view")


def test_a_run_waits_for_a_gpu_that_comes_free(kernel: Kernel, gpus: tuple[Device, ...]):
    with real_gpus.foreign_process(gpus[0].uuid, held_by_others(gpus)):
        eventually(lambda: "in use outside the pool" in kernel.check("%sgpu_status").text, 15, "the pool's view")
        cell = kernel.start(f"%%distributed -n {len(gpus)}\nprint('began')")
        cell.until_shown("in use outside the pool", 15)
        assert "began" not in cell.reply.text
    reply = cell.wait(60)
    assert reply.status == "ok", reply.story
    assert reply.lines(0) == ["began"]


def test_a_run_follows_at_once_on_the_gpus_of_the_one_before(kernel: Kernel, gpus: tuple[Device, ...]):
    """Its ranks may still be leaving, and the driver may still list them: no foreign use."""
    for _ in range(5):
        kernel.check(f"%%distributed -n {len(gpus)} --wait 0 --ui none\nimport torch\ntorch.ones(1, device=device)")


def test_a_notebook_that_uses_the_gpu_itself_is_told_so(cuda_kernel: Kernel, gpus: tuple[Device, ...]):
    cuda_kernel.check("import torch\nx = torch.ones(1, device='cuda')", 120)
    if cuda_kernel.pid not in real_gpus.smi_processes():
        pytest.skip("needs a driver that lists the processes of this machine: here it lists others' or none")
    eventually(lambda: "in use outside the pool" in cuda_kernel.check("%sgpu_status").text, 15, "the pool's view")
    reply = cuda_kernel.run(f"%%distributed -n {len(gpus)} --wait 0\n1")
    assert (reply.status, reply.ename) == ("error", "CapacityError"), reply.story
    assert re.search(rf"process {cuda_kernel.pid} of user \S+, a notebook's kernel, uses it", reply.evalue)
    assert "--allow-busy" in reply.evalue
    cuda_kernel.check(f"%%distributed -n {len(gpus)} --allow-busy\nassert x.device == device")
