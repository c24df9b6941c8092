"""The scheduler's runs, and the few ways in which one changes or goes. Pure."""

from __future__ import annotations

from dataclasses import replace

from sgpu_magic.pool import session_rules
from sgpu_magic.pool.budget import Budget
from sgpu_magic.pool.scheduled_run import ScheduledRun
from sgpu_magic.pool.stimuli import EndRun, Instruction, MoveRun, RefuseRun, StopRun
from sgpu_magic.protocol.metering import cost_of
from sgpu_magic.protocol.states import FailureKind, RunState, can_move

# a run that is over holds its devices until its ranks have left; one that was not to wait waits for that
_LEAVING_S = 1.0


class RunTable:
    """Every run that waits or holds a lease, in order of submission, which a replaced value keeps.

    Args:
        budget: Gets what each run that ends has cost; None without one.

    Attributes:
        runs: By their ids.
        now: The time of the stimulus that is being handled.
    """

    def __init__(self, budget: Budget | None = None) -> None:
        self._budget = budget
        self.runs: dict[str, ScheduledRun] = {}
        self.now = float("-inf")

    def put(self, run: ScheduledRun) -> None:
        self.runs[run.run_id] = run

    def queue_deadline(self, run: ScheduledRun) -> float | None:
        """When a run that waits has waited long enough; None for one that does not wait, or waits for ever."""
        deadline = run.queue_deadline
        if deadline is not None and any(other.state.is_final for other in self.runs.values()):
            return max(deadline, run.submitted_at + _LEAVING_S)
        return deadline

    def move(self, run_id: str, state: RunState, reason: str = "") -> list[Instruction]:
        """The one place where a state changes. A move that the table lacks is a report that came too late."""
        run = self.runs[run_id]
        out: list[Instruction] = []
        if not can_move(run.state, state):
            # a report may skip the start: ranks that run, or are done, have started
            not_begun = run.metered_at is None and can_move(run.state, RunState.STARTING)
            if not (not_begun and can_move(RunState.STARTING, state)):
                return out
            out += self.move(run_id, RunState.STARTING)
            run = self.runs[run_id]
        metered_at = self.now if state is RunState.STARTING and run.metered_at is None else run.metered_at
        self.put(replace(run, state=state, metered_at=metered_at))
        if state.is_final and self._budget is not None and metered_at is not None:
            cost = cost_of(run.hourly, self.now - metered_at)
            self._budget.add(self.now, cost or 0.0)
        return [*out, MoveRun(run_id, state, reason)]

    def stop(self, run: ScheduledRun, state: RunState, reason: str) -> list[Instruction]:
        """End a run that waits; tell the ranks of one that has them, once."""
        if run.lease is None:
            return self.end(run, state, reason)
        if not can_move(run.state, RunState.CANCELLING):
            return []
        self.put(replace(run, stopping_as=state, reason=reason))
        return [*self.move(run.run_id, RunState.CANCELLING, reason), StopRun(run.run_id, state, reason)]

    def end(
        self, run: ScheduledRun, state: RunState, reason: str, kind: FailureKind = FailureKind.CAPACITY
    ) -> list[Instruction]:
        """A run without ranks is over."""
        moves = self.move(run.run_id, state, reason)
        run = replace(self.runs[run.run_id], reason=reason)
        return [*moves, EndRun(run.run_id, state, reason, kind), *self.remove(run)]

    def give_up(
        self, run: ScheduledRun, message: str, error: str = "CapacityError", kind: FailureKind = FailureKind.CAPACITY
    ) -> list[Instruction]:
        """A run will not get what it waits for: it fails, or is not even accepted."""
        if run.accepted:
            return self.end(run, RunState.FAILED, message, kind)
        return self.refuse(run, error, message)

    def refuse(self, run: ScheduledRun, error: str, message: str) -> list[Instruction]:
        return [RefuseRun(run.run_id, error, message), *self.remove(replace(run, reason=message))]

    def over(self, run: ScheduledRun, state: RunState) -> list[Instruction]:
        """The run's own ranks are gone."""
        moves = self.move(run.run_id, state)
        run = self.runs[run.run_id]
        if session_rules.on_its_devices(session_rules.cells_of(self.runs, run.run_id)):
            self.put(replace(run, gone=True))
            return moves
        moves += self.remove(run)
        session = self.runs.get(run.spec.session)
        if session is not None:
            still = session_rules.after_cell(self.runs, session, self.now)
            if still is None:
                del self.runs[session.run_id]
            else:
                self.put(still)
        return moves

    def remove(self, run: ScheduledRun) -> list[Instruction]:
        """Forget the run; cells that wait for it, if it is a session, have nothing to wait for any more."""
        self.runs.pop(run.run_id, None)
        return self.end_cells(run) if session_rules.is_session(run) else []

    def end_cells(self, session: ScheduledRun) -> list[Instruction]:
        """The session ends: those of its cells that wait end here, those with processes of their own are stopped."""
        out: list[Instruction] = []
        for cell in session_rules.cells_of(self.runs, session.run_id):
            if cell.lease is not None:
                if cell.spec.fresh:
                    out += self.stop(cell, RunState.CANCELLED, session_rules.end_of_fresh(session))
                continue
            why = session_rules.end_of_cell(session)
            if cell.accepted and session_rules.ends_as(session) is RunState.CANCELLED:
                out += self.end(cell, RunState.CANCELLED, why, FailureKind.SESSION)
            else:
                out += self.give_up(cell, f"{why}.", "SessionError", FailureKind.SESSION)
        return out
