"""Directories of a run's own Ray cluster."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Collection
from pathlib import Path

from sgpu_magic.config import Settings
from sgpu_magic.system.processes import core_count, memory_limit
from sgpu_magic.wire.base import check_id
from sgpu_magic.wire.node import Launch
from sgpu_magic.wire.rank import PrivateRay

_PREFIX = "ray-"
_DIGITS = 8
# Ray appends `/r/session_2026-11-22_18-41-05_080720_1234567/sockets/dash_MetricsHead`, and a socket's path has at most
# 107 bytes
_LONGEST = 107 - 70
_DISK = "ray"
_SHM = "/dev/shm"
_MEMORY_SHARE = 0.3
# Ray's own floor (ray_constants.OBJECT_STORE_MINIMUM_MEMORY_BYTES)
_LEAST_BYTES = 80_000_000
_ROOM = 1.05


def make(launch: Launch, settings: Settings) -> PrivateRay:
    """Make the directories of a run's Ray cluster on this node and return them with the cluster's limits.

    Args:
        launch: The run, or this node's part of it.
        settings: The pool's settings.

    Raises:
        OSError: A directory can't be made.
    """
    remove(launch.spec.run_id, settings)
    directory = ray_directory(launch.spec.run_id, settings)
    directory.mkdir(mode=0o700)
    disk = settings.state_path / _DISK / launch.spec.run_id
    disk.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    disk.mkdir(mode=0o700)
    part, lease = launch.part, launch.lease
    ranks = part.ranks if part is not None else launch.spec.placement.ranks
    gpus = ranks if lease.uuids else 0
    # a CPU rank's slot is one core; a GPU run gets its GPUs' share of the cores
    share = _share(gpus) if gpus and not lease.simulated else min(1.0, ranks / core_count())
    cpus = max(ranks, int(core_count() * share))
    objects = _object_bytes(settings.ray_object_bytes, share)
    return PrivateRay(
        directory=str(directory),
        disk_directory=str(disk),
        address=part.address if part is not None and part.nodes > 1 else "127.0.0.1",
        gpus=gpus,
        cpus=cpus,
        simulated=lease.simulated,
        object_store_bytes=objects,
        objects_on_disk=_shm_free() < objects * _ROOM,
        dashboard=settings.ray_dashboard,
    )


def ray_directory(run_id: str, settings: Settings) -> Path:
    """Return the directory for the sockets of a run's Ray cluster. Deterministic."""
    check_id(run_id)
    found = settings.runtime_path / f"{_PREFIX}{run_id[:_DIGITS]}"
    if len(os.fsencode(found)) <= _LONGEST:
        return found
    return Path(tempfile.gettempdir()) / f"sgpu-{_PREFIX}{_own_mark(settings)}-{run_id[:_DIGITS]}"


def remove(run_id: str, settings: Settings) -> None:
    """Remove the directories of a run's Ray cluster, if it had one. Its processes must be dead."""
    check_id(run_id)
    for directory in (ray_directory(run_id, settings), settings.state_path / _DISK / run_id):
        with contextlib.suppress(OSError):
            # leave links and other users' directories alone
            if directory.lstat().st_uid == os.getuid() and not directory.is_symlink():
                shutil.rmtree(directory, ignore_errors=True)


def sweep(settings: Settings, held: Collection[str]) -> None:
    """Remove Ray directories of runs that no longer exist because their agent was killed.

    Args:
        settings: The pool's settings.
        held: Ids of the runs that the agent holds.
    """
    keep = {ray_directory(run_id, settings).name for run_id in held}
    directories = (
        (settings.runtime_path, _PREFIX, keep),
        (Path(tempfile.gettempdir()), f"sgpu-{_PREFIX}{_own_mark(settings)}-", keep),
        (settings.state_path / _DISK, "", set(held)),
    )
    for folder, prefix, kept in directories:
        with contextlib.suppress(OSError):
            for entry in folder.iterdir():
                if entry.name.startswith(prefix) and entry.name not in kept and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)


def _own_mark(settings: Settings) -> str:
    """Return a mark that distinguishes the agents and users of one machine."""
    return f"{zlib.crc32(os.fsencode(settings.runtime_path)):08x}"


def _share(gpus: int) -> float:
    """Return the run's share of this node's GPUs, which is also its share of the cores."""
    there = sum(entry.name.removeprefix("nvidia").isdigit() for entry in Path("/dev").glob("nvidia*"))
    return min(1.0, gpus / max(there, gpus))


def _object_bytes(asked: int, share: float) -> int:
    memory = memory_limit()
    if not memory:
        return max(asked, _LEAST_BYTES)
    most = int(memory * _MEMORY_SHARE)
    return max(_LEAST_BYTES, min(asked or int(most * share), most))


def _shm_free() -> int:
    try:
        room = os.statvfs(_SHM)
    except OSError:
        return 0
    return room.f_bavail * room.f_frsize
