"""The small files that a cell's text names, which travel with it to another machine (`--files auto`)."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from sgpu_magic.formatting import count_of, format_bytes, names_text
from sgpu_magic.payload.names import strings_in
from sgpu_magic.wire.events import as_warning

MOST_BYTES = 50_000_000
"""A larger file does not travel by itself."""

_MOST_FILES = 100
_MOST_CHARS = 1000


class NamedFiles(NamedTuple):
    """Files that a cell names, by their paths relative to the notebook's folder, with their sizes in bytes.

    Args:
        small: Those that travel.
        large: Those that are larger than `MOST_BYTES`.
    """

    small: dict[str, int]
    large: dict[str, int]

    def notes(self) -> Iterator[str]:
        """Yield what a run's view says about them."""
        if self.small:
            total = format_bytes(sum(self.small.values()))
            yield f"took along {names_text(self.small)} ({count_of(len(self.small), 'file')}, {total})"
        for name, size in self.large.items():
            yield as_warning(
                f"{name} ({format_bytes(size)}) is named in the cell and was not taken along, since it is larger than "
                f"{format_bytes(MOST_BYTES)}: add --upload {name}"
            )


def files_named_in(source: str, folder: Path, uploads: Collection[str] = ()) -> NamedFiles:
    """Return the files that the strings of a cell name.

    Args:
        source: The cell's text.
        folder: The notebook's folder; only files below it count, links followed.
        uploads: Paths that are uploaded anyway: files below them are left out.
    """
    root = os.path.realpath(folder)
    others = tuple(os.path.realpath(folder / os.path.expanduser(path)) for path in uploads)
    found = NamedFiles({}, {})
    for text in dict.fromkeys(strings_in(source)):
        name = os.path.normpath(text)
        if len(found.small) + len(found.large) == _MOST_FILES:
            break
        if not _is_name(text) or not (real := os.path.realpath(folder / name)).startswith(f"{root}{os.sep}"):
            continue
        if os.path.isfile(real) and not any(os.path.commonpath((real, other)) == other for other in others):
            size = os.path.getsize(real)
            (found.small if size <= MOST_BYTES else found.large)[name] = size
    return found


def _is_name(text: str) -> bool:
    """Whether a string may name a file below the notebook's folder, where ranks find it at the same path."""
    if not 0 < len(text) <= _MOST_CHARS or not text.isprintable():
        return False
    return not os.path.isabs(text) and os.pardir not in text.split(os.sep)
