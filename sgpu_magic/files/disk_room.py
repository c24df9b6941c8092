"""Free disk space and inodes, and the message for a disk that is too full for a run."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import msgspec

from sgpu_magic.config import SET_IN_NOTEBOOK
from sgpu_magic.system.byte_sizes import format_bytes

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


def why_no_run(runs_path: Path, problem: str = "") -> str:
    """Return why a run can't be recorded, with the remedy; "" if it can.

    Args:
        runs_path: The directory of the runs' directories.
        problem: The system's error message of a failed attempt; "" before an attempt.
    """
    try:
        room = disk_room(runs_path)
    except OSError as error:
        room, problem = None, problem or error.strerror or str(error)
    if not problem and room is not None and room.takes_a_run:
        return ""
    why = "; ".join(str(part) for part in (problem, room) if part)
    return f"the pool can't record the run in {runs_path}: {why}. {remedy(runs_path)}"


def remedy(runs_path: Path) -> str:
    """The advice for a disk that is too full for a run."""
    return (
        f"Free room there (directories of old runs in {runs_path} can be removed) or make it writable, and run the "
        "cell again; or stop the pool (`sgpu pool stop`) and set SGPU_STATE_DIR to a directory on another disk "
        f"{SET_IN_NOTEBOOK}."
    )


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
