"""Locks on files and folders (flock(2)), which the system releases when their holder ends.

A process that uses a folder holds a shared lock on it; one that removes it, or builds it in place, an exclusive lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Generator
from pathlib import Path

LOCK_FILE = os.O_RDWR | os.O_CREAT
"""The flags for opening a lock file."""

# pause before a lock that is held by a probe is tried again
_POLL_S = 0.001


class HeldLock:
    """A lock on a file or folder, held until `close` or the end of the process.

    Args:
        descriptor: The file descriptor that holds the lock.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def is_at(self, path: Path) -> bool:
        """Whether the path names the locked file, which may have been removed or replaced meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        return False

    def share(self) -> None:
        """Turn the lock into a shared one."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        if self._descriptor >= 0:
            # unlock explicitly: closing is not enough if a child process has inherited the descriptor
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1


def take_lock(path: Path, *, shared: bool = False, wait: bool = True, flags: int = os.O_RDONLY) -> HeldLock | None:
    """Lock a file or folder. Returns None if it does not exist, or if another process holds it and `wait` is False.

    Args:
        path: The file or folder.
        shared: Take a shared lock instead of an exclusive one.
        wait: Wait until the lock is free.
        flags: Flags for `os.open`.

    Raises:
        OSError: The path can't be opened.
    """
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if not wait:
        operation |= fcntl.LOCK_NB
    while True:
        try:
            descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return None
        held = HeldLock(descriptor)
        with contextlib.ExitStack() as not_held:
            not_held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, operation)
            except BlockingIOError:
                return None
            # otherwise the previous holder has removed the file: try again with the new one
            if held.is_at(path):
                not_held.pop_all()
                return held


def is_locked(path: Path) -> bool:
    """Whether a process holds an exclusive lock on a file, wherever it runs. False if the file can't be opened.

    The probe holds a shared lock for an instant, which `take_lock_or_none` waits out.
    """
    try:
        held = take_lock(path, shared=True, wait=False)
    except OSError:
        return False
    if held is not None:
        held.close()
        return False
    return path.exists()


def take_lock_or_none(path: Path, flags: int = LOCK_FILE) -> HeldLock | None:
    """Lock a file that others probe with `is_locked`; None if another process holds it exclusively.

    Raises:
        OSError: The path can't be opened.
    """
    while (held := take_lock(path, wait=False, flags=flags)) is None:
        if is_locked(path):
            return None
        # the lock was held by a probe, which has ended by now
        time.sleep(_POLL_S)
    return held


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True, flags: int = os.O_RDONLY) -> Generator[bool]:
    """Hold an exclusive lock for the block, as `take_lock`; yields whether it was acquired."""
    held = take_lock(path, wait=wait, flags=flags)
    try:
        yield held is not None
    finally:
        if held is not None:
            held.close()
