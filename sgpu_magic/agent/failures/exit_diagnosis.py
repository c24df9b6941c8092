"""A rank that ended without a word: what its process was, where in Python it was, what it said last."""

from __future__ import annotations

import signal
import time

import msgspec

from sgpu_magic.agent.failures import root_cause
from sgpu_magic.agent.failures.memory_kills import MemoryWatch
from sgpu_magic.agent.runs.run_ranks import Crew
from sgpu_magic.agent.watch.stacks import NotebookFrames
from sgpu_magic.wire.records import Failure


class Coroner:
    """Tells how the ranks of one run died.

    Args:
        crew: The ranks.
        notebook: Tells the cell's frames.
        host: This node.
    """

    def __init__(self, crew: Crew, notebook: NotebookFrames, host: str) -> None:
        self._crew = crew
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
        process = self._crew.rank(rank)
        process.output.drain()
        stack = self._notebook.upwards(process.stack_file.last_frames())
        frame = self._notebook.innermost(stack) or (stack[0] if stack else None)
        meaning = ""
        if status == -signal.SIGKILL:
            others = [other.pid for other in self._crew.ranks if other.alive and other.pid is not None]
            meaning = self._memory.verdict(process.peak_bytes, others)
        failure = root_cause.death(
            rank,
            self._crew.world_size,
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
