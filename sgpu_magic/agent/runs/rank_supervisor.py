"""Supervises the ranks of a run or session: what they show, how they die, and what they leave behind.

Displays and widget messages are reported in order with the rank's output. Ranks that survive SIGKILL, and processes
that a rank has left running, are reported to the notebook.
"""

from __future__ import annotations

import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from sgpu_magic import extensions
from sgpu_magic.agent.memory_watch import MemoryWatch
from sgpu_magic.agent.rank_deaths import describe_death
from sgpu_magic.agent.ranks import shared_memory
from sgpu_magic.agent.ranks.group import Group, RunRanks
from sgpu_magic.agent.ranks.rank_process import NotebookFrames
from sgpu_magic.config import Settings
from sgpu_magic.wire.base import FailureKind
from sgpu_magic.wire.events import EventBody, Noted, RemainingRank
from sgpu_magic.wire.node import Launch
from sgpu_magic.wire.rank import Cleared, CommsFromRank, DescendantsEnded, Displayed, InPlace
from sgpu_magic.wire.rank_events import CommsMoved, DisplayPublished, Failure, OutputCleared

# report killed ranks that still exist after this time: the driver may take a second to free their memory
_REMAINS_S = 2.0
# limit for all ranks of one run together, since events are kept on disk
MOST_COMM_BYTES = 256 << 20


class Say(Protocol):
    """Reports an event of the run."""

    def __call__(self, body: EventBody, frames: Sequence[bytes] = ()) -> None: ...


class RankSupervisor:
    """Supervises the ranks of one run or session.

    Args:
        launch: The launch that the ranks execute.
        group: The ranks' group, forked or being forked.
        say: Reports an event of the run.
        later: Schedules a call after some seconds, which is dropped when the run is gone.

    Attributes:
        run_ranks: The ranks of the group that take part in the run.
        notebook: Recognizes stack frames of the notebook's code.
        memory: Watches the ranks' memory, once it has begun.
    """

    def __init__(
        self, launch: Launch, group: Group, say: Say, later: Callable[[float, Callable[[], None]], None]
    ) -> None:
        spec, part = launch.spec, launch.part
        numbers = spec.rank_numbers if part is None else range(part.first_rank, part.first_rank + part.ranks)
        self.run_ranks = RunRanks(group, tuple(numbers))
        self.notebook = NotebookFrames(spec.cell)
        self.memory = MemoryWatch()
        self._launch = launch
        self._group = group
        self._say = say
        self._later = later
        self._host = socket.gethostname()
        # standby ranks are older, but run no NCCL collectives before the launch
        self._launched_at = time.time()
        self._joined: set[int] = set()
        self._comm_bytes = 0
        # killed ranks that were reported not to have ended, by process id
        self._remaining: set[int] = set()

    def record_joined(self, rank: int) -> bool:
        """Record that a rank has joined the process group. Returns whether all ranks have."""
        self._joined.add(rank)
        return len(self._joined) == len(self._group.ranks)

    # ------------------------------------------------------------ what ranks show

    def show(self, rank: int, message: Displayed | Cleared) -> None:
        """Report a display or a clearing after everything the rank printed before, then let the rank continue."""
        process = self._group.rank(rank)
        process.output.drain()
        if isinstance(message, Cleared):
            self._say(OutputCleared(rank=rank, wait=message.wait))
        else:
            self._say(DisplayPublished(rank=rank, **msgspec.structs.asdict(message)))
        self._group.order(rank, InPlace())

    def relay_comms(self, rank: int, message: CommsFromRank, frames: Sequence[bytes]) -> None:
        """Report messages of a rank's widgets, up to `MOST_COMM_BYTES`."""
        had = self._comm_bytes
        self._comm_bytes += sum(len(each.data) + len(each.metadata) for each in message.messages)
        self._comm_bytes += sum(map(len, frames))
        if self._comm_bytes <= MOST_COMM_BYTES:
            self._say(CommsMoved(rank=rank, messages=message.messages), frames)
        elif had <= MOST_COMM_BYTES:
            text = f"widgets of this run's ranks have sent {MOST_COMM_BYTES >> 20} MB and are no longer updated"
            self._say(Noted(text=text))

    # ------------------------------------------------------------ how they die

    def describe_death(self, rank: int, status: int, *, finishing: bool = False) -> Failure:
        """Describe the exit of a rank that is dead and reaped.

        Args:
            rank: The rank.
            status: Its exit code, negative for a signal.
            finishing: Whether its cell had ended, and it finished what the cell has started.
        """
        process = self._group.rank(rank)
        process.output.drain()
        age_s = process.stack_file.sample_age_s()
        stack = self.notebook.upwards(process.stack_file.last_frames())
        frame = self.notebook.innermost(stack) or (stack[0] if stack else None)
        meaning = ""
        if status == -signal.SIGKILL:
            others = [other.pid for other in self.run_ranks.ranks if other.alive and other.pid is not None]
            meaning = self.memory.verdict(process.peak_bytes, others)
        return describe_death(
            Failure(
                kind=FailureKind.WORKER_DIED,
                message="",
                rank=rank,
                host=self._host,
                at=time.time(),
                exit_status=status,
                pid=process.pid,
                stack=stack,
                line=frame.line if frame is not None and self.notebook.has(frame) else None,
                where=self.notebook.collective(stack),
            ),
            self._group.world_size,
            meaning=meaning,
            last_line=self.notebook.describe(frame) if frame is not None else "",
            line_age_s=age_s,
            last_output=process.output.tail(),
            finishing=finishing,
        )

    # ------------------------------------------------------------ what they leave behind

    def note_descendants(self, rank: int, message: DescendantsEnded) -> None:
        """Report the processes that a dead rank had left running."""
        if message.killed:
            self._say(
                Noted(
                    text=f"rank {rank} left processes running, which were ended: {_list_commands(message.killed)}. "
                    "Where they are to finish, wait for them in the cell, as with `.wait()`."
                )
            )
        if message.stuck:
            self._say(
                Noted(
                    text=f"rank {rank} left processes running that can't be ended, because they run as another "
                    f"user or wait in the system: {_list_commands(message.stuck)}. They may still use the devices."
                )
            )

    def check_killed(self) -> None:
        """Check after a delay whether the killed ranks have ended, and report each that has not, once."""
        self._later(_REMAINS_S, self._note_remaining)

    def _note_remaining(self) -> None:
        remaining = tuple(
            RemainingRank(rank=process.rank, pid=process.pid, host=self._host)
            for process in self.run_ranks.ranks
            if process.is_killed and process.alive and process.pid is not None
        )
        if any(each.pid not in self._remaining for each in remaining):
            self._remaining.update(each.pid for each in remaining)
            listed = " and ".join(f"rank {each.rank} (process {each.pid})" for each in remaining)
            was, does, it, has = ("was", "does", "it", "has") if len(remaining) == 1 else ("were", "do", "they", "have")
            self._say(
                Noted(
                    text=f"{listed} {was} killed on {self._host} and {does} not end: the system is still freeing what "
                    f"{it} {has}, or waits for a device or a file system. What {it} {has} leased stays leased until "
                    "then. If that never happens, only a restart of the machine helps.",
                    remaining=remaining,
                )
            )

    def close_group(self, settings: Settings) -> None:
        """Remove what the ranks have left in memory and on disk, and close their group: all have exited."""
        if self._launch.spec.ray:
            extensions.ray_directories().remove(self._launch.spec.run_id, settings)
        shared_memory.remove_leftovers(self._launched_at)
        self._group.close()


def _list_commands(commands: Sequence[str]) -> str:
    counts = Counter(commands)
    return ", ".join(command if count == 1 else f"{command} ({count} times)" for command, count in counts.items())
