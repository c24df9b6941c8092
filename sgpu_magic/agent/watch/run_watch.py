"""All monitoring of a run's ranks: stacks, stalls, CPU and GPU usage, idle GPUs.

A silent run is checked from time to time, and is reported when its ranks wait for each other. It is stalled if, for
`stall_s` seconds, it has printed nothing, at least one rank has been in the same collective, and no rank outside a
collective has used CPU or GPU. A rank that waits in an NCCL collective spins on both, so usage by waiting ranks is not
progress. `StallDetector` decides without I/O.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.agent import faults
from sgpu_magic.agent.ranks.group import RunRanks
from sgpu_magic.agent.ranks.rank_process import NotebookFrames
from sgpu_magic.agent.ranks.run_processes import BUSY_SHARE, CpuWatch
from sgpu_magic.agent.watch.gpus import IdleGpus
from sgpu_magic.agent.watch.nvml import GpuReading
from sgpu_magic.agent.watch.sampling import RunSampler
from sgpu_magic.agent.watch.stack_taking import StackTaker
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.events import EventBody, Noted
from sgpu_magic.wire.rank_events import RankStack, Resumed, Stalled

if TYPE_CHECKING:
    from sgpu_magic.agent.runs.node_run import AgentServices

# checks of CPU times within `stall_s`
_TICKS = 15
# a run that has been silent for as long may hang
_SILENT_S = 5.0


@dataclass(eq=False, repr=False)
class RunWatch:
    """Watches one run. While the run prints, a check for stalls only compares two numbers.

    Args:
        run_ranks: Its ranks.
        lease: Their devices.
        notebook: Recognizes the notebook's frames.
        has_reported: Returns whether a rank's cell has finished or failed.
        here: What all runs of the agent share.
        say: Reports an event.

    Attributes:
        taker: Takes the ranks' stacks.
    """

    run_ranks: RunRanks
    lease: Lease
    notebook: NotebookFrames
    has_reported: Callable[[int], bool]
    here: AgentServices
    say: Callable[[EventBody], None]

    def __post_init__(self) -> None:
        self.taker = StackTaker(self.run_ranks, self.notebook, self.has_reported)
        self._idle = IdleGpus(self.taker, self.notebook, self.here.settings.idle_gpu_s, self.say)
        self._sampler = RunSampler(self.run_ranks, self.lease, self.say, self._idle.used, self.notebook)
        # the run's real GPUs in rank order; empty on CPU
        self._uuids = self.lease.uuids if self._sampler.gpus else ()
        self._loop = asyncio.get_running_loop()
        self._stall_s = self.here.settings.stall_s
        self._stalls = StallDetector(self._stall_s)
        self._cpu = CpuWatch()
        self._tick_s = min(5.0, self._stall_s / _TICKS)
        self._idle_s: dict[int, float] = {}
        self._idle_ranks: frozenset[int] = frozenset()
        self._last_output = self._loop.time()
        self._next_check = 0.0
        self._pause_s = self._tick_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start to watch: all ranks have started."""
        with faults.charging(self._faulted):
            if self._stall_s > 0:
                self._last_output = self._loop.time()
                self._timer = self._loop.call_later(self._tick_s, self._tick)
            self.here.sampling.begin(self._sampler)

    def _faulted(self, error: Exception) -> None:
        """Stop watching after a fault in the monitoring; the run continues."""
        self.is_ending()
        with faults.guarded(None):
            self.here.sampling.end(self._sampler)
        self.say(Noted(text=f"the run is no longer monitored: an internal error in the agent: {error!r}"))

    def wrote(self) -> None:
        """Note that a rank has printed something, and report that a stalled run has resumed."""
        self._last_output = self._loop.time()
        if self._stalls.stalled and self._timer is not None and (resumed := self._stalls.record_progress()):
            self.say(resumed)

    @property
    def is_silent(self) -> bool:
        """Whether the run has printed nothing for so long that its ranks may wait for each other."""
        return self._timer is not None and self._loop.time() - self._last_output >= _SILENT_S

    def is_ending(self) -> None:
        """Stop detecting stalls and idle GPUs: ranks fail or are being stopped. Usage is still sampled."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._idle.stop()

    def end(self) -> None:
        """Stop all monitoring: the run's end is reported next."""
        self.is_ending()
        self.here.sampling.end(self._sampler)

    # ------------------------------------------------------------ stalls

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        now = self._loop.time()
        silent_s = now - self._last_output
        if silent_s < self._tick_s:
            self._cpu.forget()
            self._pause_s = self._tick_s
            return
        pids = [process.pid for process in self.run_ranks.ranks if process.pid is not None and process.alive]
        trees = self.here.sampling.processes.trees(pids, max_age_s=self._tick_s / 2)
        self._idle_s = self._cpu.sample(now, {pid: tree.cpu_s for pid, tree in trees.items()})
        idle = frozenset(pid for pid, seconds in self._idle_s.items() if seconds > 0)
        if idle != self._idle_ranks:
            # something has changed: check soon
            self._idle_ranks, self._pause_s = idle, self._tick_s
            self._next_check = min(self._next_check, now)
        if silent_s >= self._stall_s and now >= self._next_check:
            # a query takes a rank with a full flight recorder 30 ms: back off while nothing is found
            self._next_check = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, self._stall_s)
            self.taker.take(functools.partial(self._took, self._ranks_in_cell()), gently=True)

    def _ranks_in_cell(self) -> frozenset[int]:
        alive = [process.rank for process in self.run_ranks.ranks if process.alive]
        return frozenset(rank for rank in alive if not self.has_reported(rank))

    def _took(self, in_cell: frozenset[int], stacks: tuple[RankStack, ...]) -> None:
        if self._timer is None:
            return
        if self._uuids:
            self.here.sampling.gpus.read(lambda readings: self._detect_stall(in_cell, stacks, readings))
        else:
            self._detect_stall(in_cell, stacks, {})

    def _detect_stall(
        self, in_cell: frozenset[int], stacks: tuple[RankStack, ...], readings: Mapping[str, GpuReading]
    ) -> None:
        # the others' stacks are from before a rank ended its cell or died: that rank is what they waited for
        if self._timer is None or in_cell != self._ranks_in_cell():
            return
        now = self._loop.time()
        observations = [self._observe(stack, readings) for stack in stacks if stack.rank in in_cell]
        found = self._stalls.detect(now, now - self._last_output, observations) if observations else None
        if isinstance(found, Stalled):
            # includes ranks that are done: the others may wait for them
            found = Stalled(seconds=found.seconds, stacks=stacks)
        if found is not None:
            self.say(found)

    def _observe(self, stack: RankStack, readings: Mapping[str, GpuReading]) -> RankLook:
        process = self.run_ranks.group.rank(stack.rank)
        collective = stack.collective
        # as `views.stacks.activity_of`: a rank with an asynchronous collective of gloo may be busy elsewhere
        torch = not stack.frames or self.notebook.in_torch(stack.frames)
        pending = collective is not None and collective.pending and (collective.queued or torch)
        waits_in = collective.name if collective is not None and pending else self.notebook.collective(stack.frames)
        entered_s = None
        if pending and (entered_at := self.taker.entered_at.get(stack.rank, 0.0)):
            entered_s = time.time() - entered_at
        line = self.notebook.innermost(stack.frames)
        idle_s = self._idle_s.get(process.pid or 0, 0.0)
        reading = readings.get(self._uuids[stack.rank]) if self._uuids else None
        if reading is not None and (reading.utilization_pct or 0) > 100 * BUSY_SHARE:
            idle_s = 0.0
        return RankLook(
            stack=stack,
            waits_in=waits_in,
            at_line=line.line if line is not None else 0,
            entered_s=entered_s,
            idle_s=idle_s,
        )


# ---------------------------------------------------------------- the decision


Position = tuple[int, str, int, bool, int]


class RankLook(msgspec.Struct, frozen=True):
    """One observation of one rank.

    Args:
        stack: Its stack and collective.
        waits_in: The collective that it is in, "" for none.
        at_line: The cell's line that it executes, 0 when unknown.
        entered_s: Seconds since it entered the collective; None when unknown.
        idle_s: Seconds for which it has used neither CPU nor GPU.
    """

    stack: RankStack
    waits_in: str = ""
    at_line: int = 0
    entered_s: float | None = None
    idle_s: float = 0.0

    @property
    def position(self) -> Position:
        number = self.stack.collective.seq if self.stack.collective is not None else 0
        return (self.stack.rank, self.waits_in, number if self.waits_in else 0, self.entered_s is None, self.at_line)


class StallDetector:
    """Decides when a run has stalled, when the ranks' positions have changed, and when the run makes progress again.

    Args:
        stall_s: Seconds without progress after which a run counts as stalled.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._seen: dict[Position, float] = {}
        self._reported: frozenset[Position] = frozenset()

    @property
    def stalled(self) -> bool:
        """Whether the last report was `Stalled`."""
        return bool(self._reported)

    def detect(self, now: float, silent_s: float, observations: Sequence[RankLook]) -> Stalled | Resumed | None:
        """Evaluate one observation of all ranks that have not reported.

        Args:
            now: Time in seconds of a monotonic clock.
            silent_s: Seconds since the run's last output.
            observations: One observation per rank.
        """
        self._seen = {each.position: self._seen.get(each.position, now) for each in observations}
        still_s = min([silent_s, *(self._still_s(now, each) for each in observations)])
        if still_s < self._stall_s or not any(each.waits_in for each in observations):
            return self.record_progress()
        positions = frozenset(each.position for each in observations)
        if positions == self._reported:
            return None
        self._reported = positions
        return Stalled(seconds=still_s, stacks=tuple(each.stack for each in observations))

    def record_progress(self) -> Resumed | None:
        """Return `Resumed` if the run was stalled. Call it when the run has printed something or made progress."""
        if not self._reported:
            return None
        self._reported = frozenset()
        return Resumed()

    def _still_s(self, now: float, observation: RankLook) -> float:
        if not observation.waits_in:
            return observation.idle_s
        if observation.entered_s is not None:
            return observation.entered_s
        # the entry time is unknown, as for `recv` and `new_group`, which no recorder lists as pending. A rank that is
        # seen there once may be on its way out: a collective is done shortly before its function returns, after a
        # wait in which the rank was idle. A rank that is seen there twice waits, for as long as it has been idle
        seen_s = now - self._seen[observation.position]
        return max(seen_s, observation.idle_s) if seen_s > 0 else 0.0
