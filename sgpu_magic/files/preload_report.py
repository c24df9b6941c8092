"""The file in which a pool's agent describes what its zygotes have executed ahead; `sgpu doctor` reads it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sgpu_magic.files.atomic_file import read_json, write_whole
from sgpu_magic.wire.base import Record

FILE = "preload.json"
"""Its name in the pool's state directory."""


class PreloadRow(Record, frozen=True, kw_only=True):
    """What one zygote has executed ahead.

    Args:
        executable: The Python.
        pid: The zygote.
        roots: The imports.
        modules: Number of modules.
        bytes: Memory that they take.
        refused: Imports of which not everything is executed ahead, and why.
    """

    executable: str
    pid: int
    roots: tuple[str, ...]
    modules: int
    bytes: int
    refused: dict[str, str]


def write_report(state: Path, rows: Sequence[PreloadRow]) -> None:
    """Write the file; a full disk leaves it as it is."""
    with contextlib.suppress(OSError):
        write_whole(state / FILE, msgspec.json.encode(rows))


def read_report(state: Path) -> list[PreloadRow]:
    """Return the rows of the zygotes that live."""
    rows = read_json(state / FILE, list[PreloadRow]) or []
    return [row for row in rows if row.pid > 0 and os.path.exists(f"/proc/{row.pid}")]
