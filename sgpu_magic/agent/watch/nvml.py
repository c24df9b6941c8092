"""The interface to NVML, and the only module that imports `pynvml`: the calls in use, absent values, error texts."""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

T = TypeVar("T")
D = TypeVar("D")


class Memory(Protocol):
    total: int
    used: int


class GpuProcess(Protocol):
    """A compute process. `usedGpuMemory` is None if the driver does not provide it, as on Windows."""

    pid: int
    usedGpuMemory: int | None


class ProcessSample(Protocol):
    """A process's share of the GPU's time, 0 to 100, until `timeStamp` (microseconds since the epoch)."""

    pid: int
    timeStamp: int
    smUtil: int


class Nvml(Protocol):
    """The part of `pynvml` (nvidia-ml-py) in use; the module itself has no types."""

    NVMLError: type[Exception]
    NVMLLibraryMismatchError: type[Exception]
    nvmlMemory_v2: int
    NVML_TEMPERATURE_GPU: int

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> object: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object: ...
    def nvmlDeviceGetPciInfo(self, handle: object) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: object) -> str: ...
    def nvmlDeviceGetName(self, handle: object) -> str: ...
    def nvmlDeviceGetMemoryInfo(self, handle: object, version: int | None = None) -> Memory: ...
    def nvmlDeviceGetUtilizationRates(self, handle: object) -> Any: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> Sequence[GpuProcess]: ...
    def nvmlDeviceGetProcessUtilization(self, handle: object, since_us: int) -> Sequence[ProcessSample]: ...
    def nvmlDeviceGetPowerUsage(self, handle: object) -> int: ...
    def nvmlDeviceGetTemperature(self, handle: object, sensor: int) -> int: ...
    def nvmlDeviceGetTemperatureV(self, handle: object, sensor: int) -> int: ...
    def nvmlDeviceGetMigMode(self, handle: object) -> Sequence[int]: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: object) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: object, index: int) -> object: ...


class Code(enum.IntEnum):
    """Return codes of NVML, nvmlReturn_t in nvml.h."""

    UNINITIALIZED = 1
    NO_PERMISSION = 4
    NOT_FOUND = 6
    DRIVER_NOT_LOADED = 9
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18


def open_nvml() -> Nvml:
    """Load and initialize NVML, which counts its initializations. The caller must call `close_nvml`.

    Raises:
        NVMLError: NVML can't be opened (`open_problem` says why).
    """
    import pynvml

    nvml = cast(Nvml, pynvml)
    nvml.nvmlInit()
    return nvml


def close_nvml(nvml: Nvml) -> None:
    """Shut NVML down: while it is open, an administrator can't reset a GPU."""
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlShutdown()


def nvml_error() -> type[Exception]:
    """Return NVML's exception class."""
    import pynvml

    return cast(Nvml, pynvml).NVMLError


# ---------------------------------------------------------------- values that may be absent


def told(nvml: Nvml, ask: Callable[[], T], default: D) -> T | D:
    """Return NVML's answer, or `default` if this value is not available.

    Raises:
        NVMLError: The device or the driver is gone.
    """
    try:
        return ask()
    except nvml.NVMLError as error:
        raise_if_lost(error)
        return default


def memory(nvml: Nvml, handle: object) -> tuple[int, int | None]:
    """Return (total, used) in bytes. Version 2 excludes the driver's own share, over 5 % on small GPUs.

    Raises:
        NVMLError: The device or the driver is gone.
    """
    for version in (nvml.nvmlMemory_v2, None):
        found = told(nvml, functools.partial(nvml.nvmlDeviceGetMemoryInfo, handle, version), None)
        if found is not None:
            return int(found.total), int(found.used)
    return 0, None


def utilization(nvml: Nvml, handle: object) -> int | None:
    """Return a GPU's recent utilization, 0 to 100; None if not available, as on MIG slices.

    Raises:
        NVMLError: The device or the driver is gone.
    """
    return told(nvml, lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu), None)


# ---------------------------------------------------------------- NVML's errors


def code_of(error: BaseException) -> int:
    """Return NVML's return code of an error, 0 for other errors."""
    return int(getattr(error, "value", 0))


def raise_if_lost(error: BaseException) -> None:
    """Raise `error` if the device or the driver is gone. Other errors only mean that one value is not available."""
    if code_of(error) in {
        Code.UNINITIALIZED,
        Code.DRIVER_NOT_LOADED,
        Code.GPU_IS_LOST,
        Code.RESET_REQUIRED,
        Code.LIB_RM_VERSION_MISMATCH,
    }:
        raise error


def open_problem(code: int) -> str:
    """Return why NVML can't be opened, "" on machines without GPUs."""
    if code == Code.LIBRARY_NOT_FOUND:
        return ""
    # container images often contain the library on machines without a GPU
    if code == Code.DRIVER_NOT_LOADED and not _has_nvidia_hardware():
        return ""
    return problem_text("the GPUs can't be listed", code)


def _has_nvidia_hardware() -> bool:
    for vendor in Path("/sys/bus/pci/devices").glob("*/vendor"):
        with contextlib.suppress(OSError):
            if vendor.read_text().strip() == "0x10de":
                return True
    return False


_REASONS: dict[int, tuple[str, str]] = {
    Code.DRIVER_NOT_LOADED: ("the NVIDIA driver is not loaded", "load it with `modprobe nvidia`, or reboot"),
    Code.FUNCTION_NOT_FOUND: (
        "the NVIDIA driver is older than the package nvidia-ml-py expects",
        "update the driver, or install an older nvidia-ml-py",
    ),
    Code.GPU_IS_LOST: (
        "it has fallen off the bus",
        "reset it with `nvidia-smi --gpu-reset` or reboot, and check `dmesg`",
    ),
    Code.LIB_RM_VERSION_MISMATCH: (
        "the NVIDIA driver and its library have different versions, as after an update",
        "reboot, or reload the driver",
    ),
    Code.NO_PERMISSION: (
        "this user has no permission to open them",
        "ask the administrator for access to /dev/nvidia*",
    ),
    Code.RESET_REQUIRED: ("it must be reset", "run `nvidia-smi --gpu-reset` or reboot"),
}


def problem_text(what: str, code: int) -> str:
    """Return one sentence with what fails, why, and the remedy."""
    reason, remedy = reason_and_remedy(code)
    return f"{what[:1].upper()}{what[1:]}: {reason}; {remedy}."


def reason_and_remedy(code: int) -> tuple[str, str]:
    """Return why NVML fails, such as `it has fallen off the bus`, and what to do."""
    return _REASONS.get(code, (f"NVML returned error {code}", "see the output of `nvidia-smi`"))
