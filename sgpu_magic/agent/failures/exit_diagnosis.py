"""A rank that ended without a word: what its process was, where in Python it was, what it said last.

Whether the out-of-memory killer was it is told by the system's own counters, and by how much the run held. That is so
on Linux; elsewhere it is unknown.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from sgpu_magic.agent.ranks.group import RunRanks
from sgpu_magic.agent.watch.stacks import NotebookFrames
from sgpu_magic.system.byte_sizes import memory_groups, memory_limit, number_in
from sgpu_magic.system.processes import signal_name
from sgpu_magic.wire.failures import Failure
from sgpu_magic.wire.states import FailureKind

# of the limit: above it a SIGKILL that nobody has explained is most likely the out-of-memory killer's
_HIGH = 0.8
_SIGNAL_MEANINGS: dict[int, str] = {
    signal.SIGKILL: "out of memory, or somebody killed it",
    signal.SIGSEGV: "a crash in C code: it touched memory that is not its own, or its stack overflowed",
    signal.SIGBUS: "a crash in C code, or a memory-mapped file whose disk or memory ran out",
    signal.SIGABRT: "C code gave up; its last words are in the rank's output",
    signal.SIGFPE: "a crash in C code: a division by zero",
    signal.SIGILL: "a library was built for another processor",
    signal.SIGTERM: "somebody asked it to end",
    signal.SIGHUP: "somebody asked it to end",
}


class ExitDiagnosis:
    """Tells how the ranks of one run died.

    Args:
        run_ranks: The ranks.
        notebook: Tells the cell's frames.
        host: This node.
    """

    def __init__(self, run_ranks: RunRanks, notebook: NotebookFrames, host: str) -> None:
        self._run_ranks = run_ranks
        self._notebook = notebook
        self._host = host
        self._memory = MemoryWatch()

    def begin(self) -> None:
        """The run has begun: what the system kills from now on may be of it."""
        self._memory.begin()

    def death(self, rank: int, status: int) -> Failure:
        """Describe a rank that is dead and reaped.

        Args:
            status: Its exit code, negative for a signal.
        """
        process = self._run_ranks.rank(rank)
        process.output.drain()
        stack = self._notebook.upwards(process.stack_file.last_frames())
        frame = self._notebook.innermost(stack) or (stack[0] if stack else None)
        meaning = ""
        if status == -signal.SIGKILL:
            others = [other.pid for other in self._run_ranks.ranks if other.alive and other.pid is not None]
            meaning = self._memory.verdict(process.peak_bytes, others)
        failure = death(
            rank,
            self._run_ranks.group.world_size,
            self._host,
            status,
            time.time(),
            pid=process.pid,
            meaning=meaning,
            last_line=self._notebook.describe(frame) if frame is not None else "",
            last_output=process.output.tail(),
        )
        line = frame.line if frame is not None and self._notebook.has(frame) else None
        return msgspec.structs.replace(failure, stack=stack, line=line, where=self._notebook.collective(stack))


def death(
    rank: int,
    ranks: int,
    host: str,
    status: int,
    at: float,
    *,
    pid: int | None = None,
    meaning: str = "",
    last_line: str = "",
    last_output: str = "",
) -> Failure:
    """Describe a rank whose process ended without a word.

    Args:
        status: Exit code, negative for a signal.
        pid: Its process.
        meaning: What its signal was, where more is known than the signal usually means.
        last_line: Where in Python it was last, "" when unknown.
        last_output: Its last lines.
    """
    who = f"rank {rank} of {ranks}" + (f" (process {pid})" if pid is not None else "")
    if status < 0:
        meaning = meaning or _SIGNAL_MEANINGS.get(-status, "")
        message = f"{who} was killed by {signal_name(-status)}" + (f": {meaning}" if meaning else "")
    else:
        message = (
            f"{who} left with exit code {status} before its cell was done: something in it "
            "called os._exit or ended the process"
        )
    if last_line:
        message += f"\nits last Python line: {last_line}"
    if last_output.strip():
        lines = last_output.strip().splitlines()
        message += "\nits last output: " + "\n  ".join(lines)
    return Failure(
        kind=FailureKind.WORKER_DIED, message=message, rank=rank, host=host, at=at, exit_status=status, pid=pid
    )


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


def peak_memory(pid: int) -> int:
    """The most memory in bytes that a living process ever held, 0 when unknown."""
    return (number_in(Path(f"/proc/{pid}/status"), "VmHWM:") or 0) * 1024


def _kill_counts() -> dict[str, int]:
    files = [Path("/proc/vmstat")]
    for group in memory_groups():
        files += [group / "memory.events", group / "memory.oom_control"]
    counts = {str(file): number_in(file, "oom_kill") for file in files}
    return {name: count for name, count in counts.items() if count is not None}
