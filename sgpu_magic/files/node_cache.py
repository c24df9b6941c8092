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
import os
import secrets
import stat
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from platformdirs import user_cache_path

from sgpu_magic.config import Settings, host_name, load_settings, private_dir
from sgpu_magic.errors import UsageError
from sgpu_magic.files.kept_folders import LOCK_FILE, HeldLock, evict, locked, remove_tree, take_lock
from sgpu_magic.system.byte_sizes import folder_bytes

_BOOKS = ".sgpu"
_LONGEST_NAME_BYTES = 200


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
        held = self._acquire(name, fill)
        try:
            yield self._root / name
        finally:
            with contextlib.suppress(OSError):
                os.utime(self._lock_path(name))
            held.close()

    # ------------------------------------------------------------ locks

    def _acquire(self, name: str, fill: Callable[[Path], object]) -> HeldLock:
        """Return the entry's lock, held shared, with the entry there."""
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
        """Hold the lock of `name` for the block if nobody else does; yields whether it is held."""
        return locked(self._lock_path(name), wait=False, flags=os.O_RDWR)

    # ------------------------------------------------------------ filling

    def _fill(self, name: str, fill: Callable[[Path], object]) -> None:
        """Make the entry; its lock is held exclusively."""
        filling = self._books / "filling" / name
        remove_tree(filling)
        try:
            fill(filling)
            if not os.path.lexists(filling):
                raise UsageError(
                    f"the function that fills {name!r} of the node's cache wrote nothing at the path that it was "
                    f"given. It has to write a file or a folder at exactly that path: {filling}."
                )
            size = _size_bytes(filling)
            self._lock_path(name).write_text(str(size))
            self._make_room(size)
            os.rename(filling, self._root / name)
        except BaseException:
            remove_tree(filling)
            raise

    # ------------------------------------------------------------ room

    def _make_room(self, needed_bytes: int, *, by_hand_too: bool = False) -> None:
        """Take out what was not used for longest until the rest and `needed_bytes` are within the budget."""
        trash = self._books / "trash"
        with locked(self._books / "room", flags=LOCK_FILE):
            self._sweep()
            room = self._budget_bytes - needed_bytes
            evict(self._entries(), room, lambda name: self._take_out(name, by_hand_too))
        for leftover in trash.iterdir():
            remove_tree(leftover)

    def _entries(self) -> Iterator[tuple[float, int, str]]:
        """Yield when each was used last, its size and its name, as `evict` takes them."""
        for found in self._root.iterdir():
            if found.name == _BOOKS:
                continue
            lock = self._lock_path(found.name)
            # its owner may move it away meanwhile
            with contextlib.suppress(FileNotFoundError):
                own = found.lstat()
                last_use_ns = lock.stat().st_mtime_ns if lock.exists() else max(own.st_mtime_ns, own.st_atime_ns)
                # the lock of a folder that was put there by hand has no size
                known = lock.read_bytes() if stat.S_ISDIR(own.st_mode) and lock.exists() else b""
                yield last_use_ns, int(known or _size_bytes(found)), found.name

    def _take_out(self, name: str, by_hand_too: bool) -> bool:
        """Move an entry to the trash, at once and whole; returns whether that was possible."""
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
        """Remove what killed processes have left: half-filled entries, and locks of entries that never came."""
        for found in (self._books / "filling").iterdir():
            with self._unused(found.name) as unused:
                if unused:
                    remove_tree(found)
        for found in (self._books / "locks").iterdir():
            if not os.path.lexists(self._root / found.name):
                with self._unused(found.name) as unused:
                    if unused and not os.path.lexists(self._root / found.name):
                        found.unlink()


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
