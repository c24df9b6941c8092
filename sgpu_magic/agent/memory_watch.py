"""Detects kills by the kernel's out-of-memory killer, and reads the peak memory of processes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sgpu_magic.system.processes import memory_groups, memory_limit, number_in

# share of the memory limit above which an unexplained SIGKILL most likely came from the out-of-memory killer
_HIGH = 0.8


class MemoryWatch:
    """Counts out-of-memory kills of the machine and of this process's memory cgroups since a run began.

    Args:
        limit_bytes: The memory limit; by default, the system's.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._before: dict[str, int] = {}

    def begin(self) -> None:
        """Record the counters' current values. Costs 0.3 ms."""
        self._before = _kill_counts()

    def killed_since(self) -> bool:
        """Whether the out-of-memory killer has killed a process here since the run began."""
        return any(count > self._before.get(name, count) for name, count in _kill_counts().items())

    def verdict(self, peak_bytes: int, other_pids: Iterable[int]) -> str:
        """Return the likely cause of a SIGKILL that the agent did not send.

        Args:
            peak_bytes: The dead rank's peak memory; 0 when unknown.
            other_pids: Process ids of the run's other ranks, whose memory counts too.
        """
        limit = memory_limit() if self._limit_bytes is None else self._limit_bytes
        held = _format_held(peak_bytes, limit)
        if self.killed_since():
            return "the system's out-of-memory killer ended it" + held
        together = peak_bytes + sum(peak_memory(pid) for pid in other_pids)
        if limit and together > _HIGH * limit:
            return "most likely out of memory" + held
        return "another process or the system killed it" + held


def _format_held(peak_bytes: int, limit_bytes: int) -> str:
    if not peak_bytes:
        return ""
    if not limit_bytes:
        return f" (it held {peak_bytes / 1e9:.1f} GB)"
    return f" (it held {peak_bytes / 1e9:.1f} of {limit_bytes / 1e9:.0f} GB)"


def peak_memory(pid: int) -> int:
    """Return a live process's peak memory in bytes, 0 when unknown."""
    return (number_in(Path(f"/proc/{pid}/status"), "VmHWM:") or 0) * 1024


def _kill_counts() -> dict[str, int]:
    files = [Path("/proc/vmstat")]
    for group in memory_groups():
        files += [group / "memory.events", group / "memory.oom_control"]
    counts = {str(file): number_in(file, "oom_kill") for file in files}
    return {name: count for name, count in counts.items() if count is not None}
