"""Sizes in bytes: what files take, and how that is written."""

from __future__ import annotations

import contextlib
import os


def folder_bytes(folder: str | os.PathLike[str]) -> int:
    """Return what all files below a folder have together. Links count as themselves, hard links each time.

    Files that are removed meanwhile, or can't be looked at, count nothing.
    """
    total = 0
    for directory, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(directory, file)).st_size
    return total


def format_bytes(count: float) -> str:
    """Return `1.2 kB`, `45.1 MB`: decimal units, one digit after the point."""
    if count < 999.5:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"
