"""Whether a file is unchanged since it was read, known without reading it again.

Modification time and size are not enough: programs that copy or unpack keep the time, and an edit can keep the size.
The status change time can't be set by a program, and a file put in place of another has its own inode.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

# a second write within the clock's resolution leaves the times unchanged (git's index calls such entries "racy")
_SETTLED_NS = 2_000_000_000


class FileState(msgspec.Struct, frozen=True, array_like=True):
    """What identifies an unchanged file or folder.

    Args:
        size: Size in bytes.
        changed_ns: Modification time in nanoseconds.
        status_changed_ns: Status change time in nanoseconds.
        inode: Its inode.
        device: The device that the inode is on.
    """

    size: int
    changed_ns: int
    status_changed_ns: int
    inode: int
    device: int

    @classmethod
    def from_stat(cls, status: os.stat_result) -> FileState:
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)

    def is_settled(self, at_ns: int) -> bool:
        """Whether a change after this time would give another state.

        Args:
            at_ns: Wall-clock time in nanoseconds, not later than the file was read.
        """
        return max(self.changed_ns, self.status_changed_ns) < at_ns - _SETTLED_NS


class ByFile(Generic[T]):
    """A function of a file's content; its results are cached until the file changes.

    Args:
        compute: Reads the file at a path.
        most: Maximum number of cached results.
    """

    def __init__(self, compute: Callable[[str], T], most: int = 50_000) -> None:
        self._compute = compute

        def read(path: str, state: FileState) -> T:
            return compute(path)

        self._cached = functools.lru_cache(maxsize=most)(read)

    def __call__(self, path: str, state: FileState) -> T:
        """Return the result for a file whose state the caller has just read."""
        return self._cached(path, state) if state.is_settled(time.time_ns()) else self._compute(path)
