"""One run in one group: launch, gather, find the root cause, stop, say when every process is gone.

The life of a run here:

    launch -> all joined -> all finished -> ended(succeeded) -> leave -> gone
                         -> one failed   -> others released  -> ended(failed) -> stop -> gone
           -> asked to end               -> interrupted      -> ended(...)    -> stop -> gone

`ended` is what the notebook waits for; the devices are free at `gone`.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from sgpu_magic.agent import leftovers, root_cause
from sgpu_magic.agent.belongings import Belongings
from sgpu_magic.agent.cell_orders import send_cells
from sgpu_magic.agent.deaths import Coroner
from sgpu_magic.agent.displays import show
from sgpu_magic.agent.gathering import Gathering
from sgpu_magic.agent.group import Group
from sgpu_magic.agent.keeper import Keeper
from sgpu_magic.agent.run_watch import RunWatch
from sgpu_magic.agent.sampling import Sampling
from sgpu_magic.agent.stacks import NotebookFrames
from sgpu_magic.agent.stop_path import StopPath
from sgpu_magic.config import Settings
from sgpu_magic.protocol.events import EventBody, Noted, OutputWritten, RankFailed, RanksStarted
from sgpu_magic.protocol.node_messages import (
    Cleared,
    Collectives,
    Displayed,
    Failed,
    Finished,
    FromRank,
    Joined,
    Launch,
)
from sgpu_magic.protocol.records import Failure, RankResult, RankStack
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
        sampling: Samples what the ranks and their devices use.
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
        sampling: Sampling,
        listener: ExecutionListener,
        predecessor: Execution | None = None,
    ) -> None:
        self.launch = launch
        self.run_id = launch.spec.run_id
        self.group = group
        self._warm = warm
        self._default_grace_s = settings.grace_s
        self._keep_results = min(settings.keep_results, settings.keep_payload)
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
        self._watch = RunWatch(
            group, launch.lease, notebook, self._gathering.has_reported, sampling, settings, self._say
        )
        self._last_stacks: tuple[RankStack, ...] = ()
        self._ending_as: RunState | None = None
        self._end_reason = ""
        self._final_state = RunState.FAILED
        self._ended = False
        self._deciding = False
        self._gone = False
        inherited = predecessor.belongings if predecessor is not None and predecessor.gone else None
        self.belongings = Belongings(launch, frames, keeper, settings.keep_payload, self._say, inherited)
        group.listener = self

    # ------------------------------------------------------------ start

    def start(self) -> None:
        """Send every rank its cell. Failures come as events like any other."""
        self._later(_SETTLED_S, self._coroner.begin)
        launch = self.launch
        try:
            self.belongings.open_payload()
            for process in self.group.ranks:
                process.output.begin_log(self.belongings.directory.log_path(process.rank))
            send_cells(launch, self.group, self.belongings)
        except OSError as error:
            self._fail_whole(FailureKind.INTERNAL, f"the run could not be started on {self._host}: {error}.")
            return
        if self.group.broken:
            self.group_broken(self.group.broken_kind, self.group.broken)
        self.belongings.describe()

    # ------------------------------------------------------------ from the group

    def rank_said(self, rank: int, message: FromRank, frames: Sequence[bytes]) -> None:
        match message:
            case Joined():
                self._joined.add(rank)
                if len(self._joined) == len(self.group.ranks) and self._started_at is None:
                    self._started_at = time.monotonic()
                    self._watch.start()
                    self._say(RanksStarted(pids=tuple(self.group.pids), warm=self._warm))
            case Displayed() | Cleared():
                show(self.group.ranks[rank], message, self._say)
            case Finished():
                self._take_result(rank, message.result, frames)
            case Failed():
                self._take_failure(message.failure, frames)
            case Collectives():
                self._watch.taker.answered(rank, message)

    def rank_wrote(self, batch: OutputWritten) -> None:
        if not self._ended:
            self._watch.wrote()
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
        stream = self.group.ranks[rank].stream
        payload = self.belongings.take_result(result, stream) if stream is not None else None
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
        self._watch.is_ending()
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
        self._watch.is_ending()
        if state is RunState.TIMED_OUT:
            self._watch.taker.take(self._stop_with_stacks)
        else:
            self._stop.begin(self._grace(), interrupt_first=True, waited=self._stop_waiting)

    def take_stacks(self, done: Callable[[tuple[RankStack, ...]], None]) -> None:
        """Look where each rank is and call `done` within half a second."""
        self._watch.taker.take(done)

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
        self._watch.end()
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
            self.belongings.close_results()
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
        self.belongings.ended(self._final_state)
        self._listener.run_gone(self)

    # ------------------------------------------------------------ what the agent asks

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

    def give_payload_up(self) -> None:
        """The notebook wants its memory file back."""
        if self._gone or (self._ended and self._final_state is RunState.SUCCEEDED):
            self.belongings.give_payload_up()

    def results_received(self) -> None:
        """The notebook holds the results itself.

        Those of a detached run, and small ones, stay until they are in the run's directory, for who comes later.
        """
        if not self.launch.spec.detach and self.belongings.result_bytes > self._keep_results:
            self.belongings.close_results()

    # ------------------------------------------------------------ within

    def _say(self, body: EventBody, frames: Sequence[bytes] = ()) -> None:
        self._listener.happened(self.run_id, body, frames)

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._timers.append(self._loop.call_later(delay_s, call))
