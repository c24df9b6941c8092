"""A node's cache of data for many runs, on fast local disk.

    <root>/NAME                an entry: a file or a folder; it appears under its name once it is complete
    <root>/.sgpu/locks/NAME    the entry's `flock`: shared by its users, exclusive for the process that fills it.
                               Its mtime is the entry's last use; its content is the entry's size
    <root>/.sgpu/filling/NAME  an entry that is being filled; leftovers of killed processes are swept
    <root>/.sgpu/trash/        evicted entries, being deleted
    <root>/.sgpu/room          the lock for eviction: one process at a time
    <root>/.sgpu/askers        the lock shared by all processes that were given the folder itself

Entries without a lock file were put there by hand. Their readers are unknown, so they are evicted only while no living
process has been given the folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from platformdirs import user_cache_path

from sgpu_magic.config import Settings, host_name, load_settings, private_dir
from sgpu_magic.errors import UsageError
from sgpu_magic.files.disk_usage import evict, remove_tree, size_bytes
from sgpu_magic.files.locks import LOCK_FILE, HeldLock, locked, take_lock

_BOOKS = ".sgpu"
_LONGEST_NAME_BYTES = 200
_held: dict[Path, HeldLock | None] = {}
"""Cache folders that this process was given, with the `askers` locks that it holds until it exits."""


class NodeCache:
    """One user's cache on this node. Any number of processes may use the same folder.

    Args:
        root: The folder; created with mode 0700.
        budget_bytes: The total size of the entries. Entries in use are never evicted, even if they exceed it.

    Raises:
        UsageError: The folder can't be created, or is not private to the user.
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
        """Return the folder itself. Files put there by hand are kept at least until this process ends."""
        if self._root in _held:
            self._make_room(0)
            return self._root
        askers = self._books / "askers"
        with locked(askers, wait=False, flags=LOCK_FILE) as alone:
            # if other processes were given the folder, they may be reading anything in it
            self._make_room(0, by_hand_too=alone)
        _held[self._root] = take_lock(askers, shared=True, flags=LOCK_FILE)
        return self._root

    @contextlib.contextmanager
    def entry(self, name: str, fill: Callable[[Path], object]) -> Generator[Path]:
        """Yield the path of an entry, created with `fill` if it does not exist; it is kept while the block runs.

        Args:
            name: The entry's name, one path component.
            fill: Writes a file or a folder at the path that it is given. One process calls it, others wait.

        Raises:
            UsageError: The name is invalid, or `fill` wrote nothing.
        """
        if not name or "/" in name or name.startswith(".") or len(os.fsencode(name)) > _LONGEST_NAME_BYTES:
            raise UsageError(
                f"{name!r} can't be a name in the node's cache: it must be one component of a path, not begin with a "
                f"dot, and have at most {_LONGEST_NAME_BYTES} bytes."
            )
        held = self._acquire(name, fill)
        try:
            yield self._root / name
        finally:
            with contextlib.suppress(OSError):
                os.utime(self._lock_path(name))
            held.close()

    # ------------------------------------------------------------ locks

    def _acquire(self, name: str, fill: Callable[[Path], object]) -> HeldLock:
        """Return the entry's lock, held shared; the entry exists then."""
        lock, entry = self._lock_path(name), self._root / name
        while True:
            held = take_lock(lock, shared=True, flags=LOCK_FILE)
            if held is not None:
                if os.path.lexists(entry):
                    return held
                held.close()
            with locked(lock, flags=LOCK_FILE):
                if not os.path.lexists(entry):
                    self._fill(name, fill)

    def _lock_path(self, name: str) -> Path:
        return self._books / "locks" / name

    def _unused(self, name: str) -> AbstractContextManager[bool]:
        """Hold the lock of `name` for the block unless another process does; yields whether it is held."""
        return locked(self._lock_path(name), wait=False, flags=os.O_RDWR)

    # ------------------------------------------------------------ filling

    def _fill(self, name: str, fill: Callable[[Path], object]) -> None:
        """Create the entry; the caller holds its lock exclusively."""
        filling = self._books / "filling" / name
        remove_tree(filling)
        try:
            fill(filling)
            if not os.path.lexists(filling):
                raise UsageError(
                    f"the function that fills {name!r} of the node's cache wrote nothing at the path that it was "
                    f"given. It must write a file or a folder at exactly that path: {filling}."
                )
            size = size_bytes(filling)
            self._lock_path(name).write_text(str(size))
            self._make_room(size)
            os.rename(filling, self._root / name)
        except BaseException:
            remove_tree(filling)
            raise

    # ------------------------------------------------------------ disk space

    def _make_room(self, needed_bytes: int, *, by_hand_too: bool = False) -> None:
        """Evict the least recently used entries until the rest and `needed_bytes` are within the budget."""
        trash = self._books / "trash"
        with locked(self._books / "room", flags=LOCK_FILE):
            self._sweep()
            room = self._budget_bytes - needed_bytes
            evict(self._entries(), room, lambda name: self._take_out(name, by_hand_too))
        for leftover in trash.iterdir():
            remove_tree(leftover)

    def _entries(self) -> Iterator[tuple[float, int, str]]:
        """Yield the last use, size and name of each entry, as `evict` takes them."""
        for found in self._root.iterdir():
            if found.name == _BOOKS:
                continue
            lock = self._lock_path(found.name)
            # the user may move it away meanwhile
            with contextlib.suppress(FileNotFoundError):
                own = found.lstat()
                last_use_ns = lock.stat().st_mtime_ns if lock.exists() else max(own.st_mtime_ns, own.st_atime_ns)
                # the lock file of a folder that was put there by hand may be empty
                known = lock.read_bytes() if stat.S_ISDIR(own.st_mode) and lock.exists() else b""
                yield last_use_ns, int(known or size_bytes(found)), found.name

    def _take_out(self, name: str, by_hand_too: bool) -> bool:
        """Move an entry to the trash in one step; returns whether that was possible."""
        entry, lock = self._root / name, self._lock_path(name)
        trash = self._books / "trash" / secrets.token_hex(8)
        if not lock.exists():
            if by_hand_too:
                os.rename(entry, trash)
            return by_hand_too
        with self._unused(name) as unused:
            if unused:
                os.rename(entry, trash)
                lock.unlink()
        return unused

    def _sweep(self) -> None:
        """Remove leftovers of killed processes: partly filled entries, and locks without entries."""
        for found in (self._books / "filling").iterdir():
            with self._unused(found.name) as unused:
                if unused:
                    remove_tree(found)
        for found in (self._books / "locks").iterdir():
            if not os.path.lexists(self._root / found.name):
                with self._unused(found.name) as unused:
                    if unused and not os.path.lexists(self._root / found.name):
                        found.unlink()


def node_cache(settings: Settings | None = None) -> NodeCache:
    """Return this user's cache on this node.

    Args:
        settings: The settings with the cache's folder and budget; loaded if omitted.
    """
    settings = settings or load_settings()
    return NodeCache(cache_root(settings), settings.cache_bytes)


def cache_root(settings: Settings) -> Path:
    """Return the folder of this user's cache on this node."""
    # a home directory may be shared by many machines
    return Path(settings.cache_dir or user_cache_path("sgpu-magic", appauthor=False) / host_name())
