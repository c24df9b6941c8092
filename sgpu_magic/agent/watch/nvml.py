"""The interface to NVML: the calls in use, absent values, error texts, and the readings of a GPU.

The only module that imports `pynvml`.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
D = TypeVar("D")


Nvml = Any
"""The module `pynvml` (nvidia-ml-py), which has no types."""

# time span of the first query for processes' utilization
_FIRST_SPAN_S = 1.5


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
        NVMLError: NVML can't be opened.
    """
    import pynvml

    nvml: Nvml = pynvml
    nvml.nvmlInit()
    return nvml


def close_nvml(nvml: Nvml) -> None:
    """Shut NVML down: while it is open, an administrator can't reset a GPU."""
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlShutdown()


def nvml_error() -> type[Exception]:
    """Return NVML's exception class."""
    import pynvml

    nvml: Nvml = pynvml
    return nvml.NVMLError


# ---------------------------------------------------------------- values that may be absent


def value_or(nvml: Nvml, ask: Callable[[], T], default: D) -> T | D:
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
        found = value_or(nvml, functools.partial(nvml.nvmlDeviceGetMemoryInfo, handle, version), None)
        if found is not None:
            return int(found.total), int(found.used)
    return 0, None


def utilization(nvml: Nvml, handle: object) -> int | None:
    """Return a GPU's recent utilization, 0 to 100; None if not available, as on MIG slices.

    Raises:
        NVMLError: The device or the driver is gone.
    """
    return value_or(nvml, lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu), None)


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


def reason_and_remedy(code: int) -> tuple[str, str]:
    """Return why NVML fails, such as `it has fallen off the bus`, and what to do."""
    return _REASONS.get(code, (f"NVML returned error {code}", "see the output of `nvidia-smi`"))


# ---------------------------------------------------------------- a GPU of a run


_LOST = {Code.GPU_IS_LOST, Code.RESET_REQUIRED}


class GpuReading(msgspec.Struct, frozen=True):
    """A reading of a GPU or MIG slice. None means that the value is not available.

    Args:
        utilization_pct: Recent utilization, 0 to 100.
        used_bytes: Memory in use.
        total_bytes: Total memory.
        power_w: Power draw in watts.
        temperature_c: Temperature in degrees Celsius.
        process_bytes: Memory by process; in a container the pids may be the host's.
        process_pct: Utilization by process since the previous reading; None if not available.
        problem: Why it can't be read and what to do, "" if it can.
        lost: Whether it is unusable until it is reset.
    """

    utilization_pct: int | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    power_w: int | None = None
    temperature_c: int | None = None
    process_bytes: Mapping[int, int] = msgspec.field(default_factory=dict[int, int])
    process_pct: Mapping[int, float] | None = None
    problem: str | None = None
    lost: bool = False


class GpuReader:
    """Reads GPUs by UUID, from any thread, but each device from one thread at a time. NVML stays open until `close`.

    Attributes:
        opened_at: When NVML was opened, seconds of the monotonic clock; None before.
        calls: When the pending reads were started, by UUID.
    """

    def __init__(self) -> None:
        self.opened_at: float | None = None
        self.calls: dict[str, float] = {}
        self._nvml: Nvml | None = None
        self._opening = threading.Lock()
        self._handles: dict[str, object] = {}
        self._seen_us: dict[str, int] = {}

    def read(self, uuid: str) -> GpuReading:
        """Read all values of a GPU. Blocks as long as the driver does."""
        failed = nvml_error()
        try:
            nvml = self._open()
            if uuid not in self._handles:
                self._handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid)
            return self._read(nvml, uuid, self._handles[uuid])
        except failed as error:
            self._handles.pop(uuid, None)
            return _failed(code_of(error))

    def _open(self) -> Nvml:
        """Open NVML if necessary; takes seconds if the driver's persistence mode is off."""
        with self._opening:
            if self._nvml is None:
                self._nvml = open_nvml()
                self.opened_at = time.monotonic()
            return self._nvml

    def close(self) -> None:
        """Close NVML."""
        if self._nvml is not None:
            close_nvml(self._nvml)
            self._nvml = None
        self._handles = {}

    def _read(self, nvml: Nvml, uuid: str, handle: object) -> GpuReading:
        total, used = memory(nvml, handle)
        process_bytes = self._process_bytes(nvml, handle)
        if uuid.startswith("MIG-"):
            # other values exist only for the whole GPU, whose other slices may belong to other users
            return GpuReading(used_bytes=used, total_bytes=total or None, process_bytes=process_bytes)
        return GpuReading(
            utilization_pct=utilization(nvml, handle),
            used_bytes=used,
            total_bytes=total or None,
            power_w=value_or(nvml, lambda: round(nvml.nvmlDeviceGetPowerUsage(handle) / 1000), None),
            temperature_c=self._temperature_c(nvml, handle),
            process_bytes=process_bytes,
            process_pct=self._process_pct(nvml, uuid, handle),
        )

    def _process_bytes(self, nvml: Nvml, handle: object) -> dict[int, int]:
        # a process with several contexts is listed several times
        found: dict[int, int] = {}
        for process in value_or(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle), ()):
            if process.usedGpuMemory is not None:
                found[process.pid] = found.get(process.pid, 0) + process.usedGpuMemory
        return found

    def _process_pct(self, nvml: Nvml, uuid: str, handle: object) -> dict[int, float] | None:
        since = self._seen_us.get(uuid) or int((time.time() - _FIRST_SPAN_S) * 1e6)
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(handle, since)
        except nvml.NVMLError as error:
            raise_if_lost(error)
            # no process has used the GPU since, or (code 0) there is no process
            return {} if code_of(error) in (0, Code.NOT_FOUND) else None
        by_process: dict[int, list[int]] = {}
        for sample in samples:
            # drivers leave some list entries unfilled
            if sample.pid and sample.timeStamp > since and sample.smUtil <= 100:
                by_process.setdefault(sample.pid, []).append(sample.smUtil)
                self._seen_us[uuid] = max(self._seen_us.get(uuid, 0), sample.timeStamp)
        return {pid: sum(values) / len(values) for pid, values in by_process.items()}

    def _temperature_c(self, nvml: Nvml, handle: object) -> int | None:
        # future drivers will have only the second call, current ones may have only the first
        for ask in (nvml.nvmlDeviceGetTemperature, nvml.nvmlDeviceGetTemperatureV):
            try:
                return int(ask(handle, nvml.NVML_TEMPERATURE_GPU))
            except nvml.NVMLError as error:
                raise_if_lost(error)
                if code_of(error) != Code.FUNCTION_NOT_FOUND:
                    return None
        return None


def _failed(code: int) -> GpuReading:
    reason, remedy = reason_and_remedy(code)
    return GpuReading(problem=f"it can't be read: {reason}; {remedy}", lost=code in _LOST)
