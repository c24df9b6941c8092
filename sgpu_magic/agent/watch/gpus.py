"""Reads the GPUs of active runs through NVML, each in a thread, since a driver may block and the agent must not.

NVML is open only while a run holds a GPU, so that an administrator can reset idle GPUs. A call that does not return
keeps its thread; the other devices are still read.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping

import msgspec

from sgpu_magic.agent import faults
from sgpu_magic.agent.faults import call_in_background
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
    told,
    utilization,
)

# time span of the first query for processes' utilization
_FIRST_SPAN_S = 1.5
_LOST = {Code.GPU_IS_LOST, Code.RESET_REQUIRED}

# callers get the available readings after this
_PATIENCE_S = 0.4
# a call that takes longer counts as stuck: healthy ones take milliseconds, opening the driver a few seconds
_STUCK_S = 5.0


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
    problem: str = ""
    lost: bool = False


Done = Callable[[Mapping[str, GpuReading]], None]
_STUCK = GpuReading(problem="it can't be read: the NVIDIA driver does not answer; check `dmesg`, or reboot")


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
            # other values exist only for the whole GPU, whose other slices others use
            return GpuReading(used_bytes=used, total_bytes=total or None, process_bytes=process_bytes)
        return GpuReading(
            utilization_pct=utilization(nvml, handle),
            used_bytes=used,
            total_bytes=total or None,
            power_w=told(nvml, lambda: round(nvml.nvmlDeviceGetPowerUsage(handle) / 1000), None),
            temperature_c=self._temperature_c(nvml, handle),
            process_bytes=process_bytes,
            process_pct=self._process_pct(nvml, uuid, handle),
        )

    def _process_bytes(self, nvml: Nvml, handle: object) -> dict[int, int]:
        # a process with several contexts is listed several times
        found: dict[int, int] = {}
        for process in told(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle), ()):
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


class Gpus:
    """Reads the GPUs that runs hold. Used in the loop's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._held: Counter[str] = Counter()
        self._reader: GpuReader | None = None
        # callbacks that wait for the current readings
        self._listeners: list[Done] = []
        self._found: dict[str, GpuReading] = {}
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, uuids: Collection[str]) -> None:
        """Add GPUs that a run uses."""
        self._held.update(uuids)

    def release(self, uuids: Collection[str]) -> None:
        """Remove GPUs that a run no longer uses; without any, NVML is closed."""
        self._held.subtract(uuids)
        self._held = +self._held
        if not self._held:
            self.close()

    def read(self, done: Done) -> None:
        """Call `done` with a reading of each held GPU within half a second, without those that have not answered."""
        if not self._held:
            done({})
            return
        self._listeners.append(faults.bound(done))
        if len(self._listeners) > 1:
            return
        with faults.charging(None):
            self._timer = self._loop.call_later(_PATIENCE_S, self._answer)
            reader = self._reader = self._reader or GpuReader()
            # devices with a pending call are not asked again
            for uuid in self._held.keys() - reader.calls.keys():
                reader.calls[uuid] = time.monotonic()
                call = call_in_background(functools.partial(reader.read, uuid), "sgpu-nvml")
                call.add_done_callback(functools.partial(self._returned, reader, uuid))

    def close(self) -> None:
        """Close NVML when the pending calls have returned."""
        reader, self._reader = self._reader, None
        if reader is not None and not reader.calls:
            call_in_background(reader.close, "sgpu-nvml")

    # ------------------------------------------------------------ within

    def _returned(self, reader: GpuReader, uuid: str, call: asyncio.Future[GpuReading]) -> None:
        del reader.calls[uuid]
        if reader is not self._reader:
            if not reader.calls:
                call_in_background(reader.close, "sgpu-nvml")
        elif self._listeners:
            # a reading that no caller waits for is dropped, since it would be outdated for later callers
            self._found[uuid] = call.result()
            if reader.calls.keys() <= self._stuck(reader):
                self._answer()

    def _answer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        found = self._found
        if self._reader is not None:
            found = dict.fromkeys(self._held.keys() & self._stuck(self._reader), _STUCK) | found
        listeners, self._listeners, self._found = self._listeners, [], {}
        for done in listeners:
            done(found)

    def _stuck(self, reader: GpuReader) -> set[str]:
        """Return devices whose calls do not return; none while NVML is being opened."""
        if reader.opened_at is None:
            return set()
        late = time.monotonic() - _STUCK_S
        return {uuid for uuid, since in reader.calls.items() if max(since, reader.opened_at) < late}
