"""Folders that are made once and kept while somebody uses them: a shared lock on each is who does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from pathlib import Path

from sgpu_magic.system.byte_sizes import folder_bytes

_LEFTOVER_S = 3600.0


def lock_shared(folder: Path) -> int | None:
    """Lock a folder that is there, so that nobody removes it; None when it is not there."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with contextlib.ExitStack() as not_held:
        not_held.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        # whoever held it may have removed it meanwhile
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                not_held.pop_all()
                return descriptor
    return None


def remove_unused(folder: Path) -> bool:
    """Remove a folder that nobody has locked. Whether it is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # out of sight first: a folder is there whole or not at all
        doomed = folder.with_name(f".{folder.name[:16]}-{time.monotonic_ns()}.gone")
        os.rename(folder, doomed)
        remove_tree(doomed)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def evict(parent: Path, budget: int) -> None:
    """Remove the longest unused folders beyond a budget, and what an interrupted program has left.

    Args:
        parent: What they are in. Unfinished ones begin with a dot.
        budget: Bytes that they may have together.
    """
    now = time.time()
    kept: list[tuple[float, Path, int]] = []
    for path in parent.iterdir():
        with contextlib.suppress(FileNotFoundError):
            mtime = path.stat().st_mtime
            if path.name.startswith("."):
                if now - mtime > _LEFTOVER_S:
                    remove_tree(path)
            else:
                kept.append((mtime, path, folder_bytes(path)))
    total = sum(size for *_, size in kept)
    for _, path, size in sorted(kept):
        if total <= budget:
            return
        if remove_unused(path):
            total -= size


def remove_tree(folder: Path) -> None:
    """Remove a folder, also one in which nothing may be written."""
    for directory, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(directory, stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)
