"""Folders that are made once under their names, and kept while somebody uses them; the longest unused go first.

A lock (flock(2), which ends with its process) is held shared by whoever uses a folder, and exclusively by whoever makes
or removes it.
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
"""How a file is opened that is there to be locked."""

# what an interrupted program has left is removed after this
_LEFTOVER_S = 3600.0
_MOST_COPIES = 8

T = TypeVar("T")


# ---------------------------------------------------------------- locks


class HeldLock:
    """A lock on a file or folder; gone with the process, or by `close`.

    Args:
        descriptor: Of the file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def share(self) -> None:
        """Others may use it too from now on."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        if self._descriptor >= 0:
            # said, not left to the descriptor's end: a child of this process may have inherited it
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1


def take_lock(path: Path, *, shared: bool = False, wait: bool = True, flags: int = os.O_RDONLY) -> HeldLock | None:
    """Lock a file or folder; None when it is not there, or somebody else has it and `wait` is False.

    Args:
        path: The file or folder.
        shared: Others may hold it the same way; else nobody may.
        wait: Until it can be had.
        flags: How it is opened, as of `os.open`.

    Raises:
        OSError: It can't be opened.
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
            # whoever held it may have removed it meanwhile: that is nobody's lock any more
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    not_held.pop_all()
                    return HeldLock(descriptor)


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True, flags: int = os.O_RDONLY) -> Generator[bool]:
    """Lock a file or folder against all others for the block; yields whether it could be had. As `take_lock`."""
    held = take_lock(path, wait=wait, flags=flags)
    try:
        yield held is not None
    finally:
        if held is not None:
            held.close()


# ---------------------------------------------------------------- room


def evict(entries: Iterable[tuple[float, int, T]], most_bytes: float, remove: Callable[[T], bool]) -> int:
    """Remove the longest unused until the others have no more bytes than that together; return what is left.

    Args:
        entries: Of each when it was used last, its size in bytes, and itself.
        most_bytes: What may stay.
        remove: Removes one; returns False for one that has to stay.
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
    """Remove a folder that nobody has locked. Whether it is gone."""
    with locked(folder, wait=False) as mine:
        if mine:
            # out of sight first: a folder is there whole or not at all
            doomed = folder.with_name(f".{folder.name[:16]}-{time.monotonic_ns()}.gone")
            os.rename(folder, doomed)
            remove_tree(doomed)
        return not folder.exists()


def remove_tree(path: Path) -> None:
    """Remove a file or a folder, also one in which nothing may be written; another process may be at it too."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for directory, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            os.chmod(directory, stat.S_IRWXU)
    shutil.rmtree(path, ignore_errors=True)


# ---------------------------------------------------------------- held by this process


class KeptFolders:
    """Folders of one kind, each locked while somebody here wants it. Methods may be called by any thread.

    Args:
        root: Where they are, by name.
        most_bytes: What all of them may have together. What is in use stays, whatever it has.
    """

    def __init__(self, root: Path, most_bytes: int) -> None:
        self._root = root
        self._most_bytes = most_bytes
        self._making = threading.Lock()
        self._changing = threading.Lock()
        self._held: dict[str, tuple[HeldLock, Path]] = {}
        self._users: dict[str, set[str]] = {}

    def want(self, name: str, user: str) -> Path | None:
        """Keep a folder until `release`, also one that is not made yet. Returns where it is, if it is held already."""
        with self._changing:
            self._users.setdefault(name, set()).add(user)
            return self._held[name][1] if name in self._held else None

    def is_wanted(self, name: str, user: str) -> bool:
        return user in self._users.get(name, ())

    def find(self, name: str, is_whole: Callable[[Path], bool] = Path.is_dir) -> Path | None:
        """Hold the folder that is there; one that is not whole any more is removed, unless somebody uses it."""
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
        """Hold a folder, made now unless it is there.

        Args:
            name: Its name.
            fill: Writes what is in it into an empty folder, which appears when it is whole.
            is_whole: Whether one that is there may be taken.

        Raises:
            OSError: It can't be written.
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
        """The user wants nothing any more."""
        with self._changing:
            for name, users in list(self._users.items()):
                users.discard(user)
                if not users:
                    del self._users[name]
                    if name in self._held:
                        self._held.pop(name)[0].close()

    def close(self) -> None:
        """Nobody here wants anything any more."""
        with self._changing:
            for held, _ in self._held.values():
                held.close()
            self._held.clear()
            self._users.clear()

    # ------------------------------------------------------------ within

    def _copies(self, name: str) -> Sequence[Path]:
        """Where it may be: one that somebody has written in stays at its place as long as it is used."""
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
                raise OSError(f"{path} was removed as soon as it was made")
            if is_whole(path):
                return held, path
            held.close()
        raise OSError("its earlier copies on this node were changed, and runs use them")

    def _hold(self, name: str, held: HeldLock, path: Path) -> Path:
        with self._changing:
            if name in self._held or name not in self._users:
                # somebody else was first, or nobody wants it any more
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
