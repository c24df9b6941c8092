"""A run's event log: events are numbered without gaps and stored on disk."""

from __future__ import annotations

import bisect
import contextlib
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.wire.codec import frame
from sgpu_magic.wire.events import AttemptFailed, Event, EventBody, Noted, PayloadReleased, RunEnded, SessionMoved
from sgpu_magic.wire.files import EVENTS
from sgpu_magic.wire.node import RunEvent
from sgpu_magic.wire.rank_events import DisplayPublished, MetricsLogged, OutputWritten, Sampled

# limit for a run's events in memory while the disk accepts no writes
_MOST_UNWRITTEN_BYTES = 16 << 20
# minimum memory that an event counts as
_LEAST_BYTES = 1000
# distance between remembered offsets in the file
_MARK_BYTES = 1 << 18
_BULK = (OutputWritten, DisplayPublished, Sampled, MetricsLogged)


class RunLog:
    """Appends to `events.msgpack` in a run's directory, and continues the file of an earlier service.

    Events that can't be written stay in memory until the disk accepts them. Their memory is bounded: of the oldest
    events, output is reduced to its size (the text is in the rank's log), and displays, samples and metrics are
    replaced by a note.

    Args:
        directory: The run's directory, created here.
        run_id: The run.

    Attributes:
        seq: Number of the newest event.
        at: Time of the newest event, seconds since the epoch; 0 before the first.
        numbers: By part of the run, the agent's number of its newest event in this log, merged with others or not.
        written: By part of the run, the agent's number of its newest event on disk.
        ended: The run's final event; None before it.
        failed_attempt: The newest failed attempt; None when there is none, or the run has ended.
        payload_released: Whether the payload's memory was released.
        dead_ranks: For a session: its ranks that are dead until they are restarted.
        unwritten: Events that are not on disk yet, oldest first. Only the log changes it.
        problem: Why events are only in memory, or what was wrong with the file; "" when nothing is.
    """

    def __init__(self, directory: Path, run_id: str) -> None:
        self.directory = directory
        self.problem = ""
        self.seq = 0
        self.at = 0.0
        self.numbers: dict[int, int] = {}
        self.written: dict[int, int] = {}
        self.ended: RunEnded | None = None
        self.failed_attempt: AttemptFailed | None = None
        self.payload_released = False
        self.dead_ranks: tuple[int, ...] = ()
        self._run_id = run_id
        self._closing = False
        self._file = -1
        # the size of the complete events in the file
        self._bytes = 0
        # (number of an event, offset after it)
        self._marks: list[tuple[int, int]] = [(0, 0)]
        self.unwritten: deque[tuple[Event, Sequence[bytes]]] = deque()
        self._unwritten_bytes = 0
        # how many of the oldest unwritten events are already reduced
        self._cut = 0
        try:
            self._open()
        except OSError as error:
            self._failed(error)
            with contextlib.suppress(OSError):
                self._continue()
        else:
            self._continue()

    @property
    def number(self) -> int:
        """The highest of `numbers`."""
        return max(self.numbers.values(), default=0)

    def takes(self, body: EventBody) -> bool:
        """Whether the log accepts an event: it refuses bulk, such as output, once too much is unwritten."""
        return self._unwritten_bytes <= _MOST_UNWRITTEN_BYTES or not isinstance(body, _BULK)

    def offset_before(self, after: int) -> int:
        """Return an offset in the file before which no event has a number above `after`."""
        at = bisect.bisect_right(self._marks, after, key=lambda mark: mark[0]) - 1
        return self._marks[at][1]

    def append(self, body: EventBody, at: float, frames: Sequence[bytes] = (), report: RunEvent | None = None) -> Event:
        """Number an event and store it.

        Args:
            body: The event's content.
            at: Its time, seconds since the epoch.
            frames: Its raw frames.
            report: The agent's report of it; None for an event of the service.
        """
        self.seq += 1
        event = Event(run_id=self._run_id, seq=self.seq, at=at, body=body)
        if report is not None:
            event = msgspec.structs.replace(event, number=report.number, part=report.part, joined=report.joined)
        self._count(event)
        self.unwritten.append((event, frames))
        self._unwritten_bytes += _size(event, frames)
        if not self.write() and self._unwritten_bytes > _MOST_UNWRITTEN_BYTES:
            self._cut_oldest()
        return event

    def skip(self, report: RunEvent) -> None:
        """Count an agent's event as written without storing it."""
        _count_number(self.numbers, report)
        _count_number(self.written, report)

    def write(self) -> bool:
        """Write the unwritten events. Returns whether all of them are on disk now."""
        try:
            if self.unwritten and self._file < 0:
                self._open()
            while self.unwritten:
                event, frames = self.unwritten[0]
                self._write_whole(frame(event, frames))
                self.unwritten.popleft()
                self._unwritten_bytes -= _size(event, frames)
                self._cut = max(0, self._cut - 1)
                _count_number(self.written, event)
                self._mark(event.seq)
        except OSError as error:
            self._failed(error)
            return False
        self.problem = ""
        if self._closing and self._file >= 0:
            os.close(self._file)
            self._file = -1
        return True

    def close(self) -> None:
        """Close the file, now or after the `write` that writes the last unwritten event."""
        self._closing = True
        self.write()

    def _open(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(self.directory / EVENTS, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _write_whole(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            # remove a partly written event, so that the next one follows a complete one
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._bytes)
            raise
        self._bytes += len(data)

    def _failed(self, error: OSError) -> None:
        self.problem = error.strerror or str(error)
        if self._file >= 0:
            # the file may have been removed: the next attempt starts by creating the directory
            os.close(self._file)
            self._file = -1

    def _cut_oldest(self) -> None:
        for at in range(self._cut, len(self.unwritten)):
            if self._unwritten_bytes <= _MOST_UNWRITTEN_BYTES // 2:
                break
            event, frames = self.unwritten[at]
            small = msgspec.structs.replace(event, body=_without_bulk(event.body))
            kept = frames if small.body is event.body else ()
            self._unwritten_bytes += _size(small, kept) - _size(event, frames)
            self.unwritten[at] = small, kept
            self._cut = at + 1

    def _mark(self, seq: int) -> None:
        if self._bytes - self._marks[-1][1] >= _MARK_BYTES:
            self._marks.append((seq, self._bytes))

    def _count(self, event: Event) -> None:
        self.at = event.at
        _count_number(self.numbers, event)
        match event.body:
            case RunEnded():
                self.ended = event.body
                self.failed_attempt = None
            case AttemptFailed():
                self.failed_attempt = event.body
                self.dead_ranks = ()
            case PayloadReleased():
                self.payload_released = True
            case SessionMoved(dead=dead):
                self.dead_ranks = dead
            case _:
                pass

    def _continue(self) -> None:
        """Continue the file of a killed service, which may end in the middle of an event."""
        file = EventFile(self.directory)
        try:
            for event, _ in file.new_events():
                self._bytes, self.seq = file.taken_bytes, event.seq
                self._count(event)
                self._mark(event.seq)
        except (ValueError, msgspec.DecodeError) as error:
            self.problem = f"{self.directory / EVENTS} is damaged after event {self.seq} and was cut off there: {error}"
        self.written = dict(self.numbers)
        if self._file >= 0 and self._bytes < os.fstat(self._file).st_size:
            os.ftruncate(self._file, self._bytes)


def _count_number(numbers: dict[int, int], event: Event | RunEvent) -> None:
    for part, number in ((event.part, event.number), *event.joined):
        if number > numbers.get(part, 0):
            numbers[part] = number


def _size(event: Event, frames: Sequence[bytes]) -> int:
    match event.body:
        case OutputWritten(text=bulk) | DisplayPublished(bundle=bulk):
            size = len(bulk)
        case Sampled(samples=points) | MetricsLogged(metrics=points):
            size = _LEAST_BYTES * len(points)
        case _:
            size = 0
    return size + _LEAST_BYTES + sum(map(len, frames))


def _without_bulk(body: EventBody) -> EventBody:
    match body:
        case OutputWritten(text=text):
            lines = body.skipped_lines + text.count("\n")
            return msgspec.structs.replace(body, text="", skipped_bytes=body.end - body.start, skipped_lines=lines)
        case DisplayPublished(rank=rank):
            return Noted(text=f"a display of rank {rank} is not kept: the pool's disk was full for too long")
        case MetricsLogged(rank=rank):
            return Noted(text=f"metrics of rank {rank} are not kept: the pool's disk was full for too long")
        case Sampled():
            return Noted(text="a sample of the ranks is not kept: the pool's disk was full for too long")
        case _:
            return body
