"""Everything that looks at a run's ranks while they run: stacks, stalls, use of CPU and GPU, idle GPUs."""

from __future__ import annotations

from collections.abc import Callable

from sgpu_magic.agent import faults
from sgpu_magic.agent.ranks.group import RunRanks
from sgpu_magic.agent.watch.idle import IdleGpus
from sgpu_magic.agent.watch.sampling import RunSampler, Sampling
from sgpu_magic.agent.watch.stack_taking import StackTaker
from sgpu_magic.agent.watch.stacks import NotebookFrames
from sgpu_magic.agent.watch.stalls import StallWatch
from sgpu_magic.config import Settings
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.events import EventBody, Noted


class RunWatch:
    """Watches one run.

    Args:
        run_ranks: Its ranks.
        lease: Their devices.
        notebook: Tells the notebook's frames.
        has_reported: Whether a rank's cell is done or failed.
        sampling: The agent's sampler.
        settings: For how long nothing may move.
        say: Takes what was found.

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
        self._sampler = RunSampler(run_ranks, lease, say, self._idle.used)
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
        """The ranks are there."""
        with faults.charging(self._faulted):
            self._stalls.start()
            self._sampling.begin(self._sampler)

    def _faulted(self, error: Exception) -> None:
        """A fault of who only watches costs the watch, not the run."""
        self.is_ending()
        with faults.guarded(None):
            self._sampling.end(self._sampler)
        self._say(Noted(text=f"the run is not watched any more, as the agent met a fault: {error!r}"))

    def wrote(self) -> None:
        """A rank has printed something."""
        self._stalls.wrote()

    def is_ending(self) -> None:
        """Ranks fall, or are stopped: that they wait means nothing any more. What they use is still told."""
        self._stalls.stop()
        self._idle.stop()

    def end(self) -> None:
        """The run's last word follows."""
        self.is_ending()
        self._sampling.end(self._sampler)
