"""The GPUs of active runs: read in threads, since a driver may block and the agent must not, and reported when idle.

NVML is open only while a run holds a GPU, so that an administrator can reset idle GPUs. A call that does not return
keeps its thread; the other devices are still read.

`IdleWatch` decides without I/O which GPUs are idle. `IdleGpus` takes the ranks' stacks when a GPU has been idle for a
while, and reports what the ranks wait in.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgpu_magic.agent import faults
from sgpu_magic.agent.faults import call_in_background
from sgpu_magic.agent.watch.nvml import GpuReader, GpuReading
from sgpu_magic.wire.rank_events import IDLE_GPU_PCT, DeviceBusy, DeviceIdle, RankStack

if TYPE_CHECKING:
    from sgpu_magic.agent.ranks.rank_process import NotebookFrames
    from sgpu_magic.agent.watch.stack_taking import StackTaker

# callers get the available readings after this
_PATIENCE_S = 0.4
# a call that takes longer counts as stuck: healthy ones take milliseconds, opening the driver a few seconds
_STUCK_S = 5.0


Done = Callable[[Mapping[str, GpuReading]], None]
_STUCK = GpuReading(problem="it can't be read: the NVIDIA driver does not answer; check `dmesg`, or reboot")
_DATALOADER = os.path.join("torch", "utils", "data", "dataloader.py")
_SLEEP = re.compile(r"(time\.)?sleep\(")


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

    # ------------------------------------------------------------ internals

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


# ---------------------------------------------------------------- idle GPUs


class IdleWatch:
    """Detects when a GPU becomes idle, when the cause changes, and when the GPU is busy again.

    Args:
        idle_s: Seconds at or below `IDLE_GPU_PCT` after which a GPU counts as idle.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._since: dict[int, float] = {}
        self._reported: dict[int, str] = {}

    def detect(self, now: float, use_pct: Mapping[int, float | None]) -> list[DeviceBusy]:
        """Record the GPUs' utilization by rank and return those that are busy again.

        A GPU of unknown utilization (None, or a missing rank) does not count as idle.
        """
        for rank, pct in use_pct.items():
            if pct is not None and pct <= IDLE_GPU_PCT:
                self._since.setdefault(rank, now)
            else:
                self._since.pop(rank, None)
        for rank in self._since.keys() - use_pct.keys():
            del self._since[rank]
        busy = sorted(self._reported.keys() - self._since.keys())
        for rank in busy:
            del self._reported[rank]
        return [DeviceBusy(rank=rank) for rank in busy]

    def idle(self, now: float) -> set[int]:
        """Return the ranks whose GPUs are idle."""
        return {rank for rank, since in self._since.items() if now - since >= self._idle_s}

    @property
    def reported(self) -> set[int]:
        """Ranks whose idle GPUs were reported and are not busy again."""
        return set(self._reported)

    def explain(self, now: float, causes: Mapping[int, str]) -> list[DeviceIdle]:
        """Return the new reports, given what each rank waits in ("" if its stack does not show it)."""
        found: list[DeviceIdle] = []
        for rank in sorted(self.idle(now)):
            cause = causes.get(rank, "")
            if self._reported.get(rank) != cause:
                self._reported[rank] = cause
                found.append(DeviceIdle(rank=rank, seconds=round(now - self._since[rank], 1), waits_in=cause))
        return found


def waits_in(stack: RankStack, notebook: NotebookFrames) -> str:
    """Return what a rank waits in if its stack shows it for certain: `the DataLoader`, `all_reduce`; else ""."""
    if any(frame.file.endswith(_DATALOADER) for frame in stack.frames):
        # even if the cell's own data set reads or sleeps below it
        return "the DataLoader"
    if stack.collective is not None and stack.collective.pending:
        return stack.collective.name
    if collective := notebook.collective(stack.frames):
        return collective
    if stack.frames and _SLEEP.match(notebook.source(stack.frames[0])):
        return "time.sleep"
    return ""


@dataclass(eq=False, repr=False)
class IdleGpus:
    """Reports idle GPUs of one run.

    Args:
        taker: Takes the ranks' stacks.
        notebook: Recognizes the notebook's frames.
        idle_s: Seconds at or below `IDLE_GPU_PCT` after which a GPU counts as idle; 0 disables the reports.
        say: Reports an event.
    """

    taker: StackTaker
    notebook: NotebookFrames
    idle_s: float
    say: Callable[[DeviceIdle | DeviceBusy], None]

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._watch = IdleWatch(self.idle_s)
        self._stopped = self.idle_s <= 0
        self._asking = False
        self._next_check = 0.0

    def stop(self) -> None:
        """Stop reporting: the run ends."""
        self._stopped = True

    def used(self, use_pct: Mapping[int, float | None]) -> None:
        """Handle each rank's GPU utilization of the last second; None if unknown."""
        if self._stopped:
            return
        now = self._loop.time()
        going = {rank: pct for rank, pct in use_pct.items() if not self.taker.has_reported(rank)}
        for busy in self._watch.detect(now, going):
            self.say(busy)
        idle = self._watch.idle(now)
        # a query takes a rank with a full flight recorder 30 ms, so ranks that were reported are queried less often
        if idle and not self._asking and (now >= self._next_check or idle - self._watch.reported):
            self._asking = True
            self._next_check = now + self.idle_s / 2
            self.taker.take(self._took, gently=True)

    def _took(self, stacks: tuple[RankStack, ...]) -> None:
        self._asking = False
        if not self._stopped:
            causes = {stack.rank: waits_in(stack, self.notebook) for stack in stacks}
            for idle in self._watch.explain(self._loop.time(), causes):
                self.say(idle)
