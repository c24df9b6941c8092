"""This machine's real GPUs as the driver's own tool reports them, and processes that use one beside the pool.

Nothing here makes a CUDA context in the test's own process: the pool would take it for a foreign user of the GPU.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from sgpu_magic.agent.watch.inventory import take_inventory
from sgpu_magic.wire.devices import Device

MIB = 1 << 20
GB = 1_000_000_000
# memory that the driver may keep after its last user, or by which two successive readings may differ
SLACK_BYTES = 200_000_000

_CUDA_FACTS = """
import json, torch, torch.distributed as dist
nccl = dist.is_available() and dist.is_nccl_available()
print(json.dumps([torch.__version__, torch.version.cuda or "", torch.cuda.device_count(), nccl]))
"""
_OCCUPY = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
held.fill_(1)
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""


def devices() -> tuple[Device, ...]:
    """The GPUs, and what they do at this moment, as an agent sees them."""
    return take_inventory(simulate="", cpu_slots=1).devices


@functools.cache
def at_start() -> tuple[Device, ...]:
    """The GPUs as they were before the first test."""
    return devices()


@functools.cache
def why_not(count: int) -> str:
    """Why tests that need `count` GPUs can't run here, "" when they can."""
    found = at_start()
    if not found:
        problem = take_inventory(simulate="", cpu_slots=1).problem
        return "needs a GPU: " + (problem or "the NVIDIA driver lists none on this machine")
    if kinds := sorted({device.type for device in found})[1:]:
        return f"needs GPUs of one type: there are {', '.join([found[0].type, *kinds])}"
    if busy := next((device.outside_use for device in found if device.outside_use), ""):
        return f"needs idle GPUs: {busy}"
    if len(found) < count:
        return f"needs {count} GPUs: there is {len(found)}"
    version, cuda, usable, nccl = _cuda_facts()
    if not cuda:
        return f"needs a torch with CUDA: torch {version} was built without"
    if usable < count:
        return f"needs {count} GPUs that torch can use: torch {version} (CUDA {cuda}) finds {usable}"
    return "" if nccl else f"needs NCCL: torch {version} was built without"


@functools.cache
def _cuda_facts() -> tuple[str, str, int, bool]:
    reported = subprocess.run([sys.executable, "-c", _CUDA_FACTS], env=_environ(), capture_output=True, text=True)
    assert reported.returncode == 0, reported.stderr
    version, cuda, usable, nccl = json.loads(reported.stdout.splitlines()[-1])
    return str(version), str(cuda), int(usable), bool(nccl)


def _environ(**variables: str) -> dict[str, str]:
    """This process's variables without a choice of devices, and `variables`."""
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return kept | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | variables


def skip_slices() -> None:
    """Skip where GPUs are divided: NVML reports little of a slice, and nvidia-smi lists whole GPUs."""
    if any(device.uuid.startswith("MIG-") for device in at_start()):
        pytest.skip("needs whole GPUs: these are MIG slices")


# ---------------------------------------------------------------- nvidia-smi


def smi(query: str, *, of: str = "gpu") -> list[list[str]]:
    """Ask nvidia-smi for `query`, a list of fields with commas between; return the fields of each row.

    Args:
        query: Such as `uuid,memory.used`; sizes come in MiB.
        of: `gpu` or `compute-apps`.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        pytest.skip("needs nvidia-smi")
    command = [tool, f"--query-{of}={query}", "--format=csv,noheader,nounits"]
    reported = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [[field.strip() for field in row.split(",")] for row in reported.stdout.splitlines() if row.strip()]


def number(text: str) -> float | None:
    """A field of nvidia-smi's, None where it says that it does not know."""
    with contextlib.suppress(ValueError):
        return float(text)
    return None


def smi_processes() -> dict[int, float | None]:
    """Memory in MiB of each compute process on any GPU; a container may see pids of its host, or none."""
    rows = smi("pid,used_memory", of="compute-apps")
    return {int(row[0]): number(row[1]) for row in rows if row[0].isdigit()}


# ---------------------------------------------------------------- memory


def used_bytes() -> int:
    """Memory in use on all GPUs together."""
    return sum(device.used_bytes or 0 for device in devices())


def used_at_start() -> int:
    return sum(device.used_bytes or 0 for device in at_start())


def is_free() -> bool:
    """Whether the GPUs hold no more than before the first test."""
    return used_bytes() <= used_at_start() + SLACK_BYTES


# ---------------------------------------------------------------- others that use a GPU


@contextlib.contextmanager
def foreign_process(uuid: str, held_bytes: int) -> Iterator[subprocess.Popen[str]]:
    """A process outside any pool that holds memory of the GPU while the block runs."""
    command = [sys.executable, "-c", _OCCUPY, str(held_bytes)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=_environ(CUDA_VISIBLE_DEVICES=uuid), stdin=pipe, stdout=pipe, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "ready", f"it ended with {process.poll()}"
            yield process
        finally:
            # the process ends at the end of its input
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def script_environ(uuids: Sequence[str]) -> dict[str, str]:
    """The variables of a script that runs beside the pool, on these GPUs."""
    return _environ(CUDA_VISIBLE_DEVICES=",".join(uuids))
