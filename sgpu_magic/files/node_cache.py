"""A folder of this node for data on fast local disk: it stays between runs, within a budget.

    <root>/NAME                an entry: a file or a folder. Its name is there only when it is whole
    <root>/.sgpu/locks/NAME    who uses it (shared) or fills it (exclusive): `flock`, which ends with its process.
                               Its time of change is the entry's last use; for a folder it also holds the size
    <root>/.sgpu/filling/NAME  what its filler writes; the half that a killed one leaves is swept
    <root>/.sgpu/trash/        taken out, being deleted
    <root>/.sgpu/room          one process at a time makes room
    <root>/.sgpu/askers        held by every process that was given the folder itself

What lies there without a lock was put there by hand. Nobody can know who reads it, so it is taken out only when no
living process has been given the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from sgpu_magic.config import Settings, host_name, load_settings, private_dir
from sgpu_magic.errors import UsageError
from sgpu_magic.files.kept_folders import LOCK_FILE, HeldLock, evict, locked, take_lock
from sgpu_magic.system.byte_sizes import folder_bytes

_BOOKS = ".sgpu"
_LONGEST_NAME_BYTES = 200


@dataclass(frozen=True, slots=True)
class _Entry:
    """What lies in the cache under one name.

    Args:
        name: Its name.
        size_bytes: What it holds.
        last_use_ns: When it was last used; of one without a lock when it was last changed or read.
        has_lock: It was made or used through the cache.
    """

    name: str
    size_bytes: int
    last_use_ns: int
    has_lock: bool


class NodeCache:
    """One user's cache on this node; any number of processes may have one of the same folder.

    Args:
        root: The folder; made with mode 0700.
        budget_bytes: What its entries may have together. Entries in use stay, whatever they have.

    Raises:
        UsageError: The folder can't be the user's own.
    """

    def __init__(self, root: Path, budget_bytes: int) -> None:
        self._root = root
        self._budget_bytes = budget_bytes
        self._books = root / _BOOKS
        try:
            for folder in (root, self._books, *(self._books / name for name in ("locks", "filling", "trash"))):
                private_dir(folder)
        except (OSError, UsageError) as error:
            raise UsageError(
                f"the node's cache can't be at {root}: {error} Set SGPU_CACHE_DIR to a folder on this node's disk that "
                "is yours alone."
            ) from error

    def folder(self) -> Path:
        """Return the folder itself. What is put there by hand stays at least until this process ends."""
        if self._root in _held:
            self._make_room(0)
            return self._root
        askers = self._books / "askers"
        with locked(askers, wait=False, flags=LOCK_FILE) as alone:
            # others may be reading anything in it
            self._make_room(0, by_hand_too=alone)
        _held[self._root] = take_lock(askers, shared=True, flags=LOCK_FILE)
        return self._root

    @contextlib.contextmanager
    def entry(self, name: str, fill: Callable[[Path], object]) -> Generator[Path]:
        """Yield the path of an entry, made with `fill` if it is not there; it stays while the block runs.

        Args:
            name: Its name, one component of a path.
            fill: Writes a file or a folder at the path that it is given. Called by one process, others wait.

        Raises:
            UsageError: The name can't be one, or `fill` wrote nothing.
        """
        if not name or "/" in name or name.startswith(".") or len(os.fsencode(name)) > _LONGEST_NAME_BYTES:
            raise UsageError(
                f"{name!r} can't be a name in the node's cache: it has to be one component of a path, not begin with a "
                f"dot, and have at most {_LONGEST_NAME_BYTES} bytes."
            )
        lock = self._acquire(name, fill)
        try:
            yield self._root / name
        finally:
            with contextlib.suppress(OSError):
                os.utime(lock)
            # said, not left to the descriptor's end: a child of this process may have inherited it
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)

    # ------------------------------------------------------------ locks

    def _acquire(self, name: str, fill: Callable[[Path], object]) -> int:
        """Return the entry's lock, held shared, with the entry there."""
        while True:
            lock = os.open(self._lock_path(name), LOCK_FILE | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH)
                if not self._is_there(lock, name):
                    # a lock is let go before its other kind is given (flock(2)), so all is looked at again
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    if self._is_current(lock, name) and not os.path.lexists(self._root / name):
                        self._fill(lock, name, fill)
                    fcntl.flock(lock, fcntl.LOCK_SH)
                if self._is_there(lock, name):
                    return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)

    def _lock_path(self, name: str) -> Path:
        return self._books / "locks" / name

    def _is_current(self, lock: int, name: str) -> bool:
        """Whether it is still the entry's lock: who takes an entry out removes its lock too."""
        try:
            return os.path.samestat(os.fstat(lock), os.stat(self._lock_path(name)))
        except FileNotFoundError:
            return False

    def _is_there(self, lock: int, name: str) -> bool:
        return self._is_current(lock, name) and os.path.lexists(self._root / name)

    def _unused(self, name: str) -> AbstractContextManager[bool]:
        """Hold the lock of `name` for the block if nobody else does; yields whether it is held."""
        return locked(self._lock_path(name), wait=False, flags=os.O_RDWR)

    # ------------------------------------------------------------ filling

    def _fill(self, lock: int, name: str, fill: Callable[[Path], object]) -> None:
        """Make the entry; its lock is held exclusively."""
        filling = self._books / "filling" / name
        _delete(filling)
        try:
            fill(filling)
            if not os.path.lexists(filling):
                raise UsageError(
                    f"the function that fills {name!r} of the node's cache wrote nothing at the path that it was "
                    f"given. It has to write a file or a folder at exactly that path: {filling}."
                )
            size = _size_bytes(filling)
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(size).encode(), 0)
            self._make_room(size)
            os.rename(filling, self._root / name)
        except BaseException:
            _delete(filling)
            raise

    # ------------------------------------------------------------ room

    def _make_room(self, needed_bytes: int, *, by_hand_too: bool = False) -> None:
        """Take out what was not used for longest until the rest and `needed_bytes` are within the budget."""
        trash = self._books / "trash"
        with locked(self._books / "room", flags=LOCK_FILE):
            self._sweep()
            entries = [(entry.last_use_ns, entry.size_bytes, entry) for entry in self._entries()]
            evict(entries, self._budget_bytes - needed_bytes, lambda entry: self._take_out(entry, by_hand_too))
        for leftover in os.scandir(trash):
            _delete(Path(leftover.path))

    def _entries(self) -> Iterator[_Entry]:
        for found in os.scandir(self._root):
            if found.name == _BOOKS:
                continue
            try:
                own = found.stat(follow_symlinks=False)
                lock = self._lock_path(found.name)
                has_lock = lock.exists()
                size = own.st_size
                if found.is_dir(follow_symlinks=False):
                    # the lock of a folder that was put there by hand has no size
                    size = int((has_lock and lock.read_bytes()) or _size_bytes(Path(found.path)))
                last_use = lock.stat().st_mtime_ns if has_lock else max(own.st_mtime_ns, own.st_atime_ns)
                yield _Entry(found.name, size, last_use, has_lock)
            except FileNotFoundError:
                # its owner has moved it away meanwhile
                continue

    def _take_out(self, entry: _Entry, by_hand_too: bool) -> bool:
        """Move an entry to the trash, at once and whole; returns whether that was possible."""
        trash = self._books / "trash" / secrets.token_hex(8)
        if not entry.has_lock:
            if by_hand_too:
                os.rename(self._root / entry.name, trash)
            return by_hand_too
        with self._unused(entry.name) as unused:
            if unused:
                os.rename(self._root / entry.name, trash)
                os.unlink(self._lock_path(entry.name))
        return unused

    def _sweep(self) -> None:
        """Remove what killed processes have left: half-filled entries, and locks of entries that never came."""
        for found in os.scandir(self._books / "filling"):
            with self._unused(found.name) as unused:
                if unused:
                    _delete(Path(found.path))
        for found in os.scandir(self._books / "locks"):
            if not os.path.lexists(self._root / found.name):
                with self._unused(found.name) as unused:
                    if unused and not os.path.lexists(self._root / found.name):
                        os.unlink(found.path)


_held: dict[Path, HeldLock | None] = {}
"""Folders that this process was given, and the lock that says so for as long as it lives."""


def node_cache(settings: Settings | None = None) -> NodeCache:
    """Return this user's cache on this node.

    Args:
        settings: Where and how large; read anew when left out.
    """
    settings = settings or load_settings()
    if settings.cache_dir:
        root = Path(settings.cache_dir)
    else:
        # a home may be shared by many machines
        root = user_cache_path("sgpu-magic", appauthor=False) / host_name()
    return NodeCache(root, settings.cache_bytes)


def _size_bytes(path: Path) -> int:
    """What a file has, or all files below a folder have together; links count as themselves."""
    own = os.lstat(path)
    return folder_bytes(path) if stat.S_ISDIR(own.st_mode) else own.st_size


def _delete(path: Path) -> None:
    """Delete a file or a folder; another process may be at it too."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
