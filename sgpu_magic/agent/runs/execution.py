"""One run's cell in its ranks: launch, collect results, find the root cause, stop, report the end.

    launch -> all joined -> all cells returned -> all ranks finished -> ended(succeeded)
                         -> one failed         -> others released    -> ended(failed)
           -> asked to end                     -> interrupted        -> ended(...)

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
from sgpu_magic.agent.runs.cause_search import CauseSearch
from sgpu_magic.agent.runs.hang_stacks import HangStacks
from sgpu_magic.agent.runs.node_run import AgentServices, Attempt, NodeRun
from sgpu_magic.agent.runs.rank_supervisor import RankSupervisor
from sgpu_magic.agent.runs.tracking_requests import TrackingRequests
from sgpu_magic.agent.runs.unfinished_work import UnfinishedWork
from sgpu_magic.agent.watch.run_watch import RunWatch
from sgpu_magic.wire.base import FailureKind, RunLimit, RunState
from sgpu_magic.wire.client import ReclaimPayload, ResultsReceived, SendComms
from sgpu_magic.wire.codec import Order
from sgpu_magic.wire.events import Noted, RunEnded
from sgpu_magic.wire.node import Adopt, KillRanks, TrackingKnown
from sgpu_magic.wire.option_text import Text
from sgpu_magic.wire.rank import (
    AskTracking,
    CellFailed,
    Cleared,
    Collectives,
    CommsFromRank,
    Displayed,
    Finished,
    FromRank,
    HeavyImported,
    MetricsReported,
    Raised,
    Remarked,
)
from sgpu_magic.wire.rank_events import (
    Failure,
    MetricsLogged,
    OutputWritten,
    RankFailed,
    RankStack,
)
from sgpu_magic.wire.run import RankResult


class Execution(NodeRun):
    """Runs one launch in its ranks.

    Args:
        attempt: The launch and its payload.
        group: The ranks' group, forked or being forked.
        warm: How the ranks were started: `standby`, `zygote`, `cold` or `session`.
        here: What all runs of the agent share.

    Attributes:
        group: The ranks' group.
        run_ranks: The ranks of the group that run the cell.
    """

    def __init__(self, attempt: Attempt, group: Group, warm: str, here: AgentServices) -> None:
        super().__init__(attempt, here)
        self.group = group
        self._warm = warm
        self._supervisor = RankSupervisor(self.launch, group, self._say, self._later)
        self.run_ranks = self._supervisor.run_ranks
        self._reports = RankOutcomes(self.run_ranks.numbers)
        self._unfinished = UnfinishedWork(self._say)
        self._stop = Terminator(
            self.run_ranks, self._reports, self._later, self._supervisor.check_killed, self._unfinished.ranks
        )
        self._watch = RunWatch(
            self.run_ranks, self.launch.lease, self._supervisor.notebook, self._reports.has_reported, here, self._say
        )
        self._stacks = HangStacks(self._watch.taker)
        self._cause = CauseSearch(
            self.run_ranks, self._reports, self._stacks, self._later, self._is_stopping, self._free_others
        )
        self._tracking = TrackingRequests(self.run_id, group, here.reports)
        self._remarks: set[str] = set()

    @property
    def pids(self) -> list[int]:
        return self.group.pids

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
                self._supervisor.show(rank, message)
            case CommsFromRank():
                if not self.ended:
                    self._supervisor.relay_comms(rank, message, frames)
            case Finished():
                self._on_result(rank, message.result, frames)
            case CellFailed():
                self._on_failure(message.failure, frames)
            case Raised():
                self._cause.on_raised(rank)
            case Collectives():
                self._watch.taker.answered(rank, message)
            case Remarked(text=text):
                # show a note only once, even if every rank sends it
                if text not in self._remarks:
                    self._remarks.add(text)
                    self._say(Noted(text=text))
            case HeavyImported(modules=modules):
                self._listener.imported(self, modules)
            case AskTracking():
                self._tracking.on_request(rank)
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
        self._report_start(self.run_ranks.pids, self._warm)

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
        if failure.collective_timeout is not None:
            self._stacks.take_once()
        # usage before the failure is more informative than that of failing ranks
        self._watch.is_ending()
        self._stop.reported()
        if not self.ended and self._ending_as is None:
            self._say(RankFailed(failure=failure))
            self._cause.on_failure(failure)
        self._check_all_reported()

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

    def end_as(self, state: RunState, reason: Text, limit: RunLimit | None = None) -> None:
        """Stop the run by the stop path. The ranks' stacks are taken first at a timeout, or if it may hang."""
        if self.ended or self._ending_as is not None:
            return
        takes_stacks = state is RunState.TIMED_OUT or self._watch.is_silent
        self._ending_as = state
        self._end_reason = reason
        self._limit = limit
        self._watch.is_ending()
        if takes_stacks:
            self._stacks.take(self._begin_stop_unless_ended)
        else:
            self._begin_stop()

    def _begin_stop_unless_ended(self) -> None:
        if not self.ended:
            self._begin_stop()

    def _is_stopping(self) -> bool:
        return self.ended or self._ending_as is not None or self._stop.begun

    def _peer_failed(self) -> None:
        """Handle the failure of a rank on another node."""
        if not self._is_stopping():
            self._watch.is_ending()
            self._cause.on_peer_failure()

    def fail_whole(self, kind: FailureKind, message: Text) -> None:
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
        unfinished = self._unfinished.by_rank
        late = self._failure_now(FailureKind.TIMEOUT, self._end_reason)
        ended, frames = self._reports.final_event(
            RunEnded(
                state=state,
                failure=late if state is RunState.TIMED_OUT else None,
                reason=str(self._end_reason) if state is RunState.CANCELLED else "",
                limit=self._limit if state is RunState.TIMED_OUT else None,
                cut_off=unfinished if state is RunState.SUCCEEDED else (),
                finish_s=self._here.settings.finish_timeout_s if unfinished else 0.0,
                stacks=self._stacks.at_end(self._reports.failures),
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
    def _unstopped(self) -> tuple[int, ...]:
        """Ranks of a session that still run the cell."""
        return ()

    # ------------------------------------------------------------ the agent's interface (NodeRun)

    def take_stacks(self, done: Callable[[tuple[RankStack, ...]], None]) -> None:
        self._watch.taker.take(done)

    def on_order(self, message: Order, frames: Sequence[bytes]) -> None:
        match message:
            case TrackingKnown():
                self._tracking.on_known(message)
            case SendComms() if self._started_at is not None and not self.has_exited:
                self.group.relay_comms(message, frames)
            case Adopt():
                self._tracking.on_new_service()
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
