"""A cell in the ranks of a session. The ranks and their state outlive the cell, however it ends.

    launch -> all finished -> ended(succeeded)                                  -> idle
           -> one failed   -> others released    -> groups renewed -> ended(failed)    -> idle
           -> asked to end -> interrupted        -> groups renewed -> ended(cancelled) -> idle

The session takes its next cell when the ranks are idle. A rank that does not stop delays the next cell until it stops
or is killed; `RunEnded.unstopped` tells the notebook before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sgpu_magic.agent.ranks.orders import send_session_cells
from sgpu_magic.agent.runs.execution import Execution
from sgpu_magic.agent.runs.node_run import Attempt, Surroundings
from sgpu_magic.wire.events import GroupRenewed
from sgpu_magic.wire.rank import Failed, Finished, FromRank
from sgpu_magic.wire.states import FailureKind, RunState

if TYPE_CHECKING:
    from sgpu_magic.agent.runs.session import Session

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
        send_session_cells(
            self.launch, self._session.launch, self.group, self.files, self._here.settings.default_store_uri
        )
        for process in self.run_ranks.ranks:
            process.output.switch_log(self.files.directory.log_path(process.rank))
        self._all_there()
        self._exit_diagnosis.begin()

    # ------------------------------------------------------------ from the group

    def rank_said(self, rank: int, message: FromRank, frames: Sequence[bytes]) -> None:
        if isinstance(message, Finished | Failed) and not message.grouped:
            self._ungrouped = True
        super().rank_said(rank, message, frames)

    def rank_exited(self, rank: int, status: int) -> None:
        if not self.ended and self._reports.has_finished(rank):
            # other ranks may wait for it
            self._take_failure(self._exit_diagnosis.death(rank, status))
        elif not self._reports.has_reported(rank):
            self._take_failure(self._exit_diagnosis.death(rank, status))

    def group_broken(self, kind: FailureKind, message: str) -> None:
        """Fail the cell: its ranks are lost, and the session with them."""
        self.fail_whole(kind, message)

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

    def _after_end(self) -> None:
        """Do nothing: the session waits for ranks that do not stop."""

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
