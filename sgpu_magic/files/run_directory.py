"""A run's directory: its event log, readable while it grows, and files shared with other runs' directories."""

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
    """Reads `events.msgpack` of a run's directory incrementally.

    Each read begins after the last complete event: a partial event that a killed service left behind is truncated by
    the next service and overwritten. No file stays open between two reads.

    Args:
        directory: The run's directory.
        taken_bytes: The offset of the first read, at the beginning of an event.
    """

    def __init__(self, directory: Path, taken_bytes: int = 0) -> None:
        self._path = directory / EVENTS
        self._taken_bytes = taken_bytes

    @property
    def taken_bytes(self) -> int:
        """The offset in the file after the last event that was yielded."""
        return self._taken_bytes

    def new_events(self) -> Iterator[tuple[Event, Sequence[bytes]]]:
        """Yield each event that was not yielded before, with its raw frames.

        Raises:
            OSError: There is no event log.
            ValueError: The log is damaged.
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
    """The spec of the submitted run, None if the log does not contain it."""
    try:
        first = next(EventFile(directory).new_events(), None)
    except (OSError, ValueError, msgspec.DecodeError):
        return None
    return first[0].body.spec if first is not None and isinstance(first[0].body, Submitted) else None


# ---------------------------------------------------------------- files shared by many directories


def link_or_copy(kept: Path, wanted: Path) -> None:
    """Hard-link `kept` as `wanted`, or copy it if it can't be linked; replaces an older `wanted`.

    Raises:
        FileNotFoundError: `kept`, or the directory of `wanted`, does not exist.
        OSError: `wanted` can't be written.
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
    """Whether the file exists and has exactly these bytes."""
    with contextlib.suppress(OSError):
        return path.read_bytes() == data
    return False
