"""One run on several nodes, merged from the events that each node's agent reports of its part. No I/O.

Most events pass through: they name global ranks. Three kinds concern the whole run and wait until every node has
reported its own: packages ready, all ranks in the process group, run ended. Later events of a node wait behind such an
event, so the number of the newest event passed on never exceeds that of one held back: a restarted pool service asks
each agent for the events after that number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence

import msgspec

from sgpu_magic.nodes.engine_reports import PartEnd, join_ends, join_releases, join_starts
from sgpu_magic.wire.events import EnvironmentMoved, EventBody, Noted, PayloadReleased, RanksStarted, RunEnded
from sgpu_magic.wire.node import RunEvent
from sgpu_magic.wire.rank_events import Resumed, Stalled

MergedEvent = tuple[RunEvent, Sequence[bytes]]

# in order of occurrence; a part that skips one (for example, fails early) does not hold up the others
_READY, _STARTED, _ENDED = range(3)


class PartOfRun(msgspec.Struct):
    """The state of one node's part.

    Args:
        received: Number of the newest event received.
        passed: Number of the newest event passed on, alone or merged: its agent need not resend events up to it.
        waiting: Events received and not passed on yet, oldest first.
        ahead_s: Lower bound of how far the node's clock is ahead of this one, in seconds; None before its first event.
        ended: Its `RunEnded` was merged with those of the others.
        released: What became of the payload there.
        end_reported: It has ended, even if its `RunEnded` still waits for its results.
        free: Its processes have exited; files may still arrive.
        has_exited: Its ranks have exited, and nothing more will arrive.
        lost: Its node is lost.
    """

    received: int = 0
    passed: int = 0
    waiting: deque[MergedEvent] = msgspec.field(default_factory=deque[MergedEvent])
    ahead_s: float | None = None
    ended: bool = False
    released: PayloadReleased | None = None
    end_reported: bool = False
    free: bool = False
    has_exited: bool = False
    lost: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether its ranks have exited or can't be reached any more."""
        return self.has_exited or self.lost


class JointRun:
    """Merges the events of one attempt of a run.

    Args:
        parts: The number of nodes.
        numbers: By part, the number of the newest event that the pool has persisted; None for a new run.

    Attributes:
        ended: Every part has ended, and the run's `RunEnded` was passed on.
        released: The run's `PayloadReleased` was passed on.
        parts: The state of each part; the caller sets `end_reported` and `free`.
    """

    def __init__(self, parts: int, numbers: Mapping[int, int] | None = None) -> None:
        self.parts = [PartOfRun() for _ in range(parts)]
        for index, part in enumerate(self.parts):
            part.received = part.passed = (numbers or {}).get(index, 0)
        # (part, number) of merged events, reported with the next event that is passed on
        self._joined: list[tuple[int, int]] = []
        self._notes: set[str] = set()
        self._stalls = JointStalls(parts)
        self.released = False
        self.ended = False

    @property
    def all_ended(self) -> bool:
        """Whether every part has ended, including those whose `RunEnded` is still to come."""
        return all(part.end_reported or part.ended or part.has_ended for part in self.parts)

    @property
    def free(self) -> bool:
        """Whether all its processes have exited on every node; files may still arrive."""
        return all(part.free or part.has_ended for part in self.parts)

    @property
    def has_exited(self) -> bool:
        """Whether its ranks have exited on every node and nothing more will arrive."""
        return all(part.has_ended for part in self.parts)

    @property
    def is_lost(self) -> bool:
        """Whether one of its nodes was lost: then its agents don't decide how the run ends."""
        return any(part.lost for part in self.parts)

    def on_event(self, index: int, event: RunEvent, frames: Sequence[bytes], now: float) -> list[MergedEvent]:
        """Take an event of a node. Returns the events to pass on.

        Args:
            index: The node's part.
            event: The event.
            frames: Its raw frames.
            now: Wall-clock time here, seconds since the epoch.
        """
        part = self.parts[index]
        if part.lost or event.number <= part.received:
            # from a node that was given up, or repeated after its link was lost
            return []
        part.received = event.number
        if len(self.parts) == 1:
            # there is nothing to merge with
            part.passed = event.number
            self.ended |= isinstance(event.body, RunEnded)
            self.released |= isinstance(event.body, PayloadReleased)
            return [(event, frames)]
        ahead_s = event.at - now
        part.ahead_s = ahead_s if part.ahead_s is None else max(part.ahead_s, ahead_s)
        part.waiting.append((msgspec.structs.replace(event, part=index), frames))
        return self._pass_on()

    def part_exited(self, index: int) -> list[MergedEvent]:
        """The ranks of a part have exited: only its `PayloadReleased` may follow. Returns the events to pass on."""
        self.parts[index].has_exited = True
        return self._pass_on()

    def part_lost(self, index: int) -> list[MergedEvent]:
        """The node of a part, or its agent, is lost. Returns the events to pass on."""
        part = self.parts[index]
        part.lost = True
        part.waiting.clear()
        return self._pass_on()

    # ------------------------------------------------------------ internals

    def _pass_on(self) -> list[MergedEvent]:
        merged: list[MergedEvent] = []
        while True:
            for part in self.parts:
                while part.waiting and _level(part) is None:
                    event, frames = part.waiting.popleft()
                    part.passed = event.number
                    merged += [(alone, frames) for alone in self._alone(event)]
            joined = self._join()
            if joined is None:
                return merged
            merged += joined

    def _alone(self, event: RunEvent) -> list[RunEvent]:
        """The events to pass on for one that waits for no other node."""
        body: EventBody | None = event.body
        match body:
            case PayloadReleased():
                body = self._released(event.part, body)
            case Noted(text=text):
                # the same note from several nodes is shown once
                body = None if text in self._notes else body
                self._notes.add(text)
            case Stalled() | Resumed():
                done = {index for index, part in enumerate(self.parts) if part.waiting and _level(part) == _ENDED}
                body = self._stalls.merge(event.part, body, done)
            case _:
                pass
        if body is None:
            self._joined.append((event.part, event.number))
            return []
        return [self._with_joined(event, body)]

    def _join(self) -> list[MergedEvent] | None:
        """Merge the next event that every node has reported; None while there is none."""
        levels: dict[int, int] = {}
        for index, part in enumerate(self.parts):
            if part.waiting:
                levels[index] = _level(part) or _READY
            elif not (part.ended or part.has_ended):
                return None
        if not levels:
            return None
        level = min(levels.values())
        at = [self._next_event(index) for index, own in levels.items() if own == level]
        if level == _READY:
            return [(self._with_joined(event, event.body), frames) for event, frames in at]
        self._joined += [(event.part, event.number) for event, _ in at]
        if level == _STARTED and len(at) == len(self.parts):
            starts = [event.body for event, _ in at if isinstance(event.body, RanksStarted)]
            return [(self._with_joined(at[-1][0], join_starts(starts)), ())]
        if level == _ENDED and not self.is_lost:
            return [self._end(at)]
        # some part skipped this level, or is lost: these events neither start nor end the run
        return []

    def _next_event(self, index: int) -> MergedEvent:
        part = self.parts[index]
        event, frames = part.waiting.popleft()
        part.passed = event.number
        part.ended |= isinstance(event.body, RunEnded)
        return event, frames

    def _end(self, at: Sequence[MergedEvent]) -> MergedEvent:
        ends = [
            PartEnd(event.body, frames, self.parts[event.part].ahead_s or 0.0)
            for event, frames in at
            if isinstance(event.body, RunEnded)
        ]
        ended, frames = join_ends(ends)
        self.ended = True
        return self._with_joined(at[-1][0], ended), frames

    def _released(self, index: int, body: PayloadReleased) -> PayloadReleased | None:
        """The run's `PayloadReleased`, once every node has released it. An adopted part reports it again."""
        self.parts[index].released = body
        if self.released:
            return None
        releases = [part.released for part in self.parts if not part.lost]
        given = [release for release in releases if release is not None]
        self.released = len(given) == len(releases)
        return join_releases(given) if self.released else None

    def _with_joined(self, event: RunEvent, body: EventBody) -> RunEvent:
        """The event with this body; its `joined` lists the events that were merged since the last one."""
        joined = tuple(pair for pair in self._joined if pair != (event.part, event.number))
        self._joined = []
        return msgspec.structs.replace(event, body=body, joined=joined)


def _level(part: PartOfRun) -> int | None:
    """The level of a part's oldest waiting event; None for one that passes through alone."""
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
    """Merges the stalls of one run: it is stalled when the ranks of every node are.

    Args:
        parts: The number of nodes.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._still: dict[int, Stalled] = {}
        self._is_reported = False

    def merge(self, part: int, body: Stalled | Resumed, done: Container[int]) -> Stalled | Resumed | None:
        """Take a node's report on its own ranks. Returns the event of the run, None if there is none.

        Args:
            part: The node's part.
            body: The report.
            done: Parts whose ranks have finished; the others may wait for them.
        """
        if isinstance(body, Resumed):
            self._still.pop(part, None)
            was_reported, self._is_reported = self._is_reported, False
            return body if was_reported else None
        self._still[part] = body
        if not all(index in self._still or index in done for index in range(self._parts)):
            return None
        stacks = [stack for still in self._still.values() for stack in still.stacks]
        self._is_reported = True
        return Stalled(
            seconds=min(still.seconds for still in self._still.values()),
            stacks=tuple(sorted(stacks, key=lambda stack: stack.rank)),
        )
