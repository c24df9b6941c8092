"""The two kinds of execution: a run with its own ranks, and a cell in the ranks of a session.

A run's own ranks are new processes that exit when it is over. The devices are free at `gone`. A rank whose cell has
ended finishes what the cell has started, as Python does before it exits: threads, exit functions. All ranks stay until
all have finished, since the last step of a checkpoint may need a collective. A failure is reported before that. If
ranks leave child processes, success is reported when these have ended too, so that no memory or device is still in use.

    launch -> all joined -> ... -> finishing -> ended(succeeded)     -> leave -> gone
                                             -> leave, with children -> ended(succeeded) -> gone
                                             -> ended(succeeded) with what was cut off -> stop -> gone
                                -> ended(...)       -> stop  -> gone

A session's ranks and their state outlive the cell, however it ends.

    launch -> all finished -> ended(succeeded)                                  -> idle
           -> one failed   -> others released    -> groups renewed -> ended(failed)    -> idle
           -> asked to end -> interrupted        -> groups renewed -> ended(cancelled) -> idle

The session accepts its next cell when the ranks are idle. A rank that does not stop delays the next cell until it stops
or is killed; `RunEnded.unstopped` has already reported it to the notebook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sgpu_magic import extensions
from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.agent.ranks.orders import Rendezvous, RendezvousPoint, order_of, send_cells
from sgpu_magic.agent.runs.execution import Execution
from sgpu_magic.agent.runs.node_run import AgentServices, Attempt
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.codec import Order
from sgpu_magic.wire.events import GroupRenewed, Noted
from sgpu_magic.wire.node import Adopt, MasterKnown, PartsEnded, PeerFailed
from sgpu_magic.wire.option_text import Text
from sgpu_magic.wire.rank import CellFailed, DescendantsEnded, Finished, Finishing, FromRank, Joined
from sgpu_magic.wire.rank_events import Unfinished
from sgpu_magic.wire.run import PrivateRay

if TYPE_CHECKING:
    from sgpu_magic.agent.runs.session import NodeSession

# let the result reach the notebook before the ranks' exits compete for the CPU
_LEAVE_DELAY_S = 0.03
# let the first line of output reach the notebook before memory is monitored
_SETTLED_S = 0.05
# ranks that end early have this long to write the trace of `--profile`
_TRACE_S = 15.0
_TRACE_POLL_S = 0.1
SHOWN_AFTER_S = 0.2
"""Work that ranks finish within this time is not shown."""

# after a failure, time for ranks to finish what their cells started; short, since queued runs may need the devices
_FINISH_AFTER_FAILURE_S = 30.0
# if the renewal of process groups takes longer, the failure is reported before it is done
_RENEWAL_PATIENCE_S = 0.5
# time from the interrupt until unstopped ranks are reported; the notebook frees its cell by itself at 2.8 s
_UNSTOPPED_S = 2.0


class FreshRun(Execution):
    """Runs one launch in its own group. Takes the arguments of `Execution`."""

    def __init__(self, attempt: Attempt, group: Group, warm: str, here: AgentServices) -> None:
        super().__init__(attempt, group, warm, here)
        # survivors of a failure get no grace unless the user asked for it
        self._survivors_grace_s = self.launch.spec.grace_s or 0.0
        self._meeting: Rendezvous | None = None
        self._waits_for_parts = False
        self._parts_over = False
        self._traces_until = 0.0
        # whether the cell has ended on every rank while some still finish what it started
        self._awaits_finish = False
        # whether ranks have child processes, and whether these are ended before the run's end is reported
        self._has_children = False
        self._awaits_children = False
        self._peer_has_failed = False
        group.listener = self

    def start(self) -> None:
        self._later(_SETTLED_S, self._supervisor.memory.begin)
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
            ray: PrivateRay | None = None
            if self.launch.spec.ray:
                ray = extensions.ray_directories().make(self.launch, self._here.settings)
            order = order_of(self.launch, self.files, self._here.settings.default_store_uri, ray)
            send_cells(order, self.launch, self.run_ranks, self.files, meeting)
        except OSError as error:
            self._could_not_start(error)

    def _could_not_start(self, error: OSError) -> None:
        self.fail_whole(FailureKind.INTERNAL, f"the run could not be started on {self._host}: {error}.")

    # ------------------------------------------------------------ from the pool service

    def on_order(self, message: Order, frames: Sequence[bytes]) -> None:
        match message:
            case MasterKnown():
                if self._meeting is not None and not self._is_stopping():
                    self._meeting.on_master_known(message)
            case PeerFailed() if self._awaits_finish:
                # the ranks on this node have succeeded; they finish as after a failure of their own
                self._peer_has_failed = True
                self._end(RunState.SUCCEEDED)
            case PeerFailed():
                self._peer_failed()
            case PartsEnded():
                self._parts_over = True
                if self._waits_for_parts:
                    self._waits_for_parts = False
                    self._later(_LEAVE_DELAY_S, self._release_ranks)
            case _:
                super().on_order(message, frames)
        if isinstance(message, Adopt):
            if self.launch.part is not None:
                self.files.repeat_released()
            if self._meeting is not None and not self.ended:
                self._meeting.begin()

    # ------------------------------------------------------------ from the group

    def on_rank_message(self, rank: int, message: FromRank, frames: Sequence[bytes]) -> None:
        match message:
            case Joined():
                if self._supervisor.record_joined(rank) and self._started_at is None:
                    self._all_there()
            case Finishing(work=work, leaves_processes=leaves):
                self._has_children = self._has_children or leaves
                self._note_finishing(rank, work)
            case _:
                super().on_rank_message(rank, message, frames)

    def rank_exited(self, rank: int, status: int) -> None:
        has_finished = self._reports.has_finished(rank)
        finishing = rank in self._unfinished.ranks and has_finished
        if finishing and status == 0:
            # an exit function ended the process, which is allowed
            self._note_finishing(rank, None)
        elif not (self.ended or self._awaits_children) and (has_finished or not self._reports.has_reported(rank)):
            self._unfinished.update(rank, None)
            self._on_failure(self._supervisor.describe_death(rank, status, finishing=finishing))
        self._unfinished.update(rank, None)
        self._stop.reported()
        self._finish_if_exited()

    def on_descendants_ended(self, rank: int, message: DescendantsEnded) -> None:
        """Handle the end of a dead rank's last descendant."""
        if not self.has_exited:
            self._supervisor.note_descendants(rank, message)
        self._finish_if_exited()

    def group_broken(self, kind: FailureKind, message: str) -> None:
        """Fail the run: its group is lost."""
        self.fail_whole(kind, message)
        self._finish_if_exited()

    # ------------------------------------------------------------ what the cell has started

    def _all_reported(self, state: RunState) -> None:
        if state is not RunState.SUCCEEDED:
            self._end(state)
        elif not self._unfinished.ranks:
            self._all_finished()
        elif not self._awaits_finish:
            self._awaits_finish = True
            # stop detecting stalls: every cell has ended, and ranks may be idle while others finish
            self._watch.is_ending()
            self._later(SHOWN_AFTER_S, self._show_finishing)
            self._later(self._here.settings.finish_timeout_s, lambda: self._end(RunState.SUCCEEDED))

    def _note_finishing(self, rank: int, work: tuple[Unfinished, ...] | None) -> None:
        self._unfinished.update(rank, work)
        if not self._awaits_finish or self.ended:
            return
        if not self._unfinished.ranks and self._ending_as is None:
            self._all_finished()
        elif self._unfinished.is_reported:
            self._show_finishing()

    def _all_finished(self) -> None:
        # in a multi-node run, ranks on other nodes may still connect to those here
        if self._has_children and self.launch.part is None:
            self._awaits_children = True
            self._stop.end(0.0, 0.0, lambda: None)
        else:
            self._end(RunState.SUCCEEDED)

    def _show_finishing(self) -> None:
        """Report what the run waits for: after a short delay, and whenever it changes."""
        if not self.ended and self._ending_as is None:
            self._unfinished.report()

    def _note_cut_off(self) -> None:
        """Note, after a failure was reported, that ranks are ended before they have finished."""
        work = "; ".join(
            f"rank {each.rank}: {', '.join(f'{one.kind} {one.name}' for one in each.work) or 'its exit'}"
            for each in self._unfinished.by_rank
        )
        self._say(
            Noted(text=f"what ranks had not finished {self._finish_s():.0f} s after the failure was cut off: {work}")
        )

    def _finish_s(self) -> float:
        """Return the seconds for which ranks may go on to finish what their cell has started, from now on."""
        if self._final_state is RunState.FAILED or self._peer_has_failed:
            return min(_FINISH_AFTER_FAILURE_S, self._here.settings.finish_timeout_s)
        # after success their time is over; after a cancellation or timeout they get the usual grace
        return 0.0 if self._final_state is RunState.SUCCEEDED else self.grace_s

    # ------------------------------------------------------------ stop path

    def _begin_stop(self) -> None:
        self._stop.begin(self.grace_s, interrupt_first=True, waited=self._stop_waiting)

    def _free_others(self) -> None:
        if self._survivors_grace_s and self._stop.any_handles_term():
            # the error is reported at once; ranks that save a checkpoint finish afterwards, with intact connections
            self._end(RunState.FAILED)
        else:
            self._stop.begin(0.0, interrupt_first=False, waited=self._stop_waiting)

    def _stop_waiting(self) -> None:
        self._cause.await_tracebacks(lambda: self._end(self._ending_as or RunState.FAILED))

    # ------------------------------------------------------------ end

    def _finish_if_exited(self) -> None:
        """Finish the run once it has ended and its ranks are gone."""
        if self._awaits_children and self.group.has_exited:
            self._end(RunState.SUCCEEDED)
        if self.ended and not self.has_exited and self.group.has_exited:
            self._supervisor.close_group(self._here.settings)
            self._finish()

    def _after_end(self) -> None:
        self._traces_until = self._loop.time() + _TRACE_S
        if self._meeting is not None:
            self._meeting.close()
        part = self.launch.part
        if part is not None and self._final_state is RunState.SUCCEEDED and not self._parts_over:
            # ranks on other nodes may still connect to those here
            self._waits_for_parts = True
        else:
            self._later(_LEAVE_DELAY_S, self._release_ranks)
        self._finish_if_exited()

    def _release_ranks(self) -> None:
        cancelled = self._ending_as is not None
        if not (cancelled or self._stop.begun or self._reports.complete):
            self._stop.begin(self._survivors_grace_s, interrupt_first=False, waited=self._release_ranks)
            return
        if self.launch.spec.profile and not self._reports.complete and self._loop.time() < self._traces_until:
            # SIGTERM would end a rank before it has written its trace
            self._later(_TRACE_POLL_S, self._release_ranks)
            return
        grace_s = self.grace_s if cancelled else self._survivors_grace_s
        cut_off = self._note_cut_off if self._final_state is RunState.FAILED else lambda: None
        self._stop.end(grace_s, self._finish_s(), cut_off)


# ---------------------------------------------------------------- a cell in a session


OnRenewed = Callable[[GroupRenewed | None], None]


class SessionCell(Execution):
    """Runs one launch in ranks of a session.

    Args:
        attempt: The launch and its payload.
        session: The session.
        here: What all runs of the agent share.
    """

    def __init__(self, attempt: Attempt, session: NodeSession, here: AgentServices) -> None:
        super().__init__(attempt, session.group, "session", here)
        self._session = session
        self._ungrouped = False

    def start(self) -> None:
        try:
            self.files.memory.open_payload()
        except OSError as error:
            self.fail_whole(FailureKind.INTERNAL, f"the cell could not be started on {self._host}: {error}.")
            self._return_ranks()
            return
        # the ranks start first; no message of theirs is handled before this method returns
        order = order_of(self.launch, self.files, self._here.settings.default_store_uri)
        send_cells(order, self._session.launch, self.run_ranks, self.files)
        for process in self.run_ranks.ranks:
            process.output.switch_log(self.files.log_path(process.rank))
        self._all_there()
        self._later(_SETTLED_S, self._supervisor.memory.begin)

    # ------------------------------------------------------------ from the group

    def on_rank_message(self, rank: int, message: FromRank, frames: Sequence[bytes]) -> None:
        if isinstance(message, Finished | CellFailed) and not message.grouped:
            self._ungrouped = True
        super().on_rank_message(rank, message, frames)

    def rank_exited(self, rank: int, status: int) -> None:
        # other ranks may wait for one that has finished
        if not self._reports.has_reported(rank) or (not self.ended and self._reports.has_finished(rank)):
            self._on_failure(self._supervisor.describe_death(rank, status))

    # ------------------------------------------------------------ stop path

    def fail_whole(self, kind: FailureKind, message: Text) -> None:
        super().fail_whole(kind, message)
        # ranks that still run the cell keep the session busy
        if self._started_at is not None and not self._reports.complete and not self._stop.begun:
            self._stop.begin(0.0, interrupt_first=True, waited=lambda: None)

    def _begin_stop(self) -> None:
        self._stop.begin(0.0, interrupt_first=True, waited=lambda: self._later(_UNSTOPPED_S, self._report_unstopped))

    def _free_others(self) -> None:
        self._stop.begin(
            0.0, interrupt_first=False, waited=lambda: self._cause.await_tracebacks(self._report_unstopped)
        )

    def end_now(self) -> None:
        """Report the end although ranks may still run the cell: the session ends."""
        self._end(self._ending_as or RunState.CANCELLED)

    def _report_unstopped(self) -> None:
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
            self._return_ranks()
            return
        self._later(_RENEWAL_PATIENCE_S, lambda: self._end(state))

        def done(renewed: GroupRenewed | None) -> None:
            if renewed is not None and not self.ended:
                self._say(renewed)
            self._end(state)
            self._return_ranks()

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

    def _return_ranks(self) -> None:
        """Return the idle ranks to the session."""
        if self.has_exited:
            return
        self._on_ranks_exited()
        try:
            self._session.on_cell_ended(self)
        finally:
            self._listener.run_exited(self)
            self._session.write_later(self)

    def write_down(self) -> None:
        """Write the run's directory."""
        self.files.describe(self._final_state)
