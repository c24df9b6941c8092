"""The scheduler's runs, and the few ways in which one changes or goes. Pure.

What is asked of them after each stimulus is kept as an index by `put` and `drop`, the only two that change the table:
it may have a thousand runs.
"""

from __future__ import annotations

import bisect
import heapq
from dataclasses import replace

from sgpu_magic.pool.scheduling import session_rules
from sgpu_magic.pool.scheduling.capacity import Line
from sgpu_magic.pool.scheduling.costs import Budget
from sgpu_magic.pool.scheduling.scheduled_run import ScheduledRun
from sgpu_magic.pool.scheduling.stimuli import EndRun, Instruction, MoveRun, RefuseRun, StopRun
from sgpu_magic.wire.costs import cost_of
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.states import FailureKind, RunState, can_move

# a run that is over holds its devices until its ranks have left; one that was not to wait waits for that
_LEAVING_S = 1.0

LeaseChange = tuple[ScheduledRun, Lease | None, Lease | None]


class RunTable:
    """Every run that waits or holds a lease, in order of submission, which a replaced value keeps.

    Args:
        budget: Gets what each run that ends has cost; None without one.

    Attributes:
        runs: By their ids. Changed by `put` and `drop` alone.
        now: The time of the stimulus that is being handled.
    """

    def __init__(self, budget: Budget | None = None) -> None:
        self._budget = budget
        self.runs: dict[str, ScheduledRun] = {}
        self.now = float("-inf")
        self._numbers: dict[str, int] = {}
        self._ids: dict[int, str] = {}
        self._next = 0
        # numbers in order: runs that wait for devices, and cells that wait for their sessions
        self._waiting: list[int] = []
        self._waiting_cells: list[int] = []
        self._cells: dict[str, dict[str, None]] = {}
        self._sessions: set[str] = set()
        self._final: set[str] = set()
        self._costly: set[str] = set()
        self._fresh: set[str] = set()
        self._asked: set[str] = set()
        self._limits: list[tuple[float, int]] = []
        self._lease_changes: list[LeaseChange] = []

    # ------------------------------------------------------------ what there is

    def get(self, run_id: str) -> ScheduledRun | None:
        return self.runs.get(run_id)

    def number(self, run_id: str) -> int:
        """The run's place in the order of submission."""
        return self._numbers[run_id]

    def waiting(self) -> list[ScheduledRun]:
        """Runs that wait for devices."""
        return [self.runs[self._ids[number]] for number in self._waiting]

    def waiting_cells(self) -> list[ScheduledRun]:
        """Cells that wait for their sessions."""
        return [self.runs[self._ids[number]] for number in self._waiting_cells]

    def asked(self) -> dict[Line, list[ScheduledRun]]:
        """By line, runs for which an engine asked the cluster for nodes that have not come."""
        found: dict[Line, list[ScheduledRun]] = {}
        for run in self._in_order(self._asked):
            if run.want is not None:
                found.setdefault(run.want.line, []).append(run)
        return found

    def who_waits(self) -> list[ScheduledRun]:
        """Whoever waits for anything."""
        return [*self.waiting(), *self.waiting_cells(), *self._in_order(self._asked)]

    def asked_too_long(self) -> list[ScheduledRun]:
        """Runs for which nothing came in the time that they wait."""
        runs = [run for run in self._in_order(self._asked) if run.stopping_as is None]
        return [run for run in runs if run.queue_deadline is not None and self.now >= run.queue_deadline]

    def count_waiting(self) -> int:
        """How many runs wait for anything."""
        return len(self._waiting) + len(self._waiting_cells) + len(self._asked)

    def cells_of(self, session: str) -> list[ScheduledRun]:
        """Every run in the session, in order of submission."""
        return [self.runs[run_id] for run_id in self._cells.get(session, ())]

    def sessions(self) -> list[ScheduledRun]:
        return self._in_order(self._sessions)

    def on_meter(self) -> list[ScheduledRun]:
        """Runs that cost something every second."""
        return [run for run in self._in_order(self._costly) if run.is_on_meter]

    def live_cost(self, now: float) -> float:
        """What runs that have not ended have cost so far; those that are being stopped among them."""
        return sum(run.cost(now) or 0.0 for run in self._in_order(self._costly) if not run.state.is_final)

    def has_lost_session(self) -> bool:
        """Whether new processes hold devices of a session that no service knows any more."""
        return any(self._holder_of(self.runs[run_id].spec.session) is None for run_id in self._fresh)

    def take_lease_changes(self) -> list[LeaseChange]:
        """Return which run had which lease and has which, since this was asked last."""
        changes, self._lease_changes = self._lease_changes, []
        return changes

    # ------------------------------------------------------------ times

    def over_time(self) -> list[ScheduledRun]:
        """Runs whose time limit is over, in order of submission. Each is returned once."""
        due: list[int] = []
        while self._limits and self._limits[0][0] <= self.now:
            due.append(heapq.heappop(self._limits)[1])
        runs = [self.runs[self._ids[number]] for number in sorted(set(due)) if number in self._ids]
        return [run for run in runs if run.time_limit is not None and self.now >= run.time_limit]

    def next_limit(self) -> float | None:
        """When a run's time limit is over, None when none has one."""
        while self._limits:
            time, number = self._limits[0]
            run_id = self._ids.get(number)
            if run_id is not None and self.runs[run_id].time_limit == time:
                return time
            heapq.heappop(self._limits)
        return None

    def queue_deadline(self, run: ScheduledRun) -> float | None:
        """When a run that waits has waited long enough; None for one that does not wait, or waits for ever."""
        deadline = run.queue_deadline
        if deadline is not None and self._final:
            return max(deadline, run.submitted_at + _LEAVING_S)
        return deadline

    # ------------------------------------------------------------ changes

    def put(self, run: ScheduledRun) -> None:
        """Add a run, or replace what is known of it."""
        old = self.runs.get(run.run_id)
        if old is None:
            self._next += 1
            self._numbers[run.run_id] = self._next
            self._ids[self._next] = run.run_id
        self.runs[run.run_id] = run
        self._index(run.run_id, old, run)

    def drop(self, run_id: str) -> None:
        """Forget a run; nothing happens when it is not there."""
        old = self.runs.pop(run_id, None)
        if old is not None:
            self._index(run_id, old, None)
            del self._ids[self._numbers.pop(run_id)]

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
        begins = state is RunState.STARTING and run.metered_at is None and not run.freed
        metered_at = self.now if begins else run.metered_at
        self.put(replace(run, state=state, metered_at=metered_at))
        if state.is_final and self._budget is not None and metered_at is not None:
            cost = cost_of(run.hourly, self.now - metered_at)
            self._budget.add(self.now, cost or 0.0)
        return [*out, MoveRun(run_id, state, reason)]

    def requeue(self, run: ScheduledRun, reason: str) -> list[Instruction]:
        """A run whose devices are gone waits again, in its old place; its own limits go on from where they are."""
        if not can_move(run.state, RunState.QUEUED):
            return []
        run = replace(self._off_meter(run), state=RunState.QUEUED, submitted_at=self.now)
        self.put(replace(run, lease=None, begun=False, asked=False, hourly=None))
        return [MoveRun(run.run_id, RunState.QUEUED, reason)]

    def free(self, run: ScheduledRun) -> list[Instruction]:
        """The next run may have its devices, and it costs nothing any more."""
        if run.lease is not None and not run.freed:
            self.put(replace(self._off_meter(run), freed=True))
        return []

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
        if session_rules.on_its_devices(self.cells_of(run.run_id)):
            self.put(replace(run, gone=True))
            return moves
        moves += self.remove(run)
        session = self.runs.get(run.spec.session)
        if session is not None:
            still = session_rules.after_cell(self, session, self.now)
            if still is None:
                self.drop(session.run_id)
            else:
                self.put(still)
        return moves

    def remove(self, run: ScheduledRun) -> list[Instruction]:
        """Forget the run; cells that wait for it, if it is a session, have nothing to wait for any more."""
        self.drop(run.run_id)
        return self.end_cells(run) if session_rules.is_session(run) else []

    def end_cells(self, session: ScheduledRun) -> list[Instruction]:
        """The session ends: those of its cells that wait end here, those with processes of their own are stopped."""
        out: list[Instruction] = []
        for cell in self.cells_of(session.run_id):
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

    # ------------------------------------------------------------ within

    def _off_meter(self, run: ScheduledRun) -> ScheduledRun:
        """The run with its meter stopped; what it has cost so far counts for its own limit and the pool's budget."""
        if run.metered_at is None:
            return run
        metered_s = self.now - run.metered_at
        cost = cost_of(run.hourly, metered_s) or 0.0
        if self._budget is not None and cost:
            self._budget.add(self.now, cost)
        return replace(run, metered_at=None, spent=run.spent + cost, ran_s=run.ran_s + metered_s)

    def _in_order(self, run_ids: set[str]) -> list[ScheduledRun]:
        return [self.runs[run_id] for run_id in sorted(run_ids, key=self._numbers.__getitem__)]

    def _holder_of(self, session: str) -> Lease | None:
        run = self.runs.get(session)
        return None if run is None else run.lease

    def _index(self, run_id: str, old: ScheduledRun | None, new: ScheduledRun | None) -> None:
        run = new or old
        if run is None:
            return
        had, has = old.lease if old is not None else None, new.lease if new is not None else None
        held, holds = old.held_lease if old is not None else None, new.held_lease if new is not None else None
        if held is not holds:
            self._lease_changes.append((run, held, holds))
        in_session = bool(run.spec.session)
        waited, waits = old is not None and had is None, new is not None and has is None
        if waited != waits:
            numbers, number = self._waiting_cells if in_session else self._waiting, self._numbers[run_id]
            if waits:
                bisect.insort(numbers, number)
            else:
                del numbers[bisect.bisect_left(numbers, number)]
        if in_session and (old is None or new is None):
            cells = self._cells.setdefault(run.spec.session, {})
            if new is not None:
                cells[run_id] = None
            else:
                del cells[run_id]
                if not cells:
                    del self._cells[run.spec.session]
        limit = None if new is None else new.time_limit
        if limit is not None and (old is None or old.time_limit != limit):
            heapq.heappush(self._limits, (limit, self._numbers[run_id]))
        _mark(self._sessions, run_id, new is not None and session_rules.is_session(run))
        _mark(self._asked, run_id, new is not None and new.asked)
        _mark(self._final, run_id, new is not None and new.state.is_final)
        _mark(self._costly, run_id, new is not None and new.metered_at is not None and bool(new.hourly))
        _mark(self._fresh, run_id, new is not None and in_session and new.spec.fresh and has is not None)


def _mark(members: set[str], run_id: str, is_one: bool) -> None:
    if is_one:
        members.add(run_id)
    else:
        members.discard(run_id)
