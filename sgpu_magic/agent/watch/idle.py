"""Which GPUs of a run stand idle, and what their ranks do instead. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from sgpu_magic.agent.watch.stacks import NotebookFrames
from sgpu_magic.wire.events import IDLE_GPU_PCT, DeviceBusy, DeviceIdle
from sgpu_magic.wire.measures import RankStack

_DATALOADER = os.path.join("torch", "utils", "data", "dataloader.py")
_SLEEP = re.compile(r"(time\.)?sleep\(")


class IdleWatch:
    """Says when a GPU stands idle, when its rank's cause changes, and when it works again.

    Args:
        idle_s: Seconds under `IDLE_GPU_PCT` after which a GPU stands idle.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._since: dict[int, float] = {}
        self._told: dict[int, str] = {}

    def look(self, now: float, use_pct: Mapping[int, float | None]) -> list[DeviceBusy]:
        """Take the use of the GPUs by rank. None, and a rank that is not there, may be anything: it is not idle."""
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
        """Ranks whose GPUs stand idle."""
        return {rank for rank, since in self._since.items() if now - since >= self._idle_s}

    @property
    def told(self) -> set[int]:
        """Ranks of which it was said, and not taken back."""
        return set(self._told)

    def explain(self, now: float, causes: Mapping[int, str]) -> list[DeviceIdle]:
        """Return what is new, given what each rank waits in ("" where its stack does not show it)."""
        found: list[DeviceIdle] = []
        for rank in sorted(self.idle(now)):
            cause = causes.get(rank, "")
            if self._told.get(rank) != cause:
                self._told[rank] = cause
                found.append(DeviceIdle(rank=rank, seconds=round(now - self._since[rank], 1), waits_in=cause))
        return found


def waits_in(stack: RankStack, notebook: NotebookFrames) -> str:
    """What a rank waits in, as far as its stack shows it for sure: `the DataLoader`, `all_reduce`; else ""."""
    if any(frame.file.endswith(_DATALOADER) for frame in stack.frames):
        # also where the cell's own data set reads or sleeps below it
        return "the DataLoader"
    if stack.collective is not None and stack.collective.pending:
        return stack.collective.name
    if collective := notebook.collective(stack.frames):
        return collective
    if stack.frames and _SLEEP.match(notebook.source(stack.frames[0])):
        return "time.sleep"
    return ""
