"""Tells of a run's idle GPUs: looks into the ranks' stacks when one has stood still for a while (see `idle`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from sgpu_magic.agent.watch.idle import IdleWatch, waits_in
from sgpu_magic.agent.watch.stack_taking import StackTaker
from sgpu_magic.agent.watch.stacks import NotebookFrames
from sgpu_magic.wire.events import DeviceBusy, DeviceIdle
from sgpu_magic.wire.measures import RankStack


class IdleGpus:
    """Watches the GPUs of one run.

    Args:
        taker: Takes the ranks' stacks.
        notebook: Tells the notebook's frames.
        idle_s: Seconds under 5 % after which a GPU stands idle; 0 watches nothing.
        say: Takes what was found.
    """

    def __init__(
        self,
        taker: StackTaker,
        notebook: NotebookFrames,
        idle_s: float,
        say: Callable[[DeviceIdle | DeviceBusy], None],
    ) -> None:
        self._taker = taker
        self._notebook = notebook
        self._idle_s = idle_s
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._watch = IdleWatch(idle_s)
        self._stopped = idle_s <= 0
        self._asking = False
        self._next_look = 0.0

    def stop(self) -> None:
        """The run ends; nothing is said any more."""
        self._stopped = True

    def used(self, use_pct: Mapping[int, float | None]) -> None:
        """Take how busy each rank's GPU was in the last second; None where nobody tells."""
        if self._stopped:
            return
        now = self._loop.time()
        going = {rank: pct for rank, pct in use_pct.items() if not self._taker.has_reported(rank)}
        for busy in self._watch.look(now, going):
            self._say(busy)
        idle = self._watch.idle(now)
        # asking costs a rank whose flight recorder is full 30 ms: of what was told only now and then
        if idle and not self._asking and (now >= self._next_look or idle - self._watch.told):
            self._asking = True
            self._next_look = now + self._idle_s / 2
            self._taker.take(self._took, gently=True)

    def _took(self, stacks: tuple[RankStack, ...]) -> None:
        self._asking = False
        if not self._stopped:
            causes = {stack.rank: waits_in(stack, self._notebook) for stack in stacks}
            for idle in self._watch.explain(self._loop.time(), causes):
                self._say(idle)
