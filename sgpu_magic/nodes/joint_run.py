"""One run of several nodes, joined from what the agent of each node says of its part. No I/O.

Most events pass through: they name global ranks. Three kinds belong to the whole run and wait until every node has
said theirs: that the packages are ready, that all ranks are in the group, the last word. What a node says after such an
event waits with it, so that the numbers of the events that were passed on never go past one that was not: a pool
service that is started again asks each agent from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence

import msgspec

from sgpu_magic.nodes.merge_parts import PartEnd, join_ends, join_releases, join_starts
from sgpu_magic.wire.events import EnvironmentMoved, EventBody, Noted, PayloadReleased, RanksStarted, RunEnded
from sgpu_magic.wire.node import RunEvent
from sgpu_magic.wire.rank_events import Resumed, Stalled

Told = tuple[RunEvent, Sequence[bytes]]

# in the order in which they come; who skips one has not waited for it
_READY, _STARTED, _ENDED = range(3)


class PartOfRun(msgspec.Struct):
    """What is known of one node's part.

    Args:
        heard: Number of the newest event that has arrived.
        passed: Number of the newest event that was passed on, alone or joined.
        waiting: What has arrived and was not passed on, oldest first.
        ahead_s: How far the node's clock is ahead of this one's at least; None before its first event.
        ended: Its last word was joined with the others'.
        released: What became of the payload there.
        told_end: It has ended, also where its last word waits for its results.
        free: Its processes are gone, and files of it may still come.
        gone: Its ranks are gone, and nothing of it is to come.
        lost: Its node is.
    """

    heard: int = 0
    passed: int = 0
    waiting: deque[Told] = msgspec.field(default_factory=deque[Told])
    ahead_s: float | None = None
    ended: bool = False
    released: PayloadReleased | None = None
    told_end: bool = False
    free: bool = False
    gone: bool = False
    lost: bool = False

    @property
    def is_over(self) -> bool:
        """No rank of it is left, or can be reached."""
        return self.gone or self.lost


class JointRun:
    """Joins one attempt of a run.

    Args:
        parts: On how many nodes it is.
        numbers: By part the number of the newest event that the pool has; none for a run that is new.

    Attributes:
        ended: Every part has said its last word, and the run's was passed on.
        released: What became of the payload was passed on.
        parts: What is known of each; `told_end` and `free` are for who hears of them to set.
    """

    def __init__(self, parts: int, numbers: Mapping[int, int] | None = None) -> None:
        self.parts = [PartOfRun() for _ in range(parts)]
        for index, part in enumerate(self.parts):
            part.heard = part.passed = (numbers or {}).get(index, 0)
        # of events that nobody is told by themselves, until the next one is passed on
        self._joined: list[tuple[int, int]] = []
        self._notes: set[str] = set()
        self._stalls = JointStalls(parts)
        self.released = False
        self.ended = False

    def passed(self, index: int) -> int:
        """Number of the newest event of a part that was passed on: what its agent need not keep any more."""
        return self.parts[index].passed

    @property
    def all_ended(self) -> bool:
        """Every part has ended, also those whose last word is still to come."""
        return all(part.told_end or part.ended or part.is_over for part in self.parts)

    @property
    def free(self) -> bool:
        """No process of it is left anywhere; files of it may still come."""
        return all(part.free or part.is_over for part in self.parts)

    @property
    def gone(self) -> bool:
        """Nothing of it is left anywhere."""
        return all(part.is_over for part in self.parts)

    @property
    def lost(self) -> bool:
        """A node of it was lost: what it ends as is not for its agents to say."""
        return any(part.lost for part in self.parts)

    def heard(self, index: int, event: RunEvent, frames: Sequence[bytes], now: float) -> list[Told]:
        """A node has told an event. Returns what is to be passed on.

        Args:
            index: The node's part.
            now: Wall-clock time here, seconds since the epoch.
        """
        part = self.parts[index]
        if part.lost or event.number <= part.heard:
            # what a node that was given up sends, or what was sent again after its link was lost
            return []
        part.heard = event.number
        if len(self.parts) == 1:
            # nobody else has a word in it
            part.passed = event.number
            self.ended |= isinstance(event.body, RunEnded)
            self.released |= isinstance(event.body, PayloadReleased)
            return [(event, frames)]
        ahead_s = event.at - now
        part.ahead_s = ahead_s if part.ahead_s is None else max(part.ahead_s, ahead_s)
        part.waiting.append((msgspec.structs.replace(event, part=index), frames))
        return self._pass_on()

    def part_gone(self, index: int) -> list[Told]:
        """The ranks of a part are gone: it says nothing more but what became of the payload."""
        self.parts[index].gone = True
        return self._pass_on()

    def part_lost(self, index: int) -> list[Told]:
        """The node of a part is gone, or its agent."""
        part = self.parts[index]
        part.lost = True
        part.waiting.clear()
        return self._pass_on()

    # ------------------------------------------------------------ within

    def _pass_on(self) -> list[Told]:
        told: list[Told] = []
        while True:
            for part in self.parts:
                while part.waiting and _level(part) is None:
                    event, frames = part.waiting.popleft()
                    part.passed = event.number
                    told += [(alone, frames) for alone in self._alone(event)]
            joined = self._join()
            if joined is None:
                return told
            told += joined

    def _alone(self, event: RunEvent) -> list[RunEvent]:
        """What is passed on of an event that waits for no other node's."""
        body: EventBody | None = event.body
        match body:
            case PayloadReleased():
                body = self._released(event.part, body)
            case Noted(text=text):
                # what all nodes remark is one remark
                body = None if text in self._notes else body
                self._notes.add(text)
            case Stalled() | Resumed():
                done = {index for index, part in enumerate(self.parts) if part.waiting and _level(part) == _ENDED}
                body = self._stalls.told(event.part, body, done)
            case _:
                pass
        if body is None:
            self._joined.append((event.part, event.number))
            return []
        return [self._with_joined(event, body)]

    def _join(self) -> list[Told] | None:
        """Pass on what every node has said by now; None while that is nothing."""
        levels: dict[int, int] = {}
        for index, part in enumerate(self.parts):
            if part.waiting:
                levels[index] = _level(part) or _READY
            elif not (part.ended or part.is_over):
                return None
        if not levels:
            return None
        level = min(levels.values())
        at = [self._take(index) for index, own in levels.items() if own == level]
        match level:
            case 0:
                return [(self._with_joined(event, event.body), frames) for event, frames in at]
            case 1 if len(at) == len(self.parts):
                starts = [event.body for event, _ in at if isinstance(event.body, RanksStarted)]
                self._joined += [(event.part, event.number) for event, _ in at]
                return [(self._with_joined(at[-1][0], join_starts(starts)), ())]
            case 2 if not self.lost:
                return [self._end(at)]
            case _:
                # some part did not come so far, or is lost: it was no beginning and no end of the run
                self._joined += [(event.part, event.number) for event, _ in at]
                return []

    def _take(self, index: int) -> Told:
        part = self.parts[index]
        event, frames = part.waiting.popleft()
        part.passed = event.number
        part.ended |= isinstance(event.body, RunEnded)
        return event, frames

    def _end(self, at: Sequence[Told]) -> Told:
        ends = [
            PartEnd(event.body, frames, self.parts[event.part].ahead_s or 0.0)
            for event, frames in at
            if isinstance(event.body, RunEnded)
        ]
        ended, frames = join_ends(ends)
        self.ended = True
        self._joined += [(event.part, event.number) for event, _ in at]
        return self._with_joined(at[-1][0], ended), frames

    def _released(self, index: int, body: PayloadReleased) -> PayloadReleased | None:
        """What is told of the payload when one node more does not read it any more; an adopted one says so again."""
        self.parts[index].released = body
        if self.released:
            return None
        releases = [part.released for part in self.parts if not part.lost]
        told = [release for release in releases if release is not None]
        self.released = len(told) == len(releases)
        return join_releases(told) if self.released else None

    def _with_joined(self, event: RunEvent, body: EventBody) -> RunEvent:
        """The event with this body, standing for all that was not told by itself before."""
        joined = tuple(pair for pair in self._joined if pair != (event.part, event.number))
        self._joined = []
        return msgspec.structs.replace(event, body=body, joined=joined)


def _level(part: PartOfRun) -> int | None:
    """Which of the joint kinds the oldest waiting event of a part is; None for one that passes alone."""
    match part.waiting[0][0].body:
        case EnvironmentMoved(ready=True):
            return _READY
        case RanksStarted():
            return _STARTED
        case RunEnded():
            return _ENDED
        case _:
            return None


class JointStalls:
    """Of one run.

    Args:
        parts: On how many nodes it is.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._still: dict[int, Stalled] = {}
        self._told = False

    def told(self, part: int, body: Stalled | Resumed, done: Container[int]) -> Stalled | Resumed | None:
        """A node has said something of its own ranks. Returns what that means for the run, None where nothing.

        Args:
            done: Parts whose ranks have finished: the others may wait for them.
        """
        if isinstance(body, Resumed):
            self._still.pop(part, None)
            told, self._told = self._told, False
            return body if told else None
        self._still[part] = body
        if not all(index in self._still or index in done for index in range(self._parts)):
            return None
        stacks = [stack for still in self._still.values() for stack in still.stacks]
        self._told = True
        return Stalled(
            seconds=min(still.seconds for still in self._still.values()),
            stacks=tuple(sorted(stacks, key=lambda stack: stack.rank)),
        )
