"""Looks at a silent run from time to time and says when its ranks wait for each other (see `stall_rules`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from sgpu_magic.agent.ranks.group import Crew
from sgpu_magic.agent.watch.gpu_reading import GpuReading
from sgpu_magic.agent.watch.gpus import Gpus
from sgpu_magic.agent.watch.stack_taking import StackTaker
from sgpu_magic.agent.watch.stacks import NotebookFrames
from sgpu_magic.agent.watch.stall_rules import BUSY_SHARE, CpuWatch, RankLook, StallJudge
from sgpu_magic.agent.watch.usage import ProcessTable
from sgpu_magic.wire.events import Resumed, Stalled
from sgpu_magic.wire.measures import RankStack

# looks at CPU times within `stall_s`
_TICKS = 15


class StallWatch:
    """Watches one run. While the run prints, a tick compares two numbers.

    Args:
        crew: The ranks.
        taker: Takes their stacks.
        notebook: Tells the notebook's frames.
        processes: Tells how much CPU they use.
        gpus: Tells how busy their GPUs are.
        uuids: The run's real GPUs in rank order; empty on CPU.
        stall_s: Seconds without progress after which the run counts as stalled; 0 watches nothing.
        say: Takes what was found.
    """

    def __init__(
        self,
        crew: Crew,
        taker: StackTaker,
        notebook: NotebookFrames,
        processes: ProcessTable,
        gpus: Gpus,
        uuids: Sequence[str],
        stall_s: float,
        say: Callable[[Stalled | Resumed], None],
    ) -> None:
        self._crew = crew
        self._taker = taker
        self._notebook = notebook
        self._processes = processes
        self._gpus = gpus
        self._uuids = uuids
        self._stall_s = stall_s
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._judge = StallJudge(stall_s)
        self._cpu = CpuWatch()
        self._tick_s = min(5.0, stall_s / _TICKS)
        self._idle_s: dict[int, float] = {}
        self._idle_ranks: frozenset[int] = frozenset()
        self._last_output = self._loop.time()
        self._next_look = 0.0
        self._pause_s = self._tick_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """The run's ranks are there."""
        if self._stall_s > 0:
            self._last_output = self._loop.time()
            self._timer = self._loop.call_later(self._tick_s, self._tick)

    def stop(self) -> None:
        """The run ends; nothing is said any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wrote(self) -> None:
        """A rank has printed something."""
        self._last_output = self._loop.time()
        if self._judge.stalled and self._timer is not None and (resumed := self._judge.moved()):
            self._say(resumed)

    # ------------------------------------------------------------ within

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        now = self._loop.time()
        silent_s = now - self._last_output
        if silent_s < self._tick_s:
            self._cpu.forget()
            self._pause_s = self._tick_s
            return
        pids = [process.pid for process in self._crew.ranks if process.pid is not None and process.alive]
        trees = self._processes.trees(pids, max_age_s=self._tick_s / 2)
        self._idle_s = self._cpu.look(now, {pid: tree.cpu_s for pid, tree in trees.items()})
        idle = frozenset(pid for pid, seconds in self._idle_s.items() if seconds > 0)
        if idle != self._idle_ranks:
            # something has changed: look soon
            self._idle_ranks, self._pause_s = idle, self._tick_s
            self._next_look = min(self._next_look, now)
        if silent_s >= self._stall_s and now >= self._next_look:
            # asking costs a rank whose flight recorder is full 30 ms: less and less often while nothing is found
            self._next_look = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, self._stall_s)
            self._taker.take(self._took, gently=True)

    def _took(self, stacks: tuple[RankStack, ...]) -> None:
        if self._timer is None:
            return
        if self._uuids:
            self._gpus.read(lambda readings: self._judge_now(stacks, readings))
        else:
            self._judge_now(stacks, {})

    def _judge_now(self, stacks: tuple[RankStack, ...], readings: Mapping[str, GpuReading]) -> None:
        if self._timer is None:
            return
        now = self._loop.time()
        looks = [self._look_of(stack, readings) for stack in stacks if self._is_in_its_cell(stack)]
        found = self._judge.look(now, now - self._last_output, looks) if looks else None
        if isinstance(found, Stalled):
            # ranks that are done belong to the picture: the others may wait for them
            found = Stalled(seconds=found.seconds, stacks=stacks)
        if found is not None:
            self._say(found)

    def _is_in_its_cell(self, stack: RankStack) -> bool:
        return not self._taker.has_reported(stack.rank) and self._crew.rank(stack.rank).alive

    def _look_of(self, stack: RankStack, readings: Mapping[str, GpuReading]) -> RankLook:
        process = self._crew.rank(stack.rank)
        collective = stack.collective
        pending = collective is not None and collective.pending
        waits_in = collective.name if collective is not None and pending else self._notebook.collective(stack.frames)
        entered_s = None
        if pending and (entered_at := self._taker.entered_at.get(stack.rank, 0.0)):
            entered_s = time.time() - entered_at
        line = self._notebook.innermost(stack.frames)
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
