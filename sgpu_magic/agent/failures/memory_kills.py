"""Was it the out-of-memory killer? The system's own counters, and how much the run held. Linux; elsewhere unknown."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

# of the limit: above it a SIGKILL that nobody has explained is most likely the out-of-memory killer's
_HIGH = 0.8
_CGROUPS = Path("/sys/fs/cgroup")


class MemoryWatch:
    """The machine's and this process's memory groups' counters of kills, as they were when a run began.

    Args:
        limit_bytes: Memory that there is; None asks the system.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._before: dict[str, int] = {}

    def begin(self) -> None:
        """Take the counters as they are now. Costs 0.3 ms."""
        self._before = _kill_counts()

    def killed_since(self) -> bool:
        """Whether the out-of-memory killer has struck here since the run began."""
        now = _kill_counts()
        return any(count > self._before.get(name, count) for name, count in now.items())

    def verdict(self, peak_bytes: int, other_pids: Iterable[int]) -> str:
        """Say what a SIGKILL that nobody here has sent was.

        Args:
            peak_bytes: The most that the dead rank ever held; 0 when unknown.
            other_pids: The run's other ranks, whose memory counts too.
        """
        limit = memory_limit() if self._limit_bytes is None else self._limit_bytes
        held = _held(peak_bytes, limit)
        if self.killed_since():
            return "the system's out-of-memory killer ended it" + held
        together = peak_bytes + sum(peak_memory(pid) for pid in other_pids)
        if limit and together > _HIGH * limit:
            return "most likely out of memory" + held
        return "somebody or something killed it" + held


def _held(peak_bytes: int, limit_bytes: int) -> str:
    if not peak_bytes:
        return ""
    if not limit_bytes:
        return f" (it held {peak_bytes / 1e9:.1f} GB)"
    return f" (it held {peak_bytes / 1e9:.1f} of {limit_bytes / 1e9:.0f} GB)"


def memory_limit() -> int:
    """The machine's memory in bytes, or the memory group's limit where that is smaller; 0 when unknown."""
    limits: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                limits.append(int(line.split()[1]) * 1024)
    for group in _memory_groups():
        for name in ("memory.max", "memory.limit_in_bytes"):
            # "max" is no number
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((group / name).read_text()))
    return min(limits, default=0)


def peak_memory(pid: int) -> int:
    """The most memory in bytes that a living process ever held, 0 when unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _kill_counts() -> dict[str, int]:
    files = [Path("/proc/vmstat")]
    for group in _memory_groups():
        files += [group / "memory.events", group / "memory.oom_control"]
    counts: dict[str, int] = {}
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            for line in file.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    counts[str(file)] = int(count)
    return counts


def _memory_groups() -> Iterator[Path]:
    """This process's memory group and those above it, of cgroup version 1 or 2."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{os.getpid()}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                root = _CGROUPS
            elif "memory" in controllers.split(","):
                root = _CGROUPS / "memory"
            else:
                continue
            # in a container the path may be the host's, and the group is mounted at the root
            parts = [part for part in path.split("/") if part and part != ".."]
            for depth in range(len(parts), -1, -1):
                yield root.joinpath(*parts[:depth])
