"""A run's events: numbered without gaps, kept on disk, sent to who follows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.event_file import EventFile
from sgpu_magic.protocol.codec import Decoder, FrameReader, frame
from sgpu_magic.protocol.events import AttemptFailed, Event, EventBody, PayloadReleased, RunEnded
from sgpu_magic.protocol.node_messages import RunEvent
from sgpu_magic.protocol.run_files import EVENTS

_decoder = Decoder[Event](Event)
_READ_BYTES = 1 << 20


class RunLog:
    """Appends to `events.msgpack` of a run's directory, also to what an earlier service wrote there.

    Args:
        directory: The run's directory, made here.
        run_id: The run.

    Attributes:
        seq: Number of the newest event.
        at: When that was, seconds since the epoch; 0 before the first.
        numbers: By part of the run the agent's number of its newest event that is here, joined with others' or not.
        ended: The run's last word; None while there is none.
        failed_attempt: The newest attempt that failed and has no successor yet; None when there is none.
        payload_released: Nobody reads the payload's memory any more.
        problem: Why events are no longer kept, until somebody has taken it; "" while they are.
    """

    def __init__(self, directory: Path, run_id: str) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory = directory
        self.problem = ""
        self.seq = 0
        self.at = 0.0
        self.numbers: dict[int, int] = {}
        self.ended: RunEnded | None = None
        self.failed_attempt: AttemptFailed | None = None
        self.payload_released = False
        self._run_id = run_id
        self._file = os.open(directory / EVENTS, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if os.fstat(self._file).st_size:
            self._continue()

    @property
    def number(self) -> int:
        """The highest of `numbers`."""
        return max(self.numbers.values(), default=0)

    def append(self, body: EventBody, at: float, frames: Sequence[bytes] = (), told: RunEvent | None = None) -> Event:
        """Give the event its number and keep it. A full disk is noted in `problem` and stops the keeping only.

        Args:
            told: As an agent has told it; None for an event of the service.
        """
        self.seq += 1
        event = Event(run_id=self._run_id, seq=self.seq, at=at, body=body)
        if told is not None:
            event = msgspec.structs.replace(event, number=told.number, part=told.part, joined=told.joined)
        self._count(event)
        if self._file >= 0:
            try:
                os.write(self._file, frame(event, frames))
            except OSError as error:
                self.problem = f"events of this run are no longer kept: {error.strerror}"
                self.close()
        return event

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _count(self, event: Event) -> None:
        self.at = event.at
        for part, number in ((event.part, event.number), *event.joined):
            if number > self.numbers.get(part, 0):
                self.numbers[part] = number
        if isinstance(event.body, RunEnded):
            self.ended = event.body
            self.failed_attempt = None
        elif isinstance(event.body, AttemptFailed):
            self.failed_attempt = event.body
        elif isinstance(event.body, PayloadReleased):
            self.payload_released = True

    def _continue(self) -> None:
        """Go on where a killed service stopped, which may have been in the middle of an event."""
        reader = FrameReader(_decoder)
        size = 0
        while chunk := os.pread(self._file, _READ_BYTES, size):
            size += len(chunk)
            for event, _ in reader.feed(chunk):
                self.seq = event.seq
                self._count(event)
        os.ftruncate(self._file, size - reader.incomplete_bytes)


def read_events(directory: Path, after: int = 0) -> Iterator[tuple[Event, Sequence[bytes]]]:
    """Yield the kept events with a number above `after`.

    Raises:
        OSError: There is no event log.
    """
    for event, frames in EventFile(directory).new_events():
        if event.seq > after:
            yield event, frames
