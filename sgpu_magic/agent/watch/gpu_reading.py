"""What one GPU does at a moment, read through NVML in one thread. Nothing here touches the agent's loop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from sgpu_magic.agent.watch.nvml import (
    Code,
    Nvml,
    close_nvml,
    code_of,
    memory,
    nvml_error,
    open_nvml,
    raise_if_lost,
    reason_and_remedy,
    utilization,
)

# the first time a GPU is asked what its processes did
_FIRST_SPAN_S = 1.5
_LOST = {Code.GPU_IS_LOST, Code.RESET_REQUIRED}


@dataclass(frozen=True)
class GpuReading:
    """What a GPU, or a MIG slice, does now. None is what it does not tell.

    Args:
        utilization_pct: How busy it was in the last moments, 0 to 100.
        used_bytes: Memory in use.
        total_bytes: Its memory.
        power_w: Watts drawn.
        temperature_c: Degrees Celsius.
        process_bytes: Memory by process; in a container the pids may be the host's.
        process_pct: Use by process since the reading before; None where nobody tells.
        problem: Why it can't be read and what to do, "" when it can.
        lost: It is gone until somebody resets it.
    """

    utilization_pct: int | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    power_w: int | None = None
    temperature_c: int | None = None
    process_bytes: Mapping[int, int] = field(default_factory=dict[int, int])
    process_pct: Mapping[int, float] | None = None
    problem: str = ""
    lost: bool = False


class GpuReader:
    """Reads GPUs by UUID. NVML stays open until `close`."""

    def __init__(self) -> None:
        self._nvml: Nvml | None = None
        self._open_code = 0
        self._handles: dict[str, object] = {}
        self._seen_us: dict[str, int] = {}

    def open(self) -> None:
        """Open NVML if it is not; takes seconds where the driver's persistence mode is off.

        Not all at once with `read`, so that it is known which device a call is stuck in. That it can't be opened
        is told by the readings.
        """
        if self._nvml is None:
            try:
                self._nvml = open_nvml()
            except nvml_error() as error:
                self._open_code = code_of(error)

    def read(self, uuid: str) -> GpuReading:
        """Ask for everything. May block for as long as the driver does."""
        if self._nvml is None:
            return _failed(self._open_code)
        failed = self._nvml.NVMLError
        try:
            if uuid not in self._handles:
                self._handles[uuid] = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            return self._read(self._nvml, uuid, self._handles[uuid])
        except failed as error:
            self._handles.pop(uuid, None)
            return _failed(code_of(error))

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
            # the rest is told for the whole GPU only, of which others use other slices
            return GpuReading(used_bytes=used, total_bytes=total or None, process_bytes=process_bytes)
        return GpuReading(
            utilization_pct=utilization(nvml, handle),
            used_bytes=used,
            total_bytes=total or None,
            power_w=self._power_w(nvml, handle),
            temperature_c=self._temperature_c(nvml, handle),
            process_bytes=process_bytes,
            process_pct=self._process_pct(nvml, uuid, handle),
        )

    def _process_bytes(self, nvml: Nvml, handle: object) -> dict[int, int]:
        try:
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except nvml.NVMLError as error:
            raise_if_lost(error)
            return {}
        # more than one context of a process is listed more than once
        found: dict[int, int] = {}
        for process in processes:
            if process.usedGpuMemory is not None:
                found[process.pid] = found.get(process.pid, 0) + process.usedGpuMemory
        return found

    def _process_pct(self, nvml: Nvml, uuid: str, handle: object) -> dict[int, float] | None:
        since = self._seen_us.get(uuid) or int((time.time() - _FIRST_SPAN_S) * 1e6)
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(handle, since)
        except nvml.NVMLError as error:
            raise_if_lost(error)
            # no process has used it since, or (code 0) there is none
            return {} if code_of(error) in (0, Code.NOT_FOUND) else None
        by_process: dict[int, list[int]] = {}
        for sample in samples:
            # drivers leave places of the list unfilled
            if sample.pid and sample.timeStamp > since and sample.smUtil <= 100:
                by_process.setdefault(sample.pid, []).append(sample.smUtil)
                self._seen_us[uuid] = max(self._seen_us.get(uuid, 0), sample.timeStamp)
        return {pid: sum(values) / len(values) for pid, values in by_process.items()}

    def _power_w(self, nvml: Nvml, handle: object) -> int | None:
        try:
            return round(nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        except nvml.NVMLError as error:
            raise_if_lost(error)
            return None

    def _temperature_c(self, nvml: Nvml, handle: object) -> int | None:
        # drivers that come will have only the second, those of today may have only the first
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
