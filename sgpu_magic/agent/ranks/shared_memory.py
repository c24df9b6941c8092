"""Removes shared-memory files that libraries of dead ranks have left in /dev/shm.

torch and NCCL create files there and unlink them when the name is no longer needed, or when their process exits
normally. A rank that is killed leaves them, and their memory stays in use until the machine restarts. A file is removed
if it has such a name, belongs to this user, is not older than the run, and is neither mapped nor open in any process.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

DIRECTORY = Path("/dev/shm")
# NCCL's `nccl-Ab3dE6`, and torch's `torch_4711_123456_0` with the process id
_NAMES = re.compile(r"nccl-\w{6,}|torch_(?P<pid>\d+)_\d+(?:_\d+)?")


def remove_leftovers(begun_at: float, directory: Path = DIRECTORY) -> list[str]:
    """Remove what killed ranks have left, and return the files' names.

    Args:
        begun_at: Wall-clock time at which the run's ranks were started, seconds since the epoch.
        directory: The directory of shared memory.
    """
    found = dict(_candidates(begun_at, directory))
    if not found:
        return []
    for path in _used_files(directory):
        found.pop(path, None)
    removed: list[str] = []
    for path in found:
        with contextlib.suppress(OSError):
            os.unlink(path)
            removed.append(Path(path).name)
    return sorted(removed)


def _candidates(begun_at: float, directory: Path) -> Iterator[tuple[str, None]]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            named = _NAMES.fullmatch(entry.name)
            if named is None or (named["pid"] and os.path.exists(f"/proc/{named['pid']}")):
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                is_own = entry.is_file(follow_symlinks=False) and status.st_uid == os.getuid()
                # the time of its last change, not of the last write, which programs may set
                if is_own and status.st_ctime >= begun_at:
                    yield entry.path, None


def _used_files(directory: Path) -> Iterator[str]:
    """Yield the files of the directory that processes have mapped or open. Other users' processes can't be read."""
    prefix = f"{directory}/"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                # address, rights, offset, device, inode, path
                fields = line.split(None, 5)
                if len(fields) == 6 and fields[5].startswith(prefix):
                    yield fields[5].removesuffix(" (deleted)")
            for descriptor in os.scandir(process / "fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(descriptor.path)
                    if target.startswith(prefix):
                        yield target.removesuffix(" (deleted)")
