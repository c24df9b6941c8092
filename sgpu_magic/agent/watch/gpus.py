"""The GPUs of the runs that go on, asked through NVML in a thread of its own: a driver may block, the agent may not.

NVML is open only while a run holds a GPU, so that nothing keeps an administrator from resetting one. A device
whose call does not return is left to its thread, and another thread goes on with the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from sgpu_magic.agent import faults
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

# the first time a GPU is asked what its processes did
_FIRST_SPAN_S = 1.5
_LOST = {Code.GPU_IS_LOST, Code.RESET_REQUIRED}

# who asked is answered by then, with what there is
_PATIENCE_S = 0.4
# a call that takes longer does not return: healthy ones take milliseconds, opening the driver a few seconds
_STUCK_S = 5.0


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


Done = Callable[[Mapping[str, GpuReading]], None]
_STUCK = GpuReading(problem="it can't be read: the NVIDIA driver does not answer; look into `dmesg`, or reboot")


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
            power_w=told(nvml, lambda: round(nvml.nvmlDeviceGetPowerUsage(handle) / 1000), None),
            temperature_c=self._temperature_c(nvml, handle),
            process_bytes=process_bytes,
            process_pct=self._process_pct(nvml, uuid, handle),
        )

    def _process_bytes(self, nvml: Nvml, handle: object) -> dict[int, int]:
        # more than one context of a process is listed more than once
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
            # no process has used it since, or (code 0) there is none
            return {} if code_of(error) in (0, Code.NOT_FOUND) else None
        by_process: dict[int, list[int]] = {}
        for sample in samples:
            # drivers leave places of the list unfilled
            if sample.pid and sample.timeStamp > since and sample.smUtil <= 100:
                by_process.setdefault(sample.pid, []).append(sample.smUtil)
                self._seen_us[uuid] = max(self._seen_us.get(uuid, 0), sample.timeStamp)
        return {pid: sum(values) / len(values) for pid, values in by_process.items()}

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


class Gpus:
    """Reads the GPUs that somebody holds. All methods are the loop's."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._held: Counter[str] = Counter()
        self._thread: _Thread | None = None
        self._stuck: dict[str, _Thread] = {}
        self._question: _Question | None = None

    def hold(self, uuids: Collection[str]) -> None:
        """A run begins to use these."""
        self._held.update(uuids)

    def release(self, uuids: Collection[str]) -> None:
        """A run uses them no longer. After the last NVML is closed."""
        self._held.subtract(uuids)
        self._held = +self._held
        if not self._held:
            self.close()

    def read(self, done: Done) -> None:
        """Call `done` with a reading of each held GPU within half a second; without those that did not answer yet."""
        if not self._held:
            done({})
            return
        done = faults.bound(done)
        if self._question is not None and self._question.listeners:
            self._question.listeners.append(done)
            return
        self._give_stuck_up()
        if self._question is None:
            if self._thread is None:
                self._thread = _Thread(self._loop, self._told)
            wanted = [uuid for uuid in self._held if uuid not in self._stuck]
            self._question = _Question(self._loop.time())
            self._thread.ask(wanted)
        self._question.listeners.append(done)
        with faults.charging(None):
            self._loop.call_later(_PATIENCE_S, self._answer, self._question)

    def close(self) -> None:
        """Close NVML when the thread's call of now has returned."""
        for thread in (self._thread, *self._stuck.values()):
            if thread is not None:
                thread.end()
        self._thread, self._question = None, None
        self._stuck = {}

    # ------------------------------------------------------------ within

    def _told(self, thread: _Thread, uuid: str, reading: GpuReading | None) -> None:
        """From the thread: one reading, or (None) all that it was asked for."""
        if self._stuck.get(uuid) is thread:
            # it has returned after all
            del self._stuck[uuid]
        elif thread is self._thread and self._question is not None:
            if reading is not None:
                self._question.found[uuid] = reading
            else:
                question, self._question = self._question, None
                self._answer(question)

    def _answer(self, question: _Question) -> None:
        listeners, question.listeners = question.listeners, []
        found = {**dict.fromkeys(self._held.keys() & self._stuck.keys(), _STUCK), **question.found}
        # what was told once is old for who asks later
        question.found = {}
        for done in listeners:
            done(found)

    def _give_stuck_up(self) -> None:
        thread, question = self._thread, self._question
        if thread is None or question is None or self._loop.time() - question.asked_at < _STUCK_S:
            return
        uuid = thread.asking
        # while the driver is opened there is no device to blame, and no other that could be asked
        if uuid:
            thread.end()
            self._stuck[uuid] = thread
            self._thread, self._question = None, None


class _Question:
    """All held GPUs are asked; what comes late is for nobody, and is not asked a second time meanwhile."""

    def __init__(self, asked_at: float) -> None:
        self.asked_at = asked_at
        self.found: dict[str, GpuReading] = {}
        self.listeners: list[Done] = []


class _Thread:
    """Owns one `GpuReader`. A daemon: the agent's end waits for no driver.

    Attributes:
        asking: The device whose call has not returned, "" when there is none.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, told: Callable[[_Thread, str, GpuReading | None], None]
    ) -> None:
        self.asking = ""
        self._loop = loop
        self._told = told
        self._orders: queue.SimpleQueue[list[str] | None] = queue.SimpleQueue()
        self._ending = False
        threading.Thread(target=self._run, name="sgpu-nvml", daemon=True).start()

    def ask(self, uuids: list[str]) -> None:
        self._orders.put(uuids)

    def end(self) -> None:
        self._ending = True
        self._orders.put(None)

    def _run(self) -> None:
        reader = GpuReader()
        try:
            while (uuids := self._orders.get()) is not None and not self._ending:
                for uuid in uuids:
                    reader.open()
                    self.asking = uuid
                    reading = reader.read(uuid)
                    self.asking = ""
                    self._tell(uuid, reading)
                    if self._ending:
                        return
                self._tell("", None)
        finally:
            reader.close()

    def _tell(self, uuid: str, reading: GpuReading | None) -> None:
        # the loop is closed when the agent ends
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._told, self, uuid, reading)
