"""Sizes in bytes: of folders, formatted, of the available memory, and of the free room on a disk."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec


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


def format_bytes(count: float) -> str:
    """Format a size like `1.2 kB` or `45.1 MB`: decimal units, one digit after the point."""
    if count < 999.5:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"


# ---------------------------------------------------------------- memory

_MEMORY_RESERVE = 1.25
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
# limit, usage, and the `memory.stat` field of reclaimable file cache, for cgroups v2 and v1
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def fits_memory(size: int) -> bool:
    """Whether a memory file of `size` bytes, and a reserve of 25 %, fits into the available memory."""
    return hasattr(os, "memfd_create") and size * _MEMORY_RESERVE < memory_available_bytes()


def memory_available_bytes() -> int:
    """Return the available memory: the machine's, or less if a control group limits it further."""
    kilobytes = number_in(_MEMINFO, "MemAvailable:")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if kilobytes is None else kilobytes * 1024
    available = [free]
    for group in memory_groups():
        for limit_name, usage_name, cached_name in _GROUP_FILES:
            limit, usage = _number(group / limit_name), _number(group / usage_name)
            if limit is not None and usage is not None:
                cached = number_in(group / "memory.stat", cached_name) or 0
                available.append(max(0, limit - usage + cached))
    return min(available)


def memory_limit() -> int:
    """Return the machine's memory in bytes, or the control group's limit if that is smaller; 0 if unknown."""
    limits = [(number_in(_MEMINFO, "MemTotal:") or 0) * 1024]
    limits += [_number(group / names[0]) or 0 for group in memory_groups() for names in _GROUP_FILES]
    return min(filter(None, limits), default=0)


def memory_groups() -> Iterator[Path]:
    """Yield this process's memory control groups up to the root, for cgroups v1 and v2."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUP / "memory" if controllers else _CGROUP
        # in a container the path may be the host's, with the group mounted at the root
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            yield root.joinpath(*parts[:depth])


def number_in(file: Path, name: str) -> int | None:
    """Return the number after a name at the beginning of a line, None if there is none."""
    lines = _text(file).splitlines()
    return next((int(fields[1]) for line in lines if (fields := line.split())[:1] == [name]), None)


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


# ---------------------------------------------------------------- disks

# measured: a new pool and its first run write 180 kB in 21 files and folders; a later run of two ranks with a little
# output 32 kB in 8, a cell in a session without output 24 kB in 6
RUN_BYTES = 256_000
RUN_INODES = 32


class DiskRoom(msgspec.Struct, frozen=True):
    """The file system under a directory.

    Args:
        path: The directory, or its nearest existing parent.
        mount: The mount point of the file system.
        kind: The file system's type, such as `ext4`; "" if unknown.
        free_bytes: Bytes that this process may still write there.
        free_inodes: Files that it may still create there; None without a limit.
        writable: Whether it may write there at all.
    """

    path: Path
    mount: str
    kind: str
    free_bytes: int
    free_inodes: int | None
    writable: bool

    @property
    def takes_a_run(self) -> bool:
        inodes = self.free_inodes
        return self.writable and self.free_bytes >= RUN_BYTES and (inodes is None or inodes >= RUN_INODES)

    def __str__(self) -> str:
        kind = f"{self.kind} " if self.kind else ""
        if not self.writable:
            return f"{self.path} on the {kind}disk at {self.mount} is read-only"
        inodes = "" if self.free_inodes is None else f" and {self.free_inodes:,} inodes"
        return f"the {kind}disk at {self.mount} has {format_bytes(self.free_bytes)}{inodes} free"


def disk_room(path: Path) -> DiskRoom:
    """Return the state of the file system under `path`.

    Raises:
        OSError: The file system can't be inspected.
    """
    while not path.exists() and path != path.parent:
        path = path.parent
    status = os.statvfs(path)
    mount, kind = _mount_of(path, os.stat(path).st_dev)
    blocks, inodes = status.f_bavail, status.f_favail
    if os.geteuid() == 0:
        # root may use the blocks reserved for it, but not those of ext4 itself (ext4_calculate_resv_clusters)
        own = min(status.f_blocks // 50, 4096) if kind == "ext4" else 0
        blocks, inodes = max(blocks, status.f_bfree - own), status.f_ffree
    # file systems that allocate inodes dynamically report 0
    limited = status.f_files > 0
    writable = os.access(path, os.W_OK | os.X_OK)
    return DiskRoom(path, mount, kind, blocks * status.f_frsize, inodes if limited else None, writable)


@functools.lru_cache(maxsize=16)
def _mount_of(path: Path, device: int) -> tuple[str, str]:
    """`mount_of`, read once for each device: the table has a hundred lines on some machines."""
    return mount_of(path)


def mount_of(path: Path, mounts: Path = Path("/proc/mounts")) -> tuple[str, str]:
    """Return the mount point and type of the file system of `path`; the type is "" if unknown."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return "/", ""
    mount, found, longest = "/", "", -1
    target = path.resolve()
    for line in lines:
        parts = line.split(" ")
        if len(parts) < 3:
            continue
        # blanks and tabs are written as octal escapes, fstab(5)
        point = parts[1].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        # of two mounts on one point the later one is visible
        if target.is_relative_to(point) and len(point) >= longest:
            mount, found, longest = point, parts[2], len(point)
    return mount, found
