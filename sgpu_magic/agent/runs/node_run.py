"""The interface of everything that the agent runs, and the behaviour that all of it shares.

That is fresh runs, sessions, the cells in them, and runs that are being prepared. Runs with ranks handle some messages
alike: a display is reported in order with the rank's output, widget messages are bounded, and exits are described.
"""

from __future__ import annotations

import abc
import asyncio
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic import extensions
from sgpu_magic.agent.memory_watch import MemoryWatch
from sgpu_magic.agent.rank_deaths import describe_death
from sgpu_magic.agent.ranks import shared_memory
from sgpu_magic.agent.ranks.group import Group, RunRanks
from sgpu_magic.agent.ranks.rank_process import NotebookFrames
from sgpu_magic.agent.reports import EventReports
from sgpu_magic.agent.runs.run_files import AttemptFiles
from sgpu_magic.agent.runs.run_memory import BackgroundCopier
from sgpu_magic.agent.runs.send_files_to_pool import FilesToPool
from sgpu_magic.agent.watch.sampling import Sampling
from sgpu_magic.config import Settings
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.codec import Order
from sgpu_magic.wire.events import EventBody, Noted, RanksStarted, RemainingRank
from sgpu_magic.wire.node import DetachRun, Launch
from sgpu_magic.wire.rank import Cleared, CommsFromRank, DescendantsEnded, Displayed, InPlace
from sgpu_magic.wire.rank_events import CommsMoved, DisplayPublished, Failure, OutputCleared, RankStack

if TYPE_CHECKING:
    from sgpu_magic.agent.run_registry import RunRegistry

# report killed ranks that still exist after this time: the driver may take a second to free their memory
_REMAINS_S = 2.0
# limit for all ranks of one run together, since events are kept on disk
MOST_COMM_BYTES = 256 << 20


class AgentServices(msgspec.Struct, frozen=True):
    """What every run of an agent shares.

    Args:
        copier: Copies payloads and results into the runs' directories in the background.
        settings: The pool's settings.
        sampling: Samples the usage of ranks and devices.
        reports: Sends requests to the pool service.
        listener: Receives the runs' events.
        far: Sends run files to a pool on another machine.
    """

    copier: BackgroundCopier
    settings: Settings
    sampling: Sampling
    reports: EventReports
    listener: RunRegistry
    far: FilesToPool


class Attempt(msgspec.Struct, frozen=True):
    """One attempt to execute a run on this node.

    Args:
        launch: The launch to execute.
        frames: Raw frames of the launch; the first is an inline payload.
        predecessor: The previous attempt, or the `PreparingRun` that prepared this one; its payload is reused.
    """

    launch: Launch
    frames: Sequence[bytes]
    predecessor: NodeRun | None = None


class NodeRun(abc.ABC):
    """A run on this node.

    Args:
        attempt: The launch and its payload.
        here: What all runs of the agent share.

    Attributes:
        ended: Whether its `RunEnded` was reported; its ranks may still exist.
        has_exited: Whether its ranks are dead and reaped, or idle again in their session.

    Raises:
        OSError: The run's directory can't be made.
    """

    def __init__(self, attempt: Attempt, here: AgentServices) -> None:
        self.launch = attempt.launch
        self.run_id = attempt.launch.spec.run_id
        self._here = here
        self._listener = here.listener
        self._loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []
        self._host = socket.gethostname()
        self._launched_at = time.monotonic()
        self._started_at: float | None = None
        self._ending_as: RunState | None = None
        self._end_reason = ""
        self._final_state = RunState.FAILED
        self.ended = False
        self.has_exited = False
        self.files = AttemptFiles(attempt, here, self._say)

    # ------------------------------------------------------------ the agent's interface

    @property
    def pids(self) -> list[int]:
        """Process ids of its ranks; empty while it is being prepared."""
        return []

    @property
    def state(self) -> RunState:
        """The run's state on this node."""
        if self.ended:
            return self._final_state
        if self._ending_as is not None:
            return RunState.CANCELLING
        return RunState.STARTING if self._started_at is None else RunState.RUNNING

    @property
    def age_s(self) -> float:
        """Seconds since its launch."""
        return time.monotonic() - self._launched_at

    @abc.abstractmethod
    def start(self) -> None:
        """Start the run. Failures are reported as events."""

    @abc.abstractmethod
    def end_as(self, state: RunState, reason: str) -> None:
        """Stop the run; it ends with this state and reason."""

    @abc.abstractmethod
    def fail_whole(self, kind: FailureKind, message: str) -> None:
        """Fail the run as a whole; no rank is to blame."""

    def faulted(self, error: Exception) -> None:
        """Handle an exception in a callback that served the run."""
        self._listener.faulted(self.run_id, error)

    def abandon(self) -> None:
        """Drop everything pending and report nothing more: a fault prevents the run from ending normally."""
        self.ended = True
        self._on_ranks_exited()

    def on_order(self, message: Order, frames: Sequence[bytes]) -> None:
        """Execute a command of the pool service for this run; ignore one that does not concern it."""
        if isinstance(message, DetachRun):
            # it keeps running when its notebook is gone
            spec = msgspec.structs.replace(self.launch.spec, detach=True)
            self.launch = msgspec.structs.replace(self.launch, spec=spec)

    @abc.abstractmethod
    def take_stacks(self, done: Callable[[tuple[RankStack, ...]], None]) -> None:
        """Take each rank's stack and call `done` within half a second."""

    # ------------------------------------------------------------ within

    def _say(self, body: EventBody, frames: Sequence[bytes] = ()) -> None:
        self._listener.happened(self.run_id, body, frames)

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call `call` after `delay_s` seconds unless the run is gone by then."""
        self._timers.append(self._loop.call_later(delay_s, call))

    @property
    def grace_s(self) -> float:
        """Seconds that ranks get to end after a cancel or timeout."""
        asked_s = self.launch.spec.grace_s
        return self._here.settings.grace_s if asked_s is None else asked_s

    def _failure_now(self, kind: FailureKind, message: str) -> Failure:
        """Return a failure of the whole run, without a rank."""
        return Failure(kind=kind, message=message, host=self._host, at=time.time())

    def _on_ranks_exited(self) -> None:
        """Mark the run as gone and cancel its timers."""
        self.has_exited = True
        for timer in self._timers:
            timer.cancel()

    def _is_over(self) -> None:
        """Finish the run: its ranks are gone."""
        self._on_ranks_exited()
        self.files.ended(self.state)
        self._listener.run_exited(self)


# ---------------------------------------------------------------- runs with ranks


class RankRun(NodeRun):
    """A run that has ranks.

    Args:
        attempt: The launch and its payload.
        group: The ranks' group, forked or being forked.
        warm: How the ranks were started: `standby`, `zygote`, `cold` or `session`.
        here: What all runs of the agent share.
    """

    def __init__(self, attempt: Attempt, group: Group, warm: str, here: AgentServices) -> None:
        super().__init__(attempt, here)
        self.group = group
        spec, part = self.launch.spec, self.launch.part
        numbers = spec.rank_numbers if part is None else range(part.first_rank, part.first_rank + part.ranks)
        self.run_ranks = RunRanks(group, tuple(numbers))
        self._warm = warm
        self._notebook = NotebookFrames(spec.cell)
        self._memory = MemoryWatch()
        # standby ranks are older, but run no NCCL collectives before the launch
        self._launched_wall = time.time()
        self._joined: set[int] = set()
        self._comm_bytes = 0
        # killed ranks that were reported not to have ended, by process id
        self._remaining: set[int] = set()

    @property
    def pids(self) -> list[int]:
        return self.group.pids

    def group_broken(self, kind: FailureKind, message: str) -> None:
        """Fail the run: its group is lost."""
        self.fail_whole(kind, message)
        self._finish_if_exited()

    def _death(self, rank: int, status: int, *, finishing: bool = False) -> Failure:
        """Describe the exit of a rank that is dead and reaped.

        Args:
            rank: The rank.
            status: Its exit code, negative for a signal.
            finishing: Whether its cell had ended, and it finished what the cell has started.
        """
        process = self.group.rank(rank)
        process.output.drain()
        age_s = process.stack_file.sample_age_s()
        stack = self._notebook.upwards(process.stack_file.last_frames())
        frame = self._notebook.innermost(stack) or (stack[0] if stack else None)
        meaning = ""
        if status == -signal.SIGKILL:
            others = [other.pid for other in self.run_ranks.ranks if other.alive and other.pid is not None]
            meaning = self._memory.verdict(process.peak_bytes, others)
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
                line=frame.line if frame is not None and self._notebook.has(frame) else None,
                where=self._notebook.collective(stack),
            ),
            self.group.world_size,
            meaning=meaning,
            last_line=self._notebook.describe(frame) if frame is not None else "",
            line_age_s=age_s,
            last_output=process.output.tail(),
            finishing=finishing,
        )

    def _say_started(self) -> None:
        self._started_at = time.monotonic()
        self._say(RanksStarted(pids=tuple(self.run_ranks.pids), warm=self._warm))

    def _has_just_started(self, rank: int) -> bool:
        """Record that a rank has joined the process group. Returns whether it was the last one."""
        self._joined.add(rank)
        return len(self._joined) == len(self.group.ranks) and self._started_at is None

    def _show(self, rank: int, message: Displayed | Cleared) -> None:
        """Report a display or a clearing after everything the rank printed before, then let the rank continue."""
        process = self.group.rank(rank)
        process.output.drain()
        if isinstance(message, Cleared):
            self._say(OutputCleared(rank=rank, wait=message.wait))
        else:
            self._say(DisplayPublished(rank=rank, **msgspec.structs.asdict(message)))
        self.group.order(rank, InPlace())

    def _take_comms(self, rank: int, message: CommsFromRank, frames: Sequence[bytes]) -> None:
        """Report messages of a rank's widgets, up to `MOST_COMM_BYTES`."""
        had = self._comm_bytes
        self._comm_bytes += sum(len(each.data) + len(each.metadata) for each in message.messages)
        self._comm_bytes += sum(map(len, frames))
        if self._comm_bytes <= MOST_COMM_BYTES:
            self._say(CommsMoved(rank=rank, messages=message.messages), frames)
        elif had <= MOST_COMM_BYTES:
            text = f"widgets of this run's ranks have sent {MOST_COMM_BYTES >> 20} MB and are no longer updated"
            self._say(Noted(text=text))

    def on_descendants_ended(self, rank: int, message: DescendantsEnded) -> None:
        """Handle that everything that a dead rank had started has ended."""
        if not self.has_exited:
            if message.killed:
                self._say(
                    Noted(
                        text=f"rank {rank} left processes running, which were ended: {_listed(message.killed)}. Where "
                        "they are to finish, wait for them in the cell, as with `.wait()`."
                    )
                )
            if message.stuck:
                self._say(
                    Noted(
                        text=f"rank {rank} left processes running that can't be ended, because they run as another "
                        f"user or wait in the system: {_listed(message.stuck)}. They may still use the devices."
                    )
                )
        self._finish_if_exited()

    def _ranks_killed(self) -> None:
        """Check after a delay whether the killed ranks have ended."""
        self._later(_REMAINS_S, self._note_remaining)

    def _note_remaining(self) -> None:
        """Report ranks that were killed and have not ended, each once. Their end is reported by the zygote."""
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

    def _finish_if_exited(self) -> None:
        """Finish a run that has ended and owns its group, once its ranks are gone."""
        if not self.ended or self.has_exited or not self.group.has_exited:
            return
        if self.launch.spec.ray:
            extensions.ray_directories().remove(self.run_id, self._here.settings)
        shared_memory.remove_leftovers(self._launched_wall)
        self.group.close()
        self._is_over()


def _listed(commands: Sequence[str]) -> str:
    counts = Counter(commands)
    return ", ".join(command if count == 1 else f"{command} ({count} times)" for command, count in counts.items())
