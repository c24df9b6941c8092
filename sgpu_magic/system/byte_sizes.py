"""Sizes in bytes: what files take, how it is written, and how much memory can still be taken here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def folder_bytes(folder: str | os.PathLike[str]) -> int:
    """Return what all files below a folder have together. Links count as themselves, hard links each time.

    Files that are removed meanwhile, or can't be looked at, count nothing.
    """
    total = 0
    for directory, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(directory, file)).st_size
    return total


def format_bytes(count: float) -> str:
    """Return `1.2 kB`, `45.1 MB`: decimal units, one digit after the point."""
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


def fits_memory(size: int) -> bool:
    """Whether a memory file of `size` bytes can be made and leaves the machine some room."""
    return hasattr(os, "memfd_create") and size * _MEMORY_RESERVE < memory_available_bytes()


def memory_available_bytes() -> int:
    """Return the memory that can still be taken: the machine's, or what the control group leaves."""
    available = [_meminfo_available()]
    for directory, limit_name, usage_name, stat_name in _cgroup_directories():
        limit, usage = _number(directory / limit_name), _number(directory / usage_name)
        if limit is not None and usage is not None:
            available.append(max(0, limit - usage + _inactive_file(directory / "memory.stat", stat_name)))
    return min(available)


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_directories() -> Iterator[tuple[Path, str, str, str]]:
    """Yield this process's memory groups up to the root, in both versions of the interface."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, names = _CGROUP, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = (
                _CGROUP / "memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        directory = root / path.lstrip("/")
        while True:
            yield directory, *names
            if directory == root or root not in directory.parents:
                break
            directory = directory.parent


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file(file: Path, name: str) -> int:
    """Bytes of cached files that the kernel would drop first."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), 0)
