"""What a run's directory has of it, read for a replay. Nothing is unpickled here."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sgpu_magic.errors import UsageError
from sgpu_magic.event_file import EventFile
from sgpu_magic.payload.pack import Packed
from sgpu_magic.protocol.events import Described
from sgpu_magic.protocol.ids import short
from sgpu_magic.protocol.payloads import PackedLayout
from sgpu_magic.protocol.records import RunSpec
from sgpu_magic.protocol.run_files import KEY, PAYLOAD
from sgpu_magic.protocol.run_record import RUN_RECORD, RunRecord
from sgpu_magic.protocol.states import RunKind

REQUIREMENTS = "requirements.txt"
_REPLAYABLE = (RunKind.CELL, RunKind.CALL)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run as its directory has it.

    Args:
        directory: Where that is.
        record: `run.json`.
        packed: The payload; its buffers are views of the file.
        key: The payload's HMAC key.
        tags: What was found out about the run after it was submitted, such as its git commit.
    """

    directory: Path
    record: RunRecord
    packed: Packed
    key: bytes
    tags: dict[str, str]

    @property
    def spec(self) -> RunSpec:
        return self.record.spec

    @property
    def requirements(self) -> Path | None:
        """The pins of its packages, None where they were not written."""
        path = self.directory / REQUIREMENTS
        return path if path.is_file() else None


def read_recorded(directory: Path) -> Recorded:
    """Read a run's directory.

    Raises:
        UsageError: It has nothing that could be launched again; says what is missing and why.
    """
    run = short(directory.name)
    try:
        record = msgspec.json.decode((directory / RUN_RECORD).read_bytes(), type=RunRecord)
    except FileNotFoundError:
        raise UsageError(
            f"run {run} can't be replayed: its ranks never started, so its directory {directory} has no {RUN_RECORD}. "
            "Run its cell again."
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"run {run} can't be replayed: {directory / RUN_RECORD} can't be read ({error}). Run its cell again."
        ) from None
    if record.spec.kind not in _REPLAYABLE:
        raise UsageError(f"run {run} is a {record.spec.kind.value}: only cells and calls of functions can be replayed.")
    if not record.payload_kept:
        raise UsageError(
            f"run {run} can't be replayed: its variables are not in {directory}: {record.payload_note}. Run its cell "
            "again; the setting keep_payload says how large a payload is kept."
        )
    try:
        key = (directory / KEY).read_bytes()
        packed = _packed(directory / PAYLOAD, record.payload_layout, record.spec.shipped.names)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"run {run} can't be replayed: its variables in {directory} can't be read ({error}). Run its cell again."
        ) from None
    return Recorded(directory, record, packed, key, _described(directory))


def _packed(path: Path, layout: PackedLayout, names: tuple[str, ...]) -> Packed:
    size = os.path.getsize(path)
    end = max((offset + length for offset, length in layout.buffers), default=layout.pickle_size)
    if size < end:
        raise ValueError(f"{path.name} has {size:,} bytes of {end:,}")
    with open(path, "rb") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    buffers = [whole[offset : offset + length] for offset, length in layout.buffers]
    return Packed(bytes(whole[: layout.pickle_size]), buffers, layout, names, {}, end)


def _described(directory: Path) -> dict[str, str]:
    tags: dict[str, str] = {}
    try:
        for event, _ in EventFile(directory).new_events():
            if isinstance(event.body, Described):
                tags.update(event.body.tags)
    except (OSError, ValueError, msgspec.DecodeError):
        # what differs is told from what there is
        return tags
    return tags
