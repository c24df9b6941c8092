"""Samples every run of the agent once a second, with one look at /proc and one question to NVML for all of them.

It costs 1 ms a second for 64 ranks; nothing while no run goes on, and nothing in a run's first moments.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping

from sgpu_magic.agent import faults
from sgpu_magic.agent.failures.memory_kills import memory_limit
from sgpu_magic.agent.watch.gpu_reading import GpuReading
from sgpu_magic.agent.watch.gpus import Gpus
from sgpu_magic.agent.watch.run_sampler import RunSampler
from sgpu_magic.agent.watch.usage import ProcessTable, TreeUse

_INTERVAL_S = 1.0
# nothing may compete with a run's first line
_SETTLED_S = 0.2


class Sampling:
    """The one sampler of an agent.

    Attributes:
        processes: What the ranks' processes use.
        gpus: The GPUs of the runs that are sampled.
    """

    def __init__(self) -> None:
        self.processes = ProcessTable()
        self.gpus = Gpus()
        self._loop = asyncio.get_running_loop()
        self._settling: dict[RunSampler, asyncio.TimerHandle] = {}
        # and who takes a fault of its sampler
        self._runs: dict[RunSampler, faults.OnFault | None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, run: RunSampler) -> None:
        """Its ranks have started."""
        self._settling[run] = self._loop.call_later(_SETTLED_S, self._settled, run)

    def end(self, run: RunSampler) -> None:
        """Its ranks are done. May be said more than once."""
        if (timer := self._settling.pop(run, None)) is not None:
            timer.cancel()
        elif run in self._runs:
            del self._runs[run]
            self.gpus.release(run.gpus)
            run.tell()
        if not self._runs and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """The agent ends."""
        for run in [*self._settling, *self._runs]:
            self.end(run)
        self.gpus.close()

    # ------------------------------------------------------------ within

    @functools.cached_property
    def _memory_bytes(self) -> int:
        return memory_limit()

    def _settled(self, run: RunSampler) -> None:
        del self._settling[run]
        now = self._loop.time()
        run.begin(now, self.processes.trees(run.pids), self._memory_bytes)
        self._runs[run] = faults.charged()
        self.gpus.hold(run.gpus)
        if run.gpus:
            # opening NVML may take long; what it tells now is of before the run
            self.gpus.read(lambda _: None)
        if self._timer is None:
            with faults.charging(None):
                self._timer = self._loop.call_later(_INTERVAL_S - _SETTLED_S, self._due)

    def _due(self) -> None:
        # a fixed step from now: after a pause there is one sample of the whole time, not many; a fault costs one sample
        self._timer = self._loop.call_later(_INTERVAL_S, self._due)
        self._tick()

    def _tick(self) -> None:
        now = self._loop.time()
        trees = self.processes.trees([pid for run in self._runs for pid in run.pids])
        self._sample([run for run in self._runs if not run.gpus], now, trees, {})
        with_gpus = [run for run in self._runs if run.gpus]
        if with_gpus:
            self.gpus.read(lambda readings: self._sample(with_gpus, now, trees, readings))

    def _sample(
        self,
        runs: list[RunSampler],
        now: float,
        trees: Mapping[int, TreeUse],
        readings: Mapping[str, GpuReading],
    ) -> None:
        for run in runs:
            if run in self._runs:
                with faults.guarded(self._runs[run]):
                    run.sample(now, trees, readings)
