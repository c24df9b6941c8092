"""Sizes of files and folders; eviction and removal."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from sgpu_magic.files.atomic_file import T
from sgpu_magic.files.locks import locked


def folder_bytes(folder: str | os.PathLike[str]) -> int:
    """Return the total size of all files below a folder. Symbolic links count as themselves, hard links each time.

    Files that are removed meanwhile, or can't be inspected, count as 0.
    """
    total = 0
    for directory, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(directory, file)).st_size
    return total


def size_bytes(path: Path) -> int:
    """Return the size of a file, or of all files below a folder; symlinks count as themselves."""
    own = os.lstat(path)
    return folder_bytes(path) if stat.S_ISDIR(own.st_mode) else own.st_size


def used_entries(folder: Path) -> list[tuple[float, int, Path]]:
    """Return what `evict` needs of each file in a folder: the time of its last use, its size and its path."""
    found: list[tuple[float, int, Path]] = []
    for path in folder.iterdir():
        # another process may remove it
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    return found


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
    shutil.rmtree(path, ignore_errors=True)
    if not os.path.lexists(path):
        return
    # folders in it may be inaccessible or read-only
    with contextlib.suppress(OSError):
        os.chmod(path, stat.S_IRWXU)
    for folder, folders, _ in os.walk(path):
        for inner in (os.path.join(folder, name) for name in folders):
            with contextlib.suppress(OSError):
                if not os.path.islink(inner):
                    os.chmod(inner, stat.S_IRWXU)
    shutil.rmtree(path, ignore_errors=True)
