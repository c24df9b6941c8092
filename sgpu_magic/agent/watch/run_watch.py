"""All monitoring of a run's ranks: stacks, stalls, CPU and GPU usage, idle GPUs.

`IdleWatch` decides without I/O which GPUs are idle. `IdleGpus` takes the ranks' stacks when a GPU has been idle for a
while, and reports what the ranks wait in.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sgpu_magic.agent import faults
from sgpu_magic.agent.ranks.group import RunRanks
from sgpu_magic.agent.ranks.rank_process import NotebookFrames
from sgpu_magic.agent.watch.sampling import RunSampler, Sampling
from sgpu_magic.agent.watch.stack_taking import StackTaker
from sgpu_magic.agent.watch.stalls import StallWatch
from sgpu_magic.config import Settings
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.events import EventBody, Noted
from sgpu_magic.wire.failures import RankStack
from sgpu_magic.wire.rank_events import IDLE_GPU_PCT, DeviceBusy, DeviceIdle


class RunWatch:
    """Watches one run.

    Args:
        run_ranks: Its ranks.
        lease: Their devices.
        notebook: Recognizes the notebook's frames.
        has_reported: Returns whether a rank's cell has finished or failed.
        sampling: The agent's sampler.
        settings: The pool's settings.
        say: Reports an event.

    Attributes:
        taker: Takes the ranks' stacks.
    """

    def __init__(
        self,
        run_ranks: RunRanks,
        lease: Lease,
        notebook: NotebookFrames,
        has_reported: Callable[[int], bool],
        sampling: Sampling,
        settings: Settings,
        say: Callable[[EventBody], None],
    ) -> None:
        self._say = say
        self.taker = StackTaker(run_ranks, notebook, has_reported)
        self._sampling = sampling
        self._idle = IdleGpus(self.taker, notebook, settings.idle_gpu_s, say)
        self._sampler = RunSampler(run_ranks, lease, say, self._idle.used, notebook)
        self._stalls = StallWatch(
            run_ranks,
            self.taker,
            notebook,
            sampling.processes,
            sampling.gpus,
            lease.uuids if self._sampler.gpus else (),
            settings.stall_s,
            say,
        )

    def start(self) -> None:
        """Start to watch: all ranks have started."""
        with faults.charging(self._faulted):
            self._stalls.start()
            self._sampling.begin(self._sampler)

    def _faulted(self, error: Exception) -> None:
        """Stop watching after a fault in the monitoring; the run goes on."""
        self.is_ending()
        with faults.guarded(None):
            self._sampling.end(self._sampler)
        self._say(Noted(text=f"the run is no longer monitored: an internal error in the agent: {error!r}"))

    def wrote(self) -> None:
        """Note that a rank has printed something."""
        self._stalls.wrote()

    def is_ending(self) -> None:
        """Stop detecting stalls and idle GPUs: ranks fail or are being stopped. Usage is still sampled."""
        self._stalls.stop()
        self._idle.stop()

    def end(self) -> None:
        """Stop all monitoring: the run's end is reported next."""
        self.is_ending()
        self._sampling.end(self._sampler)


# ---------------------------------------------------------------- idle GPUs


_DATALOADER = os.path.join("torch", "utils", "data", "dataloader.py")
_SLEEP = re.compile(r"(time\.)?sleep\(")


class IdleWatch:
    """Detects when a GPU becomes idle, when the cause changes, and when the GPU is busy again.

    Args:
        idle_s: Seconds at or below `IDLE_GPU_PCT` after which a GPU counts as idle.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._since: dict[int, float] = {}
        self._told: dict[int, str] = {}

    def look(self, now: float, use_pct: Mapping[int, float | None]) -> list[DeviceBusy]:
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
        busy = sorted(self._told.keys() - self._since.keys())
        for rank in busy:
            del self._told[rank]
        return [DeviceBusy(rank=rank) for rank in busy]

    def idle(self, now: float) -> set[int]:
        """Return the ranks whose GPUs are idle."""
        return {rank for rank, since in self._since.items() if now - since >= self._idle_s}

    @property
    def told(self) -> set[int]:
        """Ranks whose idle GPUs were reported and are not busy again."""
        return set(self._told)

    def explain(self, now: float, causes: Mapping[int, str]) -> list[DeviceIdle]:
        """Return the new reports, given what each rank waits in ("" if its stack does not show it)."""
        found: list[DeviceIdle] = []
        for rank in sorted(self.idle(now)):
            cause = causes.get(rank, "")
            if self._told.get(rank) != cause:
                self._told[rank] = cause
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
        self._next_look = 0.0

    def stop(self) -> None:
        """Stop reporting: the run ends."""
        self._stopped = True

    def used(self, use_pct: Mapping[int, float | None]) -> None:
        """Handle each rank's GPU utilization of the last second; None if unknown."""
        if self._stopped:
            return
        now = self._loop.time()
        going = {rank: pct for rank, pct in use_pct.items() if not self.taker.has_reported(rank)}
        for busy in self._watch.look(now, going):
            self.say(busy)
        idle = self._watch.idle(now)
        # asking costs a rank with a full flight recorder 30 ms, so reported ranks are asked again only now and then
        if idle and not self._asking and (now >= self._next_look or idle - self._watch.told):
            self._asking = True
            self._next_look = now + self.idle_s / 2
            self.taker.take(self._took, gently=True)

    def _took(self, stacks: tuple[RankStack, ...]) -> None:
        self._asking = False
        if not self._stopped:
            causes = {stack.rank: waits_in(stack, self.notebook) for stack in stacks}
            for idle in self._watch.explain(self._loop.time(), causes):
                self.say(idle)
