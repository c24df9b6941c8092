"""The two kinds of execution: a run with its own ranks, and a cell in the ranks of a session.

A run's own ranks are new processes that exit when it is over. The devices are free at `gone`.

    launch -> all joined -> ... -> ended(succeeded) -> leave -> gone
                                -> ended(...)       -> stop  -> gone

A session's ranks and their state outlive the cell, however it ends.

    launch -> all finished -> ended(succeeded)                                  -> idle
           -> one failed   -> others released    -> groups renewed -> ended(failed)    -> idle
           -> asked to end -> interrupted        -> groups renewed -> ended(cancelled) -> idle

The session takes its next cell when the ranks are idle. A rank that does not stop delays the next cell until it stops
or is killed; `RunEnded.unstopped` tells the notebook before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.agent.ranks.orders import Rendezvous, RendezvousPoint, order_of, send_cells
from sgpu_magic.agent.runs.execution import Execution
from sgpu_magic.agent.runs.node_run import Attempt, Surroundings
from sgpu_magic.agent.runs.run_files import make_ray_directories
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.codec import Order
from sgpu_magic.wire.events import GroupRenewed
from sgpu_magic.wire.node import Adopt, MasterKnown, PartsOver, PeerFailed
from sgpu_magic.wire.rank import Failed, Finished, FromRank, Joined

if TYPE_CHECKING:
    from sgpu_magic.agent.runs.session import Session

# nothing may compete with the result on its way to the notebook
_LEAVE_DELAY_S = 0.03
# nothing may compete with the first line of output either
_SETTLED_S = 0.05
# ranks that end early have this long to write the trace of `--profile`
_TRACE_S = 15.0
_TRACE_LOOK_S = 0.1


class FreshRun(Execution):
    """Runs one launch in its own group. Takes the arguments of `RankRun`."""

    def __init__(self, attempt: Attempt, group: Group, warm: str, here: Surroundings) -> None:
        super().__init__(attempt, group, warm, here)
        # survivors of a failure get no grace unless the user asked for it
        self._survivors_grace_s = self.launch.spec.grace_s or 0.0
        self._meeting: Rendezvous | None = None
        self._waits_for_parts = False
        self._parts_over = False
        self._traces_until = 0.0
        group.listener = self

    def start(self) -> None:
        self._later(_SETTLED_S, self._memory.begin)
        try:
            self.files.memory.open_payload()
            for process in self.run_ranks.ranks:
                process.output.begin_log(self.files.log_path(process.rank))
            if self.launch.part is None:
                self._send_cells(None)
            else:
                self._meeting = Rendezvous(self.run_id, self.launch.part, self._here.reports, self._send_cells)
                self._meeting.begin()
        except OSError as error:
            self._could_not_start(error)
            return
        if self.group.broken:
            self.group_broken(self.group.broken_kind, self.group.broken)
        self.files.describe()

    def _send_cells(self, meeting: RendezvousPoint | None) -> None:
        try:
            ray = make_ray_directories(self.launch, self._here.settings) if self.launch.spec.ray else None
            order = order_of(self.launch, self.files, self._here.settings.default_store_uri, ray)
            send_cells(order, self.launch, self.run_ranks, self.files, meeting)
        except OSError as error:
            self._could_not_start(error)

    def _could_not_start(self, error: OSError) -> None:
        self.fail_whole(FailureKind.INTERNAL, f"the run could not be started on {self._host}: {error}.")

    # ------------------------------------------------------------ from the pool service

    def obey(self, message: Order, frames: Sequence[bytes]) -> None:
        match message:
            case MasterKnown():
                if self._meeting is not None and not self._is_stopping():
                    self._meeting.heard(message)
            case PeerFailed():
                self._peer_failed()
            case PartsOver():
                self._parts_over = True
                if self._waits_for_parts:
                    self._waits_for_parts = False
                    self._later(_LEAVE_DELAY_S, self._let_leave)
            case _:
                super().obey(message, frames)
        if isinstance(message, Adopt):
            if self.launch.part is not None:
                self.files.tell_released_again()
            if self._meeting is not None and not self.ended:
                self._meeting.begin()

    # ------------------------------------------------------------ from the group

    def rank_said(self, rank: int, message: FromRank, frames: Sequence[bytes]) -> None:
        if not isinstance(message, Joined):
            super().rank_said(rank, message, frames)
            return
        if self._has_just_started(rank):
            self._all_there()

    def rank_exited(self, rank: int, status: int) -> None:
        if not self.ended and (self._reports.has_finished(rank) or not self._reports.has_reported(rank)):
            self._take_failure(self._death(rank, status))
        self._stop.reported()
        self._finish_if_gone()

    # ------------------------------------------------------------ stop path

    def _begin_stop(self) -> None:
        self._stop.begin(self._grace(), interrupt_first=True, waited=self._stop_waiting)

    def _free_others(self) -> None:
        if self._survivors_grace_s and self._stop.any_handles_term():
            # the error is reported at once; ranks that save a checkpoint finish afterwards, with intact connections
            self._end(RunState.FAILED)
        else:
            self._stop.begin(0.0, interrupt_first=False, waited=self._stop_waiting)

    def _stop_waiting(self) -> None:
        self._end(self._ending_as or RunState.FAILED)

    # ------------------------------------------------------------ end

    def _after_end(self) -> None:
        self._traces_until = self._loop.time() + _TRACE_S
        if self._meeting is not None:
            self._meeting.close()
        part = self.launch.part
        if part is not None and self._final_state is RunState.SUCCEEDED and not self._parts_over:
            # ranks on other nodes may still connect to those here
            self._waits_for_parts = True
        else:
            self._later(_LEAVE_DELAY_S, self._let_leave)
        self._finish_if_gone()

    def _let_leave(self) -> None:
        cancelled = self._ending_as is not None
        if not (cancelled or self._stop.begun or self._reports.complete):
            self._stop.begin(self._survivors_grace_s, interrupt_first=False, waited=self._let_leave)
            return
        if self.launch.spec.profile and not self._reports.complete and self._loop.time() < self._traces_until:
            # SIGTERM would end a rank before it has written its trace
            self._later(_TRACE_LOOK_S, self._let_leave)
            return
        self._stop.end(self._grace() if cancelled else self._survivors_grace_s)


# ---------------------------------------------------------------- a cell in a session


# if the renewal of process groups takes longer, the failure is reported before it is done
_RENEWAL_PATIENCE_S = 0.5
# time from the interrupt until unstopped ranks are reported; the notebook frees its cell by itself at 2.8 s
_UNSTOPPED_S = 2.0
# nothing may compete with the result on its way to the notebook
_WRITE_DELAY_S = 0.03
Told = Callable[[GroupRenewed | None], None]


class SessionCell(Execution):
    """Runs one launch in ranks of a session.

    Args:
        attempt: The launch and its payload.
        session: The session.
        here: What all runs of the agent share.
    """

    def __init__(self, attempt: Attempt, session: Session, here: Surroundings) -> None:
        super().__init__(attempt, session.group, "session", here)
        self._session = session
        self._ungrouped = False

    def start(self) -> None:
        try:
            self.files.memory.open_payload()
        except OSError as error:
            self.fail_whole(FailureKind.INTERNAL, f"the cell could not be started on {self._host}: {error}.")
            self._settle()
            return
        # the ranks start first; no message of theirs is handled before this method returns
        order = order_of(self.launch, self.files, self._here.settings.default_store_uri)
        send_cells(order, self._session.launch, self.run_ranks, self.files)
        for process in self.run_ranks.ranks:
            process.output.switch_log(self.files.log_path(process.rank))
        self._all_there()
        self._memory.begin()

    # ------------------------------------------------------------ from the group

    def rank_said(self, rank: int, message: FromRank, frames: Sequence[bytes]) -> None:
        if isinstance(message, Finished | Failed) and not message.grouped:
            self._ungrouped = True
        super().rank_said(rank, message, frames)

    def rank_exited(self, rank: int, status: int) -> None:
        # for one that has finished, other ranks may wait
        if not self._reports.has_reported(rank) or (not self.ended and self._reports.has_finished(rank)):
            self._take_failure(self._death(rank, status))

    # ------------------------------------------------------------ stop path

    def fail_whole(self, kind: FailureKind, message: str) -> None:
        super().fail_whole(kind, message)
        # ranks that still run the cell keep the session busy
        if self._started_at is not None and not self._reports.complete and not self._stop.begun:
            self._stop.begin(0.0, interrupt_first=True, waited=lambda: None)

    def _begin_stop(self) -> None:
        self._stop.begin(0.0, interrupt_first=True, waited=lambda: self._later(_UNSTOPPED_S, self._tell_unstopped))

    def _free_others(self) -> None:
        self._stop.begin(0.0, interrupt_first=False, waited=self._tell_unstopped)

    def end_now(self) -> None:
        """Report the end although ranks may still run the cell: the session ends."""
        self._end(self._ending_as or RunState.CANCELLED)

    def _tell_unstopped(self) -> None:
        if self._reports.unreported:
            self._end(self._ending_as or RunState.FAILED)

    @property
    def _unstopped(self) -> tuple[int, ...]:
        return self._reports.unreported

    # ------------------------------------------------------------ end

    def _all_reported(self, state: RunState) -> None:
        reason = self._reason_to_renew(state)
        if not reason:
            self._end(state)
            self._settle()
            return
        self._later(_RENEWAL_PATIENCE_S, lambda: self._end(state))

        def done(renewed: GroupRenewed | None) -> None:
            if renewed is not None and not self.ended:
                self._say(renewed)
            self._end(state)
            self._settle()

        self._session.renew(reason, done)

    def _reason_to_renew(self, state: RunState) -> str:
        """Return why the process groups may be broken, "" when they are intact."""
        if self.group.world_size == 1:
            return "the cell destroyed the process group" if self._ungrouped else ""
        if self._stop.released:
            return "ranks were released from a collective" if state is RunState.FAILED else "the cell was stopped"
        if self._ungrouped:
            return "the cell destroyed the process group"
        if state is RunState.SUCCEEDED or self._reports.failed_alike:
            return ""
        return "ranks left the cell at different places"

    def _settle(self) -> None:
        """Return the idle ranks to the session."""
        if self.gone:
            return
        self._ranks_gone()
        try:
            self._session.cell_over(self)
        finally:
            self._listener.run_gone(self)
            self._loop.call_later(_WRITE_DELAY_S, self._write_down)

    def _write_down(self) -> None:
        self.files.describe(self._final_state)
