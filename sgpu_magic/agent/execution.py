"""One run in one group: launch, gather, find the root cause, stop, say when every process is gone.

The life of a run here:

    launch -> all joined -> all finished -> ended(succeeded) -> leave -> gone
                         -> one failed   -> others released  -> ended(failed) -> stop -> gone
           -> asked to end               -> interrupted      -> ended(...)    -> stop -> gone

`ended` is what the notebook waits for; the devices are free at `gone`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from sgpu_magic.agent import leftovers, root_cause
from sgpu_magic.agent.deaths import Coroner
from sgpu_magic.agent.gathering import Gathering
from sgpu_magic.agent.group import Group
from sgpu_magic.agent.keeper import Keeper
from sgpu_magic.agent.run_directory import RunDirectory
from sgpu_magic.agent.run_memory import RunMemory
from sgpu_magic.agent.stack_taking import StackTaker
from sgpu_magic.agent.stacks import NotebookFrames
from sgpu_magic.agent.stall_watch import StallWatch
from sgpu_magic.agent.stop_path import StopPath
from sgpu_magic.agent.variables import torchrun_variables
from sgpu_magic.config import Settings
from sgpu_magic.protocol.events import (
    DisplayPublished,
    EventBody,
    Noted,
    OutputCleared,
    OutputWritten,
    PayloadReleased,
    RankFailed,
    RanksStarted,
)
from sgpu_magic.protocol.node_messages import (
    Cleared,
    Collectives,
    Displayed,
    Execute,
    Failed,
    Finished,
    FromRank,
    InPlace,
    Joined,
    Launch,
)
from sgpu_magic.protocol.records import (
    Failure,
    InlinePayload,
    Payload,
    RankResult,
    RankStack,
    Record,
    SharedPayload,
)
from sgpu_magic.protocol.states import FailureKind, RunState

# nothing may compete with the result on its way to the notebook
_LEAVE_DELAY_S = 0.03
# nor with the first line
_SETTLED_S = 0.05


class ExecutionListener(Protocol):
    """The agent."""

    def happened(self, run_id: str, body: EventBody, frames: Sequence[bytes]) -> None: ...
    def run_gone(self, execution: Execution) -> None: ...


class Execution:
    """Runs one launch in a group (a `GroupListener`).

    Args:
        launch: What to run.
        frames: Raw frames of the launch; the first is an inline payload.
        group: Its ranks, forked or being forked.
        warm: How the group came: `standby`, `zygote` or `cold`.
        keeper: Who copies large parts into the run's directory.
        settings: For the largest payload that is kept and the default grace.
        listener: Who hears what happened.
        predecessor: The attempt before this one, whose payload this one takes over.
    """

    def __init__(
        self,
        launch: Launch,
        frames: Sequence[bytes],
        group: Group,
        warm: str,
        keeper: Keeper,
        settings: Settings,
        listener: ExecutionListener,
        predecessor: Execution | None = None,
    ) -> None:
        self.launch = launch
        self.run_id = launch.spec.run_id
        self.group = group
        self._frames = frames
        self._warm = warm
        self._default_grace_s = settings.grace_s
        self._grace_s = launch.spec.grace_s
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []
        self._launched_at = time.monotonic()
        self._launched_ticks = leftovers.now_in_ticks()
        self._started_at: float | None = None
        self._joined: set[int] = set()
        self._gathering = Gathering(len(group.ranks))
        self._stop = StopPath(group, self._gathering, self._later)
        self._host = socket.gethostname()
        notebook = NotebookFrames(launch.spec.cell)
        self._coroner = Coroner(group, notebook, self._host)
        self._taker = StackTaker(group, notebook, self._gathering.has_reported)
        uuids = () if launch.lease.simulated else launch.lease.uuids
        self._stalls = StallWatch(group, self._taker, notebook, uuids, settings.stall_s, self._say)
        self._last_stacks: tuple[RankStack, ...] = ()
        self._ending_as: RunState | None = None
        self._end_reason = ""
        self._final_state = RunState.FAILED
        self._ended = False
        self._deciding = False
        self._gone = False
        self._directory = RunDirectory(launch)
        if predecessor is not None and predecessor.payload_at_hand:
            self._memory, self._frames = predecessor.hand_payload_over(self._payload_released)
        else:
            self._memory = RunMemory(
                launch.payload.source, self._directory.path, keeper, settings.keep_payload, self._payload_released
            )
        group.listener = self

    # ------------------------------------------------------------ start

    def start(self) -> None:
        """Send every rank its cell. Failures come as events like any other."""
        self._later(_SETTLED_S, self._coroner.begin)
        launch = self.launch
        try:
            self._memory.open_payload()
            for process in self.group.ranks:
                process.output.begin_log(self._directory.log_path(process.rank))
            self._send_cells()
        except OSError as error:
            self._fail_whole(FailureKind.INTERNAL, f"the run could not be started on {self._host}: {error}.")
            return
        if self.group.broken:
            self.group_broken(self.group.broken_kind, self.group.broken)
        try:
            self._directory.describe(self._frames[0] if isinstance(launch.payload.source, InlinePayload) else None)
        except OSError as error:
            self._say(Noted(text=f"the run's directory {self._directory.path} could not be written: {error.strerror}"))

    def _send_cells(self) -> None:
        launch = self.launch
        lease = launch.lease
        device = "cuda" if lease.uuids and not lease.simulated else "cpu"
        inline = isinstance(launch.payload.source, InlinePayload)
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as rendezvous:
            port = rendezvous.getsockname()[1]
            for process in self.group.ranks:
                rank = process.rank
                order = Execute(
                    run_id=self.run_id,
                    cell=launch.spec.cell,
                    context=launch.context,
                    layout=launch.payload.layout,
                    inline=inline,
                    outputs=launch.spec.outputs,
                    run_dir=launch.run_dir,
                    device=device,
                    rank_variables=torchrun_variables(launch, rank, port, device),
                )
                descriptors = [] if inline else [self._memory.payload_fd]
                if rank == 0:
                    descriptors.append(rendezvous.fileno())
                self.group.execute(rank, order, self._frames[:1] if inline else (), descriptors)

    # ------------------------------------------------------------ from the group

    def rank_said(self, rank: int, message: FromRank, frames: Sequence[bytes]) -> None:
        match message:
            case Joined():
                self._joined.add(rank)
                if len(self._joined) == len(self.group.ranks) and self._started_at is None:
                    self._started_at = time.monotonic()
                    self._stalls.start()
                    self._say(RanksStarted(pids=tuple(self.group.pids), warm=self._warm))
            case Displayed():
                self.group.ranks[rank].output.drain()
                self._say(
                    DisplayPublished(
                        rank=rank,
                        bundle=message.bundle,
                        metadata=message.metadata,
                        display_id=message.display_id,
                        update=message.update,
                    )
                )
                self._tell(rank, InPlace())
            case Cleared():
                self.group.ranks[rank].output.drain()
                self._say(OutputCleared(rank=rank, wait=message.wait))
                self._tell(rank, InPlace())
            case Finished():
                self._take_result(rank, message.result, frames)
            case Failed():
                self._take_failure(message.failure, frames)
            case Collectives():
                self._taker.answered(rank, message)

    def rank_wrote(self, batch: OutputWritten) -> None:
        if not self._ended:
            self._stalls.wrote()
            self._say(batch)

    def rank_log_ended(self, rank: int, problem: str) -> None:
        self._say(Noted(text=f"the log of rank {rank} ends here: {problem}; the run goes on, and its output is shown"))

    def rank_exited(self, rank: int, status: int) -> None:
        if not self._ended and (self._gathering.has_finished(rank) or not self._gathering.has_reported(rank)):
            self._take_failure(self._coroner.death(rank, status))
        self._stop.reported()
        self._finish_if_gone()

    def group_broken(self, kind: FailureKind, message: str) -> None:
        self._fail_whole(kind, message)

    # ------------------------------------------------------------ gather

    def _take_result(self, rank: int, result: RankResult, frames: Sequence[bytes]) -> None:
        output = self.group.ranks[rank].output
        output.drain()
        payload = result.payload
        if payload is not None and isinstance(payload.source, SharedPayload):
            stream = self.group.ranks[rank].stream
            if stream is None:
                return
            (descriptor,) = stream.take_descriptors(1)
            self._memory.hold_result(rank, descriptor)
            source = SharedPayload(pid=os.getpid(), fd=descriptor, size=payload.source.size)
            payload = Payload(source=source, layout=payload.layout)
        result = msgspec.structs.replace(result, payload=payload, lines=output.lines, output_bytes=output.total_bytes)
        self._gathering.add_result(result, frames)
        self._stop.reported()
        self._check_all_reported()

    def _take_failure(self, failure: Failure, frames: Sequence[bytes] = ()) -> None:
        rank = failure.rank
        if rank is None or self._gathering.has_failed(rank):
            return
        self.group.ranks[rank].output.drain()
        self._gathering.add_failure(failure, frames)
        # the picture of before says more than that of ranks which fall
        self._stalls.stop()
        self._stop.reported()
        if self._ended:
            return
        if self._ending_as is None:
            self._say(RankFailed(failure=failure))
            if not self._deciding:
                self._deciding = True
                patience = (
                    root_cause.PATIENCE_WITH_VICTIM_S if failure.is_consequence else root_cause.PATIENCE_WITH_CAUSE_S
                )
                self._later(patience, self._blame)
            elif not failure.is_consequence:
                self._later(root_cause.PATIENCE_WITH_CAUSE_S, self._blame)
        self._check_all_reported()

    def _check_all_reported(self) -> None:
        if self._ended or not self._gathering.complete:
            return
        if self._ending_as is not None:
            self._end(self._ending_as)
        elif self._gathering.failed:
            self._end(RunState.FAILED)
        else:
            self._end(RunState.SUCCEEDED)

    # ------------------------------------------------------------ stop path

    def end_as(self, state: RunState, reason: str) -> None:
        """Stop the run: TERM to those that handle it, interrupt, release, TERM, grace, KILL."""
        if self._ended or self._ending_as is not None:
            return
        self._ending_as = state
        self._end_reason = reason
        self._stalls.stop()
        if state is RunState.TIMED_OUT:
            self._taker.take(self._stop_with_stacks)
        else:
            self._stop.begin(self._grace(), interrupt_first=True, waited=self._stop_waiting)

    def take_stacks(self, done: Callable[[tuple[RankStack, ...]], None]) -> None:
        """Look where each rank is and call `done` within half a second."""
        self._taker.take(done)

    def _stop_with_stacks(self, stacks: tuple[RankStack, ...]) -> None:
        self._last_stacks = stacks
        if not self._ended:
            self._stop.begin(self._grace(), interrupt_first=True, waited=self._stop_waiting)

    def _grace(self) -> float:
        """Seconds after a cancel or a time-out."""
        return self._default_grace_s if self._grace_s is None else self._grace_s

    def _blame(self) -> None:
        """The culprit is known: free the others."""
        if self._ended or self._ending_as is not None or self._stop.begun:
            return
        if self._grace_s and self._stop.any_handles_term():
            # the error is told at once; those that save a checkpoint finish behind it, with their connections whole
            self._end(RunState.FAILED)
        else:
            self._stop.begin(0.0, interrupt_first=False, waited=self._stop_waiting)

    def _stop_waiting(self) -> None:
        if not self._ended:
            self._end(self._ending_as or RunState.FAILED)

    def _fail_whole(self, kind: FailureKind, message: str) -> None:
        """The run failed as a whole; no rank is to blame."""
        if self._ended:
            self._finish_if_gone()
            return
        self._gathering.add_failure(Failure(kind=kind, message=message, host=self._host, at=time.time()))
        self._end(self._ending_as or RunState.FAILED)

    # ------------------------------------------------------------ end

    def _end(self, state: RunState) -> None:
        for process in self.group.ranks:
            process.output.drain(last=True)
        self._stalls.stop()
        self._ended = True
        self._final_state = state
        now = time.monotonic()
        started = self._started_at or now
        ended, frames = self._gathering.last_word(
            state,
            self._end_reason,
            host=self._host,
            now=time.time(),
            starting_s=started - self._launched_at,
            running_s=now - started,
            stacks=self._last_stacks,
        )
        if not ended.results:
            self._memory.close_results()
        self._say(ended, frames)
        self._later(_LEAVE_DELAY_S, self._let_leave)
        self._finish_if_gone()

    def _let_leave(self) -> None:
        if self._ending_as is not None:
            self._stop.end(self._grace())
            return
        # survivors of a failure get none unless it was asked for
        grace_s = self._grace_s or 0.0
        if self._stop.begun or self._gathering.complete:
            self._stop.end(grace_s)
        else:
            self._stop.begin(grace_s, interrupt_first=False, waited=lambda: self._stop.end(grace_s))

    def _finish_if_gone(self) -> None:
        if not self._ended or self._gone or not self.group.gone:
            return
        self._gone = True
        for timer in self._timers:
            timer.cancel()
        leftovers.kill_leftovers(self.run_id, set(self.group.pids), self._launched_ticks)
        self.group.close()
        try:
            self._directory.ended(self._final_state)
        except OSError as error:
            self._say(Noted(text=f"run.json could not be written: {error.strerror}"))
        self._listener.run_gone(self)

    # ------------------------------------------------------------ payload and results

    def hand_payload_over(self, released: Callable[[bool, str], None]) -> tuple[RunMemory, Sequence[bytes]]:
        """Give the payload to the next attempt, which calls `released` when it is no longer read."""
        self._memory.close_results()
        self._memory.on_released = released
        return self._memory, self._frames

    @property
    def payload_at_hand(self) -> bool:
        """Whether a further attempt can have the payload from here."""
        return self._gone and self._memory.at_hand

    def detach(self) -> None:
        """The run goes on when its notebook is gone."""
        spec = msgspec.structs.replace(self.launch.spec, detach=True)
        self.launch = msgspec.structs.replace(self.launch, spec=spec)

    @property
    def state(self) -> RunState:
        if self._ended:
            return self._final_state
        if self._ending_as is not None:
            return RunState.CANCELLING
        return RunState.STARTING if self._started_at is None else RunState.RUNNING

    @property
    def ended(self) -> bool:
        """Its last word was said; its ranks may still be there."""
        return self._ended

    @property
    def gone(self) -> bool:
        """Its ranks are dead and reaped."""
        return self._gone

    @property
    def age_s(self) -> float:
        """Seconds since its launch."""
        return time.monotonic() - self._launched_at

    def keep_large_parts(self) -> None:
        """Copy the payload's and the results' memory files into the run's directory, in the background."""
        self._memory.keep()

    @property
    def holds_memory(self) -> bool:
        """Whether somebody may still ask for its results or its payload's memory."""
        return self._memory.in_use

    def give_payload_up(self) -> None:
        """The notebook wants its memory file back."""
        if self._gone or (self._ended and self._final_state is RunState.SUCCEEDED):
            self._memory.give_payload_up()

    def results_received(self) -> None:
        """The notebook holds the results itself. Those of a detached run stay until they are in its directory."""
        if not self.launch.spec.detach:
            self._memory.close_results()

    def close(self) -> None:
        """Free what is still held."""
        self._memory.close()

    def _payload_released(self, kept: bool, why: str) -> None:
        try:
            self._directory.payload_done(kept, why)
        except OSError as error:
            why = f"run.json could not be written: {error.strerror}"
        self._say(PayloadReleased(kept=kept, reason=why))

    # ------------------------------------------------------------ within

    def _tell(self, rank: int, message: Record) -> None:
        stream = self.group.ranks[rank].stream
        if stream is not None:
            stream.send(message)

    def _say(self, body: EventBody, frames: Sequence[bytes] = ()) -> None:
        self._listener.happened(self.run_id, body, frames)

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._timers.append(self._loop.call_later(delay_s, call))
