"""A session: ranks that stay alive between cells and hold the lease.

launch -> all joined (connected) -> cell, cell, ... -> asked to end -> finishing -> ended -> leave -> gone

At its end the ranks finish what its cells have started, as Python does before it exits.
"""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable, Sequence

from sgpu_magic.agent import faults
from sgpu_magic.agent.failures import without_secrets
from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.agent.ranks.orders import prepare
from sgpu_magic.agent.ranks.stop import EXIT_HANDLERS_S
from sgpu_magic.agent.runs.execution_kinds import SHOWN_AFTER_S, OnRenewed, SessionCell
from sgpu_magic.agent.runs.node_run import AgentServices, Attempt, NodeRun
from sgpu_magic.agent.runs.rank_questions import Questions
from sgpu_magic.agent.runs.rank_supervisor import RankSupervisor
from sgpu_magic.agent.runs.session_events import SessionEvents
from sgpu_magic.agent.runs.session_logs import SessionLogs
from sgpu_magic.agent.runs.session_repair import SessionRepair
from sgpu_magic.agent.runs.unfinished_work import UnfinishedWork
from sgpu_magic.agent.timers import PutOff
from sgpu_magic.agent.watch.sampling import RunSampler
from sgpu_magic.wire.base import CancelReason, FailureKind, RunLimit, RunState
from sgpu_magic.wire.client import ReclaimPayload, SendComms
from sgpu_magic.wire.codec import Order
from sgpu_magic.wire.events import Noted, RunEnded
from sgpu_magic.wire.node import KillRanks
from sgpu_magic.wire.option_text import Text
from sgpu_magic.wire.rank import (
    CellFailed,
    Cleared,
    CommsFromRank,
    DescendantsEnded,
    Displayed,
    Finish,
    Finishing,
    FromRank,
    Joined,
    QuestionAnswered,
    Remarked,
    Renewed,
)
from sgpu_magic.wire.rank_events import Failure, OutputWritten, RankStack, Unfinished
from sgpu_magic.wire.run import RankAnswer, RankQuestion

# a cell that is stopped with its session gets this long to report its own end
_CELL_ENDS_S = 0.5
# the directories of ended cells are written when no other cell has followed for so long, since that takes as long as a
# short cell itself; at the latest after the second time
_WRITE_DELAY_S, _WRITTEN_WITHIN_S = 0.03, 0.3


class SessionRefuses(Exception):
    """The session can't take a cell; the message says why and what to do."""


class NodeSession(NodeRun):
    """One session's ranks.

    Args:
        attempt: The session's launch.
        group: The ranks' group, forked or being forked.
        warm: How the ranks were started: `standby`, `zygote` or `cold`.
        here: What all runs of the agent share.

    Attributes:
        group: The ranks' group.
        run_ranks: The session's ranks on this node.
    """

    def __init__(self, attempt: Attempt, group: Group, warm: str, here: AgentServices) -> None:
        super().__init__(attempt, here)
        launch = self.launch
        self.group = group
        self._warm = warm
        self._supervisor = RankSupervisor(launch, group, self._say, self._later)
        self.run_ranks = self._supervisor.run_ranks
        self._sampler = RunSampler(self.run_ranks, launch.lease, self._say, lambda use: None)
        self._events = SessionEvents(self._say)
        self._cell: SessionCell | None = None
        # ended cells whose directories are to be written
        self._unwritten: list[SessionCell] = []
        self._writing = PutOff(self._write_down, _WRITTEN_WITHIN_S)
        # called when the running cell has ended
        self._waiting: list[Callable[[], None]] = []
        self._questions = Questions(group)
        self._failure: Failure | None = None
        self._logs = SessionLogs(group, self.files)
        # whether the session ends and its ranks finish what its cells have started
        self._is_finishing = False
        self._unfinished = UnfinishedWork(self._say)
        self._finish_s = 0.0
        self._repair = SessionRepair(
            group, launch, here.settings.runtime_path, self._events, self._say, self._logs.begin
        )
        group.listener = self

    @property
    def pids(self) -> list[int]:
        return self.group.pids

    def start(self) -> None:
        """Prepare the ranks: context, devices and process group."""
        self._supervisor.memory.begin()
        self._logs.begin(self.run_ranks.numbers)
        try:
            prepare(self.launch, self.group, self.run_ranks.numbers, stays=True)
        except OSError as error:
            self.fail_whole(FailureKind.INTERNAL, f"the session could not be started on {self._host}: {error}.")
            return
        if self.group.broken:
            self.group_broken(self.group.broken_kind, self.group.broken)
        self.files.describe()

    # ------------------------------------------------------------ cells

    def execute(self, attempt: Attempt) -> SessionCell:
        """Accept a cell and return it; the caller starts it.

        Raises:
            SessionRefuses: The session has ended or is busy, or a participating rank is dead.
            OSError: The run's directory can't be made.
        """
        if not self.connected:
            raise SessionRefuses(f"session {self.launch.spec.name} has ended. %sgpu_connect starts another one.")
        spec = attempt.launch.spec
        dead = [rank for rank in spec.rank_numbers if not self.group.rank(rank).alive]
        if dead:
            ranks = ",".join(map(str, dead))
            who = f"rank {ranks} of session {self.launch.spec.name} is" if len(dead) == 1 else f"ranks {ranks} are"
            raise SessionRefuses(
                f"{who} dead. `%sgpu_restart --rank {ranks}` starts new processes in their place; --ranks runs a cell "
                "on the others."
            )
        if self._cell is not None or self._repair.busy:
            raise SessionRefuses(f"session {self.launch.spec.name} is busy with another cell. Run it again.")
        cell = SessionCell(attempt, self, self._here)
        self._logs.lend(cell.run_ranks.numbers, cell.files)
        self._events.on_cell_started(spec.name)
        self._cell = cell
        self._writing.put_off_if_due(_WRITTEN_WITHIN_S)
        return cell

    def on_cell_ended(self, cell: SessionCell) -> None:
        """Take the ranks back from a cell: they are idle again."""
        self._cell = None
        self._events.on_cell_ended()
        if not self.has_exited:
            self._logs.take_back(cell.run_ranks.numbers)
        self._repair.proceed()
        self._call_waiting()

    def write_later(self, cell: SessionCell) -> None:
        """Write the directory of a cell that has ended, when no other cell follows at once."""
        self._unwritten.append(cell)
        self._writing.put_off(_WRITE_DELAY_S)

    def _write_down(self) -> None:
        cells, self._unwritten = self._unwritten, []
        for cell in cells:
            with faults.guarded(functools.partial(self._here.listener.faulted, cell.run_id)):
                cell.write_down()

    def when_line_is_free(self, call: Callable[[], None]) -> bool:
        """Call `call` when the cell that came over the line, or the session, has ended. False if no such cell runs."""
        if not self.runs_line_cell:
            return False
        self._waiting.append(call)
        return True

    def _call_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self._loop.call_soon(call)

    def renew(self, reason: str, done: OnRenewed) -> None:
        """Renew the process groups if possible; call `done` with the result to report, or None."""
        if self._ending_as is not None or not all(process.alive for process in self.group.ranks):
            # with a dead rank, the groups are renewed when it is replaced
            done(None)
        else:
            self._repair.renew(reason, done)

    def restart(self, ranks: Sequence[int], done: Callable[[str | None], None]) -> None:
        """Replace ranks by new processes.

        Args:
            ranks: The ranks to replace; empty for all.
            done: Called with why the replacement failed, None when the new ranks have joined.
        """
        if not self.connected:
            done("the session is not connected")
        elif self._repair.busy:
            done("its ranks are already being started")
        else:
            self._repair.replace(tuple(sorted(ranks)) or self.run_ranks.numbers, done)
            self._supervisor.check_killed()
            if self._cell is None:
                self._repair.proceed()

    def ask(self, request: int, question: RankQuestion, done: Callable[[RankAnswer], None]) -> None:
        """Ask an idle rank; if the ranks are busy, `done` is called at once with a problem."""
        self._questions.ask(request, question, done, busy=self.busy or not self.connected)

    # ------------------------------------------------------------ from the group

    def on_rank_message(self, rank: int, message: FromRank, frames: Sequence[bytes]) -> None:
        cell = self._cell
        match message:
            case Joined() if self._started_at is not None:
                self._repair.record_joined(rank)
            case Joined():
                if self._supervisor.record_joined(rank) and self._ending_as is None:
                    self._connected()
            case Renewed():
                self._repair.renewed(rank, message)
            case Finishing(work=work):
                self._note_finishing(rank, work)
            case QuestionAnswered(request=request, answer=answer):
                self._questions.answered(request, answer)
            case _ if cell is not None and rank in cell.run_ranks.numbers:
                cell.on_rank_message(rank, message, frames)
            case Displayed() | Cleared():
                self._supervisor.show(rank, message)
            case CommsFromRank():
                self._supervisor.relay_comms(rank, message, frames)
            case Remarked(text=text):
                self._say(Noted(text=text))
            case CellFailed(failure=failure):
                self._could_not_prepare(failure)
            case _:
                pass

    def _could_not_prepare(self, failure: Failure) -> None:
        """Handle a rank that can't be prepared."""
        failure, _ = without_secrets(failure, (), self.launch.context.environ, self.launch.spec.env_names)
        if self._started_at is not None:
            self._repair.fail(f"rank {failure.rank}: {failure.message}")
        elif self._ending_as is None:
            self._failure = failure
            self.end_as(RunState.FAILED, "")

    def _cell_of(self, rank: int) -> SessionCell | None:
        """Return the cell that the rank executes, or None."""
        cell = self._cell
        return cell if cell is not None and not cell.has_exited and rank in cell.run_ranks.numbers else None

    def rank_wrote(self, batch: OutputWritten) -> None:
        if (cell := self._cell_of(batch.rank)) is not None:
            cell.rank_wrote(batch)
        elif not self.ended:
            self._logs.add_late(batch)
            self._say(batch)

    def rank_log_ended(self, rank: int, problem: str) -> None:
        if (cell := self._cell_of(rank)) is not None:
            cell.rank_log_ended(rank, problem)
        else:
            self.files.not_written(f"the log of rank {rank} ends here: {problem}")

    def rank_exited(self, rank: int, status: int) -> None:
        cell = self._cell
        is_unexpected = self._ending_as is None and not self._repair.expects(rank)
        if is_unexpected:
            self._events.died(rank)
        self._repair.died(rank)
        self._questions.died(rank)
        self._note_finishing(rank, None)
        if cell is not None and rank in cell.run_ranks.numbers:
            cell.rank_exited(rank, status)
        elif is_unexpected and self._started_at is not None:
            self._say(Noted(text=self._supervisor.describe_death(rank, status).message))
        if is_unexpected and self._started_at is None:
            self._failure = self._supervisor.describe_death(rank, status)
            self.end_as(RunState.FAILED, "")
        if self._cell is None:
            self._repair.proceed()
        self._finish_if_exited()

    def on_descendants_ended(self, rank: int, message: DescendantsEnded) -> None:
        """Handle the end of a dead rank's last descendant."""
        if self._cell is None:
            self._repair.proceed()
        if not self.has_exited:
            self._supervisor.note_descendants(rank, message)
        self._finish_if_exited()

    def group_broken(self, kind: FailureKind, message: str) -> None:
        """Fail the session and its cell: the group is lost."""
        if self._cell is not None:
            self._cell.fail_whole(kind, message)
        self.fail_whole(kind, message)
        self._finish_if_exited()

    def _connected(self) -> None:
        self._report_start(self.run_ranks.pids, self._warm)
        # a fault in the sampling must not end the session
        with faults.charging(lambda error: self._here.sampling.end(self._sampler)):
            self._here.sampling.begin(self._sampler)

    # ------------------------------------------------------------ end (NodeRun)

    def end_as(self, state: RunState, reason: Text, limit: RunLimit | None = None) -> None:
        """End the session: its cell first, then its ranks."""
        if self._ending_as is not None:
            return
        self._ending_as, self._end_reason, self._limit = state, reason, limit
        self._repair.fail("the session ends")
        cell = self._cell
        if cell is None or cell.ended:
            self._begin_finish()
        else:
            cell.end_as(RunState.CANCELLED, f"its session ended: {reason}")
            self._later(_CELL_ENDS_S, self._begin_finish)

    def _begin_finish(self) -> None:
        """Let the ranks finish what the session's cells have started. Ranks that are busy with a cell can't."""
        ranks = [process.rank for process in self.group.ranks if process.alive]
        if self.ended or self._is_finishing:
            return
        if self._started_at is None or self.group.broken or self._cell is not None or not ranks:
            self._say_end()
            return
        self._is_finishing = True
        self._unfinished.expect(ranks)
        for rank in ranks:
            self.group.order(rank, Finish())
        # if the notebook is gone or a time limit is reached, ranks get only the grace of a stopped run
        is_asked = self._ending_as is RunState.CANCELLED and self._end_reason != CancelReason.OWNER_GONE
        self._finish_s = self._here.settings.finish_timeout_s if is_asked else self.grace_s
        self._later(SHOWN_AFTER_S, self._show_finishing)
        self._later(self._finish_s, self._say_end)

    def _note_finishing(self, rank: int, work: tuple[Unfinished, ...] | None) -> None:
        if rank not in self._unfinished.ranks or self.ended:
            return
        self._unfinished.update(rank, work)
        if not self._unfinished.ranks:
            self._say_end()
        elif self._unfinished.is_reported:
            self._unfinished.report()

    def _show_finishing(self) -> None:
        """Report what the session waits for: after a short delay, and whenever it changes."""
        if not self.ended:
            self._unfinished.report()

    def _kill(self) -> None:
        """Send SIGKILL to every rank."""
        for process in self.group.ranks:
            process.signal(signal.SIGKILL, whole_session=True)
        self._supervisor.check_killed()

    def faulted(self, error: Exception) -> None:
        """Attribute a fault to the running cell, if any; the session continues if it can."""
        if self._cell is not None and not self._cell.has_exited:
            self._cell.faulted(error)
        else:
            super().faulted(error)

    def abandon(self) -> None:
        super().abandon()
        self._call_waiting()
        self._writing.flush()
        self._here.sampling.end(self._sampler)
        # the ranks' exits are no longer handled, so their pending questions end here
        for rank in self.run_ranks.numbers:
            self._questions.died(rank)

    def fail_whole(self, kind: FailureKind, message: Text) -> None:
        if self._ending_as is None:
            self._failure = self._failure_now(kind, message)
            self.end_as(RunState.FAILED, "")

    def _say_end(self) -> None:
        if self.ended or self._ending_as is None:
            return
        if self._cell is not None:
            self._cell.end_now()
        self._here.sampling.end(self._sampler)
        self.ended = True
        self._final_state = self._ending_as
        self._call_waiting()
        self._events.close()
        self._writing.flush()
        now = time.monotonic()
        connected = self._started_at or now
        unfinished = self._unfinished.by_rank
        failure = self._failure
        if failure is None and self._ending_as is RunState.TIMED_OUT:
            failure = self._failure_now(FailureKind.TIMEOUT, self._end_reason)
        self._say(
            RunEnded(
                state=self._ending_as,
                failure=failure,
                reason="" if failure is not None else str(self._end_reason),
                limit=self._limit,
                cut_off=unfinished,
                finish_s=self._finish_s if unfinished else 0.0,
                starting_s=connected - self._launched_at,
                running_s=now - connected,
            )
        )
        self.group.request_exit()
        unready = self.run_ranks.numbers if self._cell is not None else self._unfinished.ranks
        busy = [process for process in self.group.ranks if process.alive and process.rank in unready]
        for process in busy:
            process.signal(signal.SIGTERM, whole_session=True)
        self._later(self.grace_s if busy else EXIT_HANDLERS_S, self._kill)
        self._finish_if_exited()

    def _finish_if_exited(self) -> None:
        """Finish the session once it has ended and its ranks are gone."""
        if self.ended and not self.has_exited and self.group.has_exited:
            self._supervisor.close_group(self._here.settings)
            self._finish()

    @property
    def connected(self) -> bool:
        return self._started_at is not None and self._ending_as is None

    @property
    def runs_line_cell(self) -> bool:
        """Whether a cell runs that came over the session's line: the pool service may not know it yet."""
        return not self.ended and self._cell is not None and self._cell.launch.over_line

    @property
    def is_idle(self) -> bool:
        """Whether a cell can start on all ranks at once, and none waits for them."""
        return self.connected and not self.busy and not self._waiting and all(rank.alive for rank in self.group.ranks)

    @property
    def busy(self) -> bool:
        """Whether a cell runs in the session, or its ranks are being started."""
        return self._cell is not None or self._repair.busy or (self._started_at is None and not self.has_exited)

    def on_order(self, message: Order, frames: Sequence[bytes]) -> None:
        match message:
            case SendComms() if self.connected and not self._repair.busy:
                self.group.relay_comms(message, frames)
            case KillRanks():
                self._kill()
            case ReclaimPayload():
                self.files.memory.give_payload_up()
            case _:
                # a session can't be detached: it always ends with its notebook
                pass

    def take_stacks(self, done: Callable[[tuple[RankStack, ...]], None]) -> None:
        """Take the stacks of the cell's ranks; without a cell all ranks are idle."""
        if self._cell is not None:
            self._cell.take_stacks(done)
        else:
            done(tuple(RankStack(rank=rank, problem="it is idle: no cell runs") for rank in self.run_ranks.numbers))
