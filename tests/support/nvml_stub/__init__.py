"""Simulated GPUs: a stand-in for NVML's library, for processes that a test starts.

The loader reads LD_LIBRARY_PATH when a process starts, so the stub serves children, never the test itself:

    import nvml_stub as nvml

    nvml_stub = nvml.nvml_stub  # the fixture

    def test_four(nvml_stub):
        environ = os.environ | nvml_stub(devices=nvml.a10s(4))
        subprocess.run([...], env=environ)
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml_stub.c")

A10_BYTES = 23028 << 20
LIBRARY_MISMATCH = {"nvmlDeviceGetComputeRunningProcesses_v3": 13}
"""For `failures`: a driver older than nvidia-ml-py."""


@dataclass(frozen=True)
class StubProcess:
    """A compute process as NVML lists it."""

    pid: int
    used_bytes: int = 0


@dataclass(frozen=True)
class StubSlice:
    """A MIG slice. `power_w` is the whole GPU's power as the slice reports it, None if it reports none."""

    uuid: str
    name: str
    memory_bytes: int
    used_bytes: int = 0
    processes: Sequence[StubProcess] = ()
    power_w: float | None = None


@dataclass(frozen=True)
class StubGpu:
    """A GPU.

    Args:
        uuid: NVML's UUID.
        bus: Its PCI bus number; NVML's order is that of the description instead.
        used_bytes: Memory in use, without `reserved_bytes`, which the driver reserves.
        utilization_pct: None answers "not supported"; likewise `power_w`, `temperature_c` and `uses`.
        uses: The share of GPU time of each process: (pid, per cent).
        slices: The slices of a GPU in MIG mode; None if it has no such mode.
        error: Code of nvmlReturn_t that every query of the device returns; 0 if it works.
        blocks: NVML function that does not return for this device, "" for none.
        links: To other GPUs: (UUID, NVML's level of their common ancestor, whether NVLink connects them); each link is
            given on one of its ends.
    """

    uuid: str
    name: str = "NVIDIA A10"
    bus: int = 1
    memory_bytes: int = A10_BYTES
    used_bytes: int = 0
    reserved_bytes: int = 300 << 20
    utilization_pct: int | None = 0
    processes: Sequence[StubProcess] = ()
    slices: Sequence[StubSlice] | None = None
    error: int = 0
    power_w: float | None = None
    temperature_c: int | None = None
    uses: Sequence[tuple[int, int]] | None = None
    blocks: str = ""
    links: Sequence[tuple[str, int, bool]] = ()


def a10s(count: int) -> list[StubGpu]:
    """Idle A10s with the UUIDs `GPU-00000000-0000-0000-0000-00000000000N`, N from 0."""
    return [StubGpu(uuid=gpu_uuid(number), bus=number + 1) for number in range(count)]


def gpu_uuid(number: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{number:012d}"


def describe(devices: Sequence[StubGpu], failures: Mapping[str, int] | None = None) -> str:
    """Return the description that the library reads; its format is at the top of nvml_stub.c."""
    rows: list[tuple[object, ...]] = [("fail", function, code) for function, code in (failures or {}).items()]
    for gpu in devices:
        utilization = -1 if gpu.utilization_pct is None else gpu.utilization_pct
        sizes = (gpu.memory_bytes, gpu.used_bytes, gpu.reserved_bytes)
        mig = -1 if gpu.slices is None else 1
        rows.append(("gpu", gpu.uuid, gpu.name, gpu.bus, *sizes, utilization, mig, gpu.error))
        rows += [("process", process.pid, process.used_bytes) for process in gpu.processes]
        rows += [] if gpu.power_w is None else [("power", round(gpu.power_w * 1000))]
        rows += [] if gpu.temperature_c is None else [("heat", gpu.temperature_c)]
        rows += [] if gpu.uses is None else [("uses",), *(("use", *use) for use in gpu.uses)]
        rows += [("block", gpu.blocks, gpu.uuid)] if gpu.blocks else []
        rows += [("link", gpu.uuid, other, level, int(nvlink)) for other, level, nvlink in gpu.links]
        for part in gpu.slices or ():
            rows.append(("slice", part.uuid, part.name, part.memory_bytes, part.used_bytes))
            rows += [("process", process.pid, process.used_bytes) for process in part.processes]
            rows += [] if part.power_w is None else [("power", round(part.power_w * 1000))]
    return "".join("\t".join(map(str, row)) + "\n" for row in rows)


def change(environ: Mapping[str, str], devices: Sequence[StubGpu], failures: Mapping[str, int] | None = None) -> None:
    """Replace the devices of a stubbed machine; running processes see the new ones at their next query."""
    file = Path(environ["SGPU_TEST_NVML"])
    new = file.with_suffix(".new")
    new.write_text(describe(devices, failures))
    os.replace(new, file)


def times_open(environ: Mapping[str, str], pid: int) -> int:
    """Return how often a process has NVML open now."""
    try:
        return int(Path(f"{environ['SGPU_TEST_NVML']}.{pid}.open").read_text() or 0)
    except FileNotFoundError:
        return 0


class NvmlStub:
    """Makes stubbed machines. The first one compiles the library.

    Args:
        directory: An empty directory for the library and the descriptions.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._machines = 0

    def __call__(
        self, devices: Sequence[StubGpu] | None = None, *, failures: Mapping[str, int] | None = None
    ) -> dict[str, str]:
        """Return the environment variables that make a process see these devices.

        Args:
            devices: The devices; four idle A10s if left out.
            failures: The error code that an NVML function always returns, by function name.
        """
        library = self._directory / "libnvidia-ml.so.1"
        if not library.exists():
            compile_stub(library)
        self._machines += 1
        environ = {
            "LD_LIBRARY_PATH": os.pathsep.join(
                filter(None, [str(self._directory), os.environ.get("LD_LIBRARY_PATH", "")])
            ),
            # these GPUs can't compute
            "SGPU_STAND_IN": "cpu",
            "SGPU_TEST_NVML": str(self._directory / f"machine-{self._machines}.txt"),
        }
        change(environ, a10s(4) if devices is None else devices, failures)
        return environ


def compile_stub(library: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler to build the stand-in for NVML")
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run([compiler, *options, "-o", str(library), str(SOURCE)], check=True)


@pytest.fixture(scope="session")
def nvml_stub(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """Provide `nvml_stub(devices=..., failures=...)`, which returns the environment of a machine with these GPUs."""
    return NvmlStub(tmp_path_factory.mktemp("nvml"))
