"""One run's cell in its ranks: launch, collect results, find the root cause, stop, report the end.

    launch -> all joined -> all finished -> what their cells have started, too -> ended(succeeded)
                         -> one failed   -> others released  -> ended(failed)
           -> asked to end               -> interrupted      -> ended(...)

`ended` is what the notebook waits for. The steps before the first and after the last of these differ between a run
with its own ranks and a cell in a session (`execution_kinds`).
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence

import msgspec

from sgpu_magic.agent.failures import RankOutcomes, without_secrets
from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.agent.ranks.stop import Terminator
from sgpu_magic.agent.runs.node_run import AgentServices, Attempt, RankRun
from sgpu_magic.agent.watch.run_watch import RunWatch
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.client import ReclaimPayload, ResultsReceived, SendComms
from sgpu_magic.wire.codec import Order
from sgpu_magic.wire.events import Noted, RunEnded
from sgpu_magic.wire.node import Adopt, KillRanks, TrackingAsked, TrackingKnown
from sgpu_magic.wire.rank import (
    AskTracking,
    CellFailed,
    Cleared,
    Collectives,
    CommsFromRank,
    Displayed,
    Finished,
    FromRank,
    MetricsReported,
    Raised,
    Remarked,
    TrackingAnswered,
)
from sgpu_magic.wire.rank_events import (
    Failure,
    MetricsLogged,
    OutputWritten,
    RankFailed,
    RankStack,
    RankUnfinished,
    Unfinished,
)
from sgpu_magic.wire.run import RankResult
from sgpu_magic.wire.tracking import TrackedRun

# how long a victim's report waits for the root cause's
_PATIENCE_WITH_VICTIM_S = 0.25
# how long an error waits for an earlier one whose traceback takes longer to format
_PATIENCE_WITH_CAUSE_S = 0.03
# extra time for tracebacks when all ranks have raised, since releasing them would break a session's process groups, and
# for the report of an exit
_PATIENCE_WITH_DRAWING_S = 2.0
# extra time for tracebacks of ranks that were released; some also wait for processes, as a DataLoader's iterator does
_PATIENCE_WITH_RELEASED_S = 0.5


class Execution(RankRun):
    """Runs one launch in its ranks. Takes the arguments of `RankRun`."""

    def __init__(self, attempt: Attempt, group: Group, warm: str, here: AgentServices) -> None:
        super().__init__(attempt, group, warm, here)
        self._reports = RankOutcomes(self.run_ranks.numbers)
        # unfinished work of ranks whose cell has ended
        self._finishing: dict[int, tuple[Unfinished, ...]] = {}
        self._stop = Terminator(self.run_ranks, self._reports, self._later, self._ranks_killed, self._finishing)
        # whether the root cause is being found; ranks that have raised and format their tracebacks, and until when
        self._deciding = False
        self._drawing: set[int] = set()
        self._drawn_by: float | None = None
        lease, reported = self.launch.lease, self._reports.has_reported
        self._watch = RunWatch(self.run_ranks, lease, self._notebook, reported, here, self._say)
        # the run's MLflow target, and ranks that wait for it
        self._tracked: TrackedRun | None = None
        self._asking: list[int] = []
        self._remarks: set[str] = set()
        self._last_stacks: tuple[RankStack, ...] = ()
        # whether stacks are being taken of ranks that may have blocked a collective
        self._taking_stacks = False

    # ------------------------------------------------------------ differs between the two kinds

    @abc.abstractmethod
    def rank_exited(self, rank: int, status: int) -> None:
        """Handle the exit of one of its ranks, which is dead and reaped."""

    @abc.abstractmethod
    def _begin_stop(self) -> None:
        """Begin the stop path: the run was told to end."""

    @abc.abstractmethod
    def _free_others(self) -> None:
        """Stop the other ranks: the root cause is known."""

    def _all_reported(self, state: RunState) -> None:
        """End the run as `state`: no rank runs the cell any more."""
        self._end(state)

    def _after_end(self) -> None:
        """Continue after `RunEnded` was reported."""

    # ------------------------------------------------------------ from the group

    def on_rank_message(self, rank: int, message: FromRank, frames: Sequence[bytes]) -> None:
        """Handle a message of one of its ranks."""
        match message:
            case Displayed() | Cleared():
                self._show(rank, message)
            case CommsFromRank():
                if not self.ended:
                    self._take_comms(rank, message, frames)
            case Finished():
                self._on_result(rank, message.result, frames)
            case CellFailed():
                self._on_failure(message.failure, frames)
            case Raised():
                self._drawing.add(rank)
            case Collectives():
                self._watch.taker.answered(rank, message)
            case Remarked(text=text):
                # show a remark only once, even if every rank makes it
                if text not in self._remarks:
                    self._remarks.add(text)
                    self._say(Noted(text=text))
            case AskTracking():
                self._answer_tracking(rank)
            case MetricsReported(metrics=metrics, params=params, tags=tags):
                if not self.ended:
                    self._say(MetricsLogged(rank=rank, metrics=metrics, params=params, tags=tags))
            case _:
                pass

    def rank_wrote(self, batch: OutputWritten) -> None:
        if not self.ended:
            self._watch.wrote()
            self._say(batch)

    def rank_log_ended(self, rank: int, problem: str) -> None:
        self.files.not_written(
            f"the log of rank {rank} ends here: {problem}; the run continues, and its output is shown"
        )

    # ------------------------------------------------------------ results and failures

    def _all_there(self) -> None:
        """Report the start: every rank is in the process group."""
        self._watch.start()
        self._say_started()

    def _on_result(self, rank: int, result: RankResult, frames: Sequence[bytes]) -> None:
        process = self.run_ranks.group.rank(rank)
        output, stream = process.output, process.stream
        output.drain()
        payload = self.files.take_result(result, stream) if stream is not None else None
        result = msgspec.structs.replace(result, payload=payload, lines=output.lines, output_bytes=output.total_bytes)
        self._reports.add_result(result, frames)
        self._stop.reported()
        self._check_all_reported()

    def _on_failure(self, failure: Failure, frames: Sequence[bytes] = ()) -> None:
        rank = failure.rank
        if rank is None or rank in self._reports.failures:
            return
        self.run_ranks.group.rank(rank).output.drain()
        failure, frames = without_secrets(failure, frames, self.launch.context.environ, self.launch.spec.env_names)
        if self._stop.caused(failure):
            failure = msgspec.structs.replace(failure, after_stop=True)
        self._reports.add_failure(failure, frames)
        if failure.collective_timeout is not None and not (self._taking_stacks or self._last_stacks):
            self._take_stacks_of_hang()
        # usage before the failure is more informative than that of failing ranks
        self._watch.is_ending()
        self._stop.reported()
        if not self.ended and self._ending_as is None:
            self._say(RankFailed(failure=failure))
            self._decide_soon(failure)
        self._check_all_reported()

    def _decide_soon(self, failure: Failure) -> None:
        """Wait until the root cause is known: a victim's report may come before it."""
        if not (failure.is_consequence and self._deciding):
            self._deciding = True
            self._later(_PATIENCE_WITH_VICTIM_S if failure.is_consequence else _PATIENCE_WITH_CAUSE_S, self._decide)

    def _decide(self) -> None:
        """Free the ranks that may wait for the failed one.

        Waits while all others have raised too and draw their tracebacks, while a dead rank's exit is not reported, and
        for the stacks of a hang.
        """
        if self._is_stopping():
            return
        now = self._loop.time()
        self._drawn_by = self._drawn_by or now + _PATIENCE_WITH_DRAWING_S
        unreported = self._reports.unreported
        ends = any(self.run_ranks.group.rank(rank).is_ending() for rank in unreported)
        if (self._taking_stacks or ends or self._drawing.issuperset(unreported)) and now < self._drawn_by:
            self._later(_PATIENCE_WITH_CAUSE_S, self._decide)
        else:
            self._free_others()

    def _when_drawn(self, proceed: Callable[[], None], until: float | None = None) -> None:
        """Call `proceed` when the ranks that format their tracebacks have reported, or after half a second.

        On a busy machine that takes longer than a step of the stop path, and their failures would be missing.
        """
        now = self._loop.time()
        until = now + _PATIENCE_WITH_RELEASED_S if until is None else until
        if self._drawing.intersection(self._reports.unreported) and now < until and not self.ended:
            self._later(_PATIENCE_WITH_CAUSE_S, lambda: self._when_drawn(proceed, until))
        else:
            proceed()

    def _take_stacks_of_hang(self) -> None:
        """Take the stacks before any rank is stopped: they show which ranks have not reached the collective."""
        self._taking_stacks = True
        self._watch.taker.take(self._keep_stacks_of_hang)

    def _keep_stacks_of_hang(self, stacks: tuple[RankStack, ...]) -> None:
        self._taking_stacks = False
        self._last_stacks = stacks

    def _stacks_at_end(self) -> tuple[RankStack, ...]:
        """Return the stacks that were taken, and where the ranks were that torch has aborted since."""
        found = {stack.rank: stack for stack in self._last_stacks}
        for rank, failure in self._reports.failures.items():
            if failure.collective_timeout is not None:
                waited_in = failure.collective_timeout.collective
                found[rank] = RankStack(rank=rank, frames=failure.stack, collective=waited_in)
        return tuple(found[rank] for rank in sorted(found))

    def _check_all_reported(self) -> None:
        if not self._reports.complete:
            return
        if self._ending_as is not None:
            self._all_reported(self._ending_as)
        elif self._reports.failures:
            self._all_reported(RunState.FAILED)
        else:
            self._all_reported(RunState.SUCCEEDED)

    # ------------------------------------------------------------ stop path

    def end_as(self, state: RunState, reason: str) -> None:
        """Stop the run by the stop path; a timeout takes the ranks' stacks first."""
        if self.ended or self._ending_as is not None:
            return
        self._ending_as = state
        self._end_reason = reason
        self._watch.is_ending()
        if state is RunState.TIMED_OUT:
            self._watch.taker.take(self._stop_with_stacks)
        else:
            self._begin_stop()

    def _stop_with_stacks(self, stacks: tuple[RankStack, ...]) -> None:
        self._last_stacks = stacks
        if not self.ended:
            self._begin_stop()

    def _is_stopping(self) -> bool:
        return self.ended or self._ending_as is not None or self._stop.begun

    def _peer_failed(self) -> None:
        """Handle the failure of a rank on another node."""
        if not self._is_stopping():
            self._watch.is_ending()
            self._deciding = True
            self._decide()

    def fail_whole(self, kind: FailureKind, message: str) -> None:
        """Fail the run as a whole; no rank is to blame."""
        self._reports.add_failure(self._failure_now(kind, message))
        self._end(self._ending_as or RunState.FAILED)

    # ------------------------------------------------------------ end

    def _end(self, state: RunState) -> None:
        """Report `RunEnded`, once."""
        if self.ended:
            return
        for process in self.run_ranks.ranks:
            output = process.output
            output.drain(last=True)
            self._reports.count_output(process.rank, output.lines, output.total_bytes)
        self._watch.end()
        now = time.monotonic()
        started = self._started_at or now
        unfinished = self._unfinished
        late = self._failure_now(FailureKind.TIMEOUT, self._end_reason)
        ended, frames = self._reports.last_word(
            RunEnded(
                state=state,
                failure=late if state is RunState.TIMED_OUT else None,
                reason=self._end_reason if state is RunState.CANCELLED else "",
                cut_off=unfinished if state is RunState.SUCCEEDED else (),
                finish_s=self._here.settings.finish_timeout_s if unfinished else 0.0,
                stacks=self._stacks_at_end(),
                unstopped=self._unstopped,
                starting_s=started - self._launched_at,
                running_s=now - started,
            )
        )
        if not ended.results:
            self.files.memory.close_results()
        self.ended = True
        self._final_state = state
        self._say(ended, frames)
        self._after_end()

    def abandon(self) -> None:
        super().abandon()
        self._watch.end()

    @property
    def _unfinished(self) -> tuple[RankUnfinished, ...]:
        """What ranks whose cell has ended still finish."""
        return tuple(RankUnfinished(rank=rank, work=work) for rank, work in sorted(self._finishing.items()))

    @property
    def _unstopped(self) -> tuple[int, ...]:
        """Ranks of a session that still run the cell."""
        return ()

    # ------------------------------------------------------------ the agent's interface (NodeRun)

    def take_stacks(self, done: Callable[[tuple[RankStack, ...]], None]) -> None:
        self._watch.taker.take(done)

    def on_order(self, message: Order, frames: Sequence[bytes]) -> None:
        match message:
            case TrackingKnown():
                # a missing target is not cached: the next rank's request is sent again
                self._tracked = message.tracked
                asking, self._asking = self._asking, []
                for rank in asking:
                    self._send_tracking(rank, message.problem)
            case SendComms() if self._started_at is not None and not self.has_exited:
                self.group.hear_comms(message, frames)
            case Adopt() if self._asking:
                self._here.reports.ask(TrackingAsked(run_id=self.run_id))
            case KillRanks():
                self._stop.kill_unreported()
            case ReclaimPayload() if self.has_exited or (self.ended and self._final_state is RunState.SUCCEEDED):
                self.files.memory.give_payload_up()
            case ResultsReceived() if not self.launch.spec.detach:
                # keep small results for later clients, until they are in the run's directory
                settings = self._here.settings
                if self.files.memory.result_bytes > min(settings.keep_results, settings.keep_payload):
                    self.files.memory.close_results()
            case _:
                super().on_order(message, frames)

    def _answer_tracking(self, rank: int) -> None:
        """Send a rank the run's MLflow target. The pool service is asked once; its answer is cached."""
        if self._tracked is not None:
            self._send_tracking(rank, "")
            return
        self._asking.append(rank)
        if len(self._asking) == 1:
            self._here.reports.ask(TrackingAsked(run_id=self.run_id))

    def _send_tracking(self, rank: int, problem: str) -> None:
        self.group.order(rank, TrackingAnswered(run_id=self.run_id, tracked=self._tracked, problem=problem))
