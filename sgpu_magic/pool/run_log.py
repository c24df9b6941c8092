"""A run's events: numbered without gaps, kept on disk, sent to who follows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.protocol.codec import FrameReader, frame
from sgpu_magic.protocol.events import Event, EventBody

EVENTS = "events.msgpack"
_decoder = msgspec.msgpack.Decoder(Event)


class RunLog:
    """Appends to `events.msgpack` of a run's directory.

    Args:
        directory: The run's directory, made here.
        run_id: The run.
    """

    def __init__(self, directory: Path, run_id: str) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory = directory
        self.problem = ""
        self._run_id = run_id
        self._seq = 0
        self._file = os.open(directory / EVENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def append(self, body: EventBody, at: float, frames: Sequence[bytes] = ()) -> Event:
        """Give the event its number and keep it. A full disk is noted in `problem` and stops the keeping only."""
        self._seq += 1
        event = Event(run_id=self._run_id, seq=self._seq, at=at, body=body)
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


def read_events(directory: Path, after: int = 0) -> Iterator[tuple[Event, Sequence[bytes]]]:
    """Yield the kept events with a number above `after`.

    Raises:
        OSError: There is no event log.
    """
    reader = FrameReader(_decoder)
    with open(directory / EVENTS, "rb") as file:
        while chunk := file.read(1 << 20):
            for event, frames in reader.feed(chunk):
                if event.seq > after:
                    yield event, frames
