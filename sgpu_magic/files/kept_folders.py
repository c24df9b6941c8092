"""Folders that are built once under their names and kept while in use; eviction in order of last use.

A process that uses a folder holds a shared lock on it (flock(2), released when the process exits); one that removes it,
or builds it in place, holds an exclusive lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from sgpu_magic.config import private_dir
from sgpu_magic.system.byte_sizes import folder_bytes

LOCK_FILE = os.O_RDWR | os.O_CREAT
"""The flags for opening a lock file."""

# leftovers of interrupted programs are removed after this time
_LEFTOVER_S = 3600.0
_MOST_COPIES = 8

T = TypeVar("T")


# ---------------------------------------------------------------- locks


class HeldLock:
    """A lock on a file or folder, held until `close` or the end of the process.

    Args:
        descriptor: The file descriptor that holds the lock.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def share(self) -> None:
        """Turn the lock into a shared one."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        if self._descriptor >= 0:
            # explicitly, since closing is not enough: a child process may have inherited the descriptor
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
    while True:
        try:
            descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return None
        with contextlib.ExitStack() as not_held:
            not_held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                return None
            # the previous holder may have removed the file meanwhile: then try again with the new one
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    not_held.pop_all()
                    return HeldLock(descriptor)


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True, flags: int = os.O_RDONLY) -> Generator[bool]:
    """Hold an exclusive lock for the block, as `take_lock`; yields whether it was acquired."""
    held = take_lock(path, wait=wait, flags=flags)
    try:
        yield held is not None
    finally:
        if held is not None:
            held.close()


# ---------------------------------------------------------------- room


def evict(entries: Iterable[tuple[float, int, T]], most_bytes: float, remove: Callable[[T], bool]) -> int:
    """Remove the least recently used entries until the total size is at most `most_bytes`; return the total size left.

    Args:
        entries: For each entry the time of its last use, its size in bytes, and the entry itself.
        most_bytes: The size that may stay.
        remove: Removes an entry; returns False if it has to stay.
    """
    kept = sorted(entries, key=lambda entry: entry[:2])
    total = sum(size for _, size, _ in kept)
    for _, size, entry in kept:
        if total <= most_bytes:
            break
        if remove(entry):
            total -= size
    return total


def keep_newest(folder: Path, most: int) -> None:
    """Remove all but the newest files and folders in a folder."""
    with contextlib.suppress(FileNotFoundError):
        found = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in found[most:]:
            remove_tree(path)


def remove_unused(folder: Path) -> bool:
    """Remove a folder unless it is locked. Returns whether it is gone."""
    with locked(folder, wait=False) as mine:
        if mine:
            # rename it first, so that a partly removed folder is never visible under its name
            doomed = folder.with_name(f".{folder.name[:16]}-{time.monotonic_ns()}.gone")
            os.rename(folder, doomed)
            remove_tree(doomed)
        return not folder.exists()


def remove_tree(path: Path) -> None:
    """Remove a file or a folder, even if it is read-only. Another process may be removing it at the same time."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for directory, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            os.chmod(directory, stat.S_IRWXU)
    shutil.rmtree(path, ignore_errors=True)


# ---------------------------------------------------------------- held by this process


class KeptFolders:
    """Folders of one kind, each locked while this process has users of it. Thread-safe.

    Args:
        root: The directory of the folders.
        most_bytes: The total size that they may have. Folders in use are never removed.
    """

    def __init__(self, root: Path, most_bytes: int) -> None:
        self._root = root
        self._most_bytes = most_bytes
        self._making = threading.Lock()
        self._changing = threading.Lock()
        self._held: dict[str, tuple[HeldLock, Path]] = {}
        self._users: dict[str, set[str]] = {}

    def want(self, name: str, user: str) -> Path | None:
        """Keep a folder for a user until `release`, even before it is built. Returns its path if it is held already."""
        with self._changing:
            self._users.setdefault(name, set()).add(user)
            return self._held[name][1] if name in self._held else None

    def is_wanted(self, name: str, user: str) -> bool:
        return user in self._users.get(name, ())

    def find(self, name: str, is_whole: Callable[[Path], bool] = Path.is_dir) -> Path | None:
        """Lock the existing folder and return its path; None if there is none. Damaged copies are removed if unused."""
        for path in self._copies(name):
            held = take_lock(path, shared=True)
            if held is not None and is_whole(path):
                os.utime(path)
                return self._hold(name, held, path)
            if held is not None:
                held.close()
                remove_unused(path)
        return None

    def put(self, name: str, fill: Callable[[Path], None], is_whole: Callable[[Path], bool] = Path.is_dir) -> Path:
        """Lock a folder and return its path; build it first if it does not exist.

        Args:
            name: The folder's name.
            fill: Writes the contents into an empty folder, which appears under its name once it is complete.
            is_whole: Whether an existing folder is intact.

        Raises:
            OSError: The folder can't be written.
        """
        with self._making:
            if (found := self.find(name, is_whole)) is not None:
                return found
            private_dir(self._root.parent)
            temporary = private_dir(self._root) / f".{name[:16]}-{os.getpid()}-{time.monotonic_ns()}.part"
            try:
                temporary.mkdir(mode=0o700)
                fill(temporary)
                held, path = self._placed(name, temporary, is_whole)
            finally:
                remove_tree(temporary)
            self._make_room()
        return self._hold(name, held, path)

    def release(self, user: str) -> None:
        """Release all folders of a user."""
        with self._changing:
            for name, users in list(self._users.items()):
                users.discard(user)
                if not users:
                    del self._users[name]
                    if name in self._held:
                        self._held.pop(name)[0].close()

    def close(self) -> None:
        """Release all folders of all users."""
        with self._changing:
            for held, _ in self._held.values():
                held.close()
            self._held.clear()
            self._users.clear()

    # ------------------------------------------------------------ within

    def _copies(self, name: str) -> Sequence[Path]:
        """Candidate paths: a damaged copy stays at its path while it is used, so there can be several copies."""
        return [self._root / (f"{name}-{number}" if number else name) for number in range(_MOST_COPIES)]

    def _placed(self, name: str, temporary: Path, is_whole: Callable[[Path], bool]) -> tuple[HeldLock, Path]:
        for path in self._copies(name):
            try:
                os.rename(temporary, path)
            except OSError:
                if not path.is_dir():
                    raise
            held = take_lock(path, shared=True)
            if held is None:
                raise OSError(f"{path} was removed right after it was created")
            if is_whole(path):
                return held, path
            held.close()
        raise OSError("its earlier copies on this node were changed, and runs use them")

    def _hold(self, name: str, held: HeldLock, path: Path) -> Path:
        with self._changing:
            if name in self._held or name not in self._users:
                # another thread was first, or it has no users any more
                held.close()
            else:
                self._held[name] = held, path
            return self._held[name][1] if name in self._held else path

    def _make_room(self) -> None:
        now = time.time()
        kept: list[tuple[float, int, Path]] = []
        for path in self._root.iterdir():
            with contextlib.suppress(FileNotFoundError):
                used_at = path.stat().st_mtime
                if not path.name.startswith("."):
                    kept.append((used_at, folder_bytes(path), path))
                elif now - used_at > _LEFTOVER_S:
                    remove_tree(path)
        evict(kept, self._most_bytes, remove_unused)
