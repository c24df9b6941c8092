"""Folders that are filled once under their names and kept while in use."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sgpu_magic.config import private_dir
from sgpu_magic.files.disk_usage import evict, folder_bytes, remove_tree, remove_unused
from sgpu_magic.files.locks import HeldLock, take_lock

# leftovers of interrupted programs are removed after this time
_LEFTOVER_S = 3600.0
_MOST_COPIES = 8


class FolderCache:
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

    def keep_for(self, name: str, user: str) -> Path | None:
        """Keep a folder for a user until `release`, even before it is built. Returns its path if it is held already."""
        with self._changing:
            self._users.setdefault(name, set()).add(user)
            return self._held[name][1] if name in self._held else None

    def is_kept_for(self, name: str, user: str) -> bool:
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
                held, path = self._move_into_cache(name, temporary, is_whole)
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

    # ------------------------------------------------------------ internals

    def _copies(self, name: str) -> Sequence[Path]:
        """Candidate paths: a damaged copy stays at its path while it is used, so there can be several copies."""
        return [self._root / (f"{name}-{number}" if number else name) for number in range(_MOST_COPIES)]

    def _move_into_cache(self, name: str, temporary: Path, is_whole: Callable[[Path], bool]) -> tuple[HeldLock, Path]:
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
                # another thread was first, or the folder has no users any more
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
