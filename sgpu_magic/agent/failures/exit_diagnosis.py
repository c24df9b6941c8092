"""A rank that ended without a word: what its process was, where in Python it was, what it said last."""

from __future__ import annotations

import signal
import time

import msgspec

from sgpu_magic.agent.failures.memory_kills import MemoryWatch
from sgpu_magic.agent.ranks.group import RunRanks
from sgpu_magic.agent.watch.stacks import NotebookFrames
from sgpu_magic.system.processes import signal_name
from sgpu_magic.wire.failures import Failure
from sgpu_magic.wire.states import FailureKind

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
