"""A run's directory: its events, read while more are written, and files that it shares with others."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.wire.codec import Decoder, FrameReader
from sgpu_magic.wire.events import Event, Submitted
from sgpu_magic.wire.files import EVENTS
from sgpu_magic.wire.run import RunSpec

_decoder = Decoder[Event](Event)
_READ_BYTES = 1 << 20


class EventFile:
    """Reads `events.msgpack` of a run's directory from where it stopped the last time.

    Each reading begins after the last whole event: what a killed service left half written is cut off by the next
    one, and other bytes come in its place. Holds no file open between two readings.

    Args:
        directory: The run's directory.
        taken_bytes: Where the first reading begins; an event begins there.
    """

    def __init__(self, directory: Path, taken_bytes: int = 0) -> None:
        self._path = directory / EVENTS
        self._taken_bytes = taken_bytes

    @property
    def taken_bytes(self) -> int:
        """How many bytes the events have that were yielded."""
        return self._taken_bytes

    def new_events(self) -> Iterator[tuple[Event, Sequence[bytes]]]:
        """Yield each event that is there and was not yielded before, with its raw frames.

        Raises:
            OSError: There is no event log.
            ValueError: It is damaged.
        """
        reader = FrameReader(_decoder)
        with open(self._path, "rb") as file:
            file.seek(self._taken_bytes)
            read_bytes = self._taken_bytes
            while chunk := file.read(_READ_BYTES):
                read_bytes += len(chunk)
                for event, frames in reader.feed(chunk):
                    self._taken_bytes = read_bytes - reader.incomplete_bytes
                    yield event, frames


def read_spec(directory: Path) -> RunSpec | None:
    """What was submitted, None when the log does not tell."""
    try:
        first = next(EventFile(directory).new_events(), None)
    except (OSError, ValueError, msgspec.DecodeError):
        return None
    return first[0].body.spec if first is not None and isinstance(first[0].body, Submitted) else None


# ---------------------------------------------------------------- files that many directories have alike take room once


def link_or_copy(kept: Path, wanted: Path) -> None:
    """Give a file one more name, or a copy where the disk knows no links or no further one; an older `wanted` goes.

    Raises:
        FileNotFoundError: There is no `kept`, or no directory for `wanted`.
        OSError: It can't be written.
    """
    if wanted.exists() and os.path.samefile(kept, wanted):
        return
    temporary = wanted.with_name(f".{wanted.name}.part")
    temporary.unlink(missing_ok=True)
    try:
        os.link(kept, temporary)
    except OSError:
        shutil.copyfile(kept, temporary)
        shutil.copymode(kept, temporary)
    os.replace(temporary, wanted)


def has_content(path: Path, data: bytes) -> bool:
    """Whether the file is there and has these bytes."""
    with contextlib.suppress(OSError):
        return path.read_bytes() == data
    return False
