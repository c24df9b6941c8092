"""Does a run still move? Decides whether its ranks wait for each other. Pure.

A run is stalled when, for `stall_s` seconds, it has printed nothing, at least one rank has been in one and the same
collective, and no rank outside of one has used CPU or GPU. A rank that waits in an NCCL collective spins on both:
what the waiting ones use is no progress.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgpu_magic.wire.events import Resumed, Stalled
from sgpu_magic.wire.measures import RankStack

BUSY_SHARE = 0.05
"""Of one core (or of the GPU): what a rank uses that does something."""

# the system counts in steps of 10 ms, and a waiting rank wakes now and then
_SLACK_S = 0.02

Position = tuple[int, str, int, int]


@dataclass(frozen=True)
class RankLook:
    """What was seen of one rank.

    Args:
        stack: Its stack and collective.
        waits_in: The collective that it is in, "" when it is in none.
        at_line: The line of the notebook that it is at, 0 when unknown.
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
        return (self.stack.rank, self.waits_in, number if self.waits_in else 0, self.at_line)


class StallJudge:
    """Says when a run has stalled, when the picture changed, and when it moves again.

    Args:
        stall_s: Seconds without progress after which it counts as stalled.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._seen: dict[Position, float] = {}
        self._told: frozenset[Position] = frozenset()

    @property
    def stalled(self) -> bool:
        """Whether the last word was `Stalled`."""
        return bool(self._told)

    def look(self, now: float, silent_s: float, looks: Sequence[RankLook]) -> Stalled | Resumed | None:
        """Judge one look at all ranks that have not reported.

        Args:
            now: A clock's seconds.
            silent_s: Seconds since the run's last output.
        """
        self._seen = {look.position: self._seen.get(look.position, now) for look in looks}
        still_s = min([silent_s, *(self._still_s(now, look) for look in looks)])
        if still_s < self._stall_s or not any(look.waits_in for look in looks):
            return self.moved()
        picture = frozenset(look.position for look in looks)
        if picture == self._told:
            return None
        self._told = picture
        return Stalled(seconds=still_s, stacks=tuple(look.stack for look in looks))

    def moved(self) -> Resumed | None:
        """The run has printed something, or was seen to move."""
        if not self._told:
            return None
        self._told = frozenset()
        return Resumed()

    def _still_s(self, now: float, look: RankLook) -> float:
        if not look.waits_in:
            return look.idle_s
        return look.entered_s if look.entered_s is not None else now - self._seen[look.position]


class CpuWatch:
    """How long each rank has used no CPU, from its own and its children's time. Where that is unknown it is busy.

    It is busy that used more than a small share since the last look, or since it was last seen to be: looks that
    follow each other closely see little of a process that shares its core with others.
    """

    def __init__(self) -> None:
        self._last: dict[int, _Used] = {}
        self._busy: dict[int, _Used] = {}

    def forget(self) -> None:
        self._last = {}
        self._busy = {}

    def look(self, now: float, used_s: Mapping[int, float]) -> dict[int, float]:
        """Return for each process how long it has been idle, in seconds.

        Args:
            now: A clock's seconds.
            used_s: CPU seconds by process so far (`usage`).
        """
        for pid, used in used_s.items():
            since = (self._last.get(pid), self._busy.get(pid))
            if not all(before is not None and before.is_idle_until(now, used) for before in since):
                self._busy[pid] = _Used(now, used)
        self._last = {pid: _Used(now, used) for pid, used in used_s.items()}
        return {pid: now - self._busy[pid].at for pid in used_s}


@dataclass(frozen=True, slots=True)
class _Used:
    at: float
    cpu_s: float

    def is_idle_until(self, now: float, cpu_s: float) -> bool:
        # less than before: a child has ended
        return 0 <= cpu_s - self.cpu_s <= BUSY_SHARE * (now - self.at) + _SLACK_S
