"""The scheduler's runs, and the few ways in which one changes or goes. Pure.

What is asked of them after each stimulus is kept as an index by `add`, `change` and `drop`, the only ones that change a
run or the table: it may have a thousand runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from sgpu_magic.pool.scheduling import session_rules
from sgpu_magic.pool.scheduling.capacity import Line
from sgpu_magic.pool.scheduling.run import Run
from sgpu_magic.pool.scheduling.stimuli import EndRun, Instruction, MoveRun, RefuseRun, StopRun
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.states import FailureKind, RunState, can_move

# a run that is over holds its devices until its ranks have left; one that was not to wait waits for that
_LEAVING_S = 1.0


class RunTable:
    """Every run that waits or holds a lease, in order of submission.

    Args:
        spent: Called with the time and with what a run has cost up to then, when its meter stops.
        leased: Called with a run, the devices that nobody else might have, and those that nobody else may have now.

    Attributes:
        runs: By their ids. Changed by `add` and `drop` alone.
        now: The time of the stimulus that is being handled.
    """

    def __init__(
        self, spent: Callable[[float, float], None], leased: Callable[[Run, Lease | None, Lease | None], None]
    ) -> None:
        self._spent = spent
        self._leased = leased
        self.runs: dict[str, Run] = {}
        self.now = float("-inf")
        self._submitted = 0
        # by number
        self._waiting: dict[int, Run] = {}
        self._waiting_cells: dict[int, Run] = {}
        self._asked: dict[int, Run] = {}
        self._sessions: dict[int, Run] = {}
        self._final: dict[int, Run] = {}
        self._costly: dict[int, Run] = {}
        self._limited: dict[int, Run] = {}
        self._cells: dict[str, dict[int, Run]] = {}
        # when time limits are over, and the runs' numbers; some of both no longer so
        self._limits: list[tuple[float, int]] = []

    # ------------------------------------------------------------ what there is

    def waiting(self) -> list[Run]:
        """Runs that wait for devices."""
        return _in_order(self._waiting)

    def waiting_cells(self) -> list[Run]:
        """Cells that wait for their sessions."""
        return _in_order(self._waiting_cells)

    def asked(self) -> dict[Line, list[Run]]:
        """By line, runs for which an engine asked the cluster for nodes that have not come."""
        found: dict[Line, list[Run]] = {}
        for run in _in_order(self._asked):
            if run.want is not None:
                found.setdefault(run.want.line, []).append(run)
        return found

    def who_waits(self) -> list[Run]:
        """Whoever waits for anything."""
        return [*self.waiting(), *self.waiting_cells(), *_in_order(self._asked)]

    def asked_too_long(self) -> list[Run]:
        """Runs for which nothing came in the time that they wait."""
        runs = [run for run in _in_order(self._asked) if run.stopping_as is None]
        return [run for run in runs if run.queue_deadline is not None and self.now >= run.queue_deadline]

    def count_waiting(self) -> int:
        """How many runs wait for anything."""
        return len(self._waiting) + len(self._waiting_cells) + len(self._asked)

    def cells_of(self, session: str) -> list[Run]:
        """Every run in the session, in order of submission."""
        return [*self._cells.get(session, {}).values()]

    def sessions(self) -> list[Run]:
        return _in_order(self._sessions)

    def on_meter(self) -> list[Run]:
        """Runs that cost something every second."""
        return [run for run in _in_order(self._costly) if run.is_on_meter]

    def live_cost(self) -> float:
        """What runs that have not ended have cost so far; those that are being stopped among them."""
        return sum(run.meter.running_cost(self.now) for run in _in_order(self._costly))

    # ------------------------------------------------------------ times

    def over_time(self) -> list[Run]:
        """Runs whose time limit is over, in order of submission. Each is returned once."""
        due: set[int] = set()
        while self._limits and self._limits[0][0] <= self.now:
            due.add(heapq.heappop(self._limits)[1])
        runs = [self._limited[number] for number in sorted(due) if number in self._limited]
        return [run for run in runs if run.time_limit is not None and self.now >= run.time_limit]

    def next_limit(self) -> float | None:
        """When a run's time limit is over, None when none has one."""
        while self._limits:
            time, number = self._limits[0]
            if number in self._limited and self._limited[number].time_limit == time:
                return time
            heapq.heappop(self._limits)
        return None

    def queue_deadline(self, run: Run) -> float | None:
        """When a run that waits has waited long enough; None for one that does not wait, or waits for ever."""
        deadline = run.queue_deadline
        if deadline is not None and self._final:
            return max(deadline, run.queued_at + _LEAVING_S)
        return deadline

    # ------------------------------------------------------------ changes

    def add(self, run: Run) -> None:
        """A run came."""
        self._submitted += 1
        self.change(run, number=self._submitted)
        self.runs[run.run_id] = run
        if run.spec.session:
            self._cells.setdefault(run.spec.session, {})[run.number] = run
        self._index(run, None, None)

    def change(self, run: Run, **changes: Any) -> None:
        """Set what is known of a run anew. Nobody else sets any of it."""
        had, limit = run.held_lease, run.time_limit
        for name, value in changes.items():
            setattr(run, name, value)
        if run.run_id in self.runs:
            self._index(run, had, limit)

    def drop(self, run_id: str) -> None:
        """Forget a run; nothing happens when it is not there."""
        run = self.runs.pop(run_id, None)
        if run is None:
            return
        self._index(run, run.held_lease, run.time_limit)
        cells = self._cells.get(run.spec.session, {})
        cells.pop(run.number, None)
        if not cells:
            self._cells.pop(run.spec.session, None)

    def move(self, run: Run, state: RunState, reason: str = "") -> list[Instruction]:
        """The one place where a state changes. A move that the table lacks is a report that came too late."""
        out: list[Instruction] = []
        if not can_move(run.state, state):
            # a report may skip the start: ranks that run, or are done, have started
            not_begun = run.meter.since is None and can_move(run.state, RunState.STARTING)
            if not (not_begun and can_move(RunState.STARTING, state)):
                return out
            out += self.move(run, RunState.STARTING)
        begins = state is RunState.STARTING and run.meter.since is None and not run.freed
        self.change(run, state=state, meter=replace(run.meter, since=self.now) if begins else run.meter)
        if state.is_final:
            self.stop_meter(run)
        return [*out, MoveRun(run.run_id, state, reason)]

    def requeue(self, run: Run, reason: str) -> list[Instruction]:
        """A run whose devices are gone waits again, in its old place; its own limits go on from where they are."""
        if not can_move(run.state, RunState.QUEUED):
            return []
        self.stop_meter(run)
        self.change(run, state=RunState.QUEUED, queued_at=self.now, lease=None, begun=False, asked=False)
        return [MoveRun(run.run_id, RunState.QUEUED, reason)]

    def free(self, run: Run) -> None:
        """The next run may have its devices, and it costs nothing any more."""
        if run.lease is not None and not run.freed:
            self.stop_meter(run)
            self.change(run, freed=True)

    def stop_meter(self, run: Run) -> None:
        """It costs nothing any more. What it has cost so far counts for its own limit and the pool's budget."""
        cost = run.meter.billed_cost(self.now)
        if cost:
            self._spent(self.now, cost)
        self.change(run, meter=run.meter.stopped(self.now))

    def stop(self, run: Run, state: RunState, reason: str) -> list[Instruction]:
        """End a run that waits; tell the ranks of one that has them, once."""
        if run.lease is None:
            return self.end(run, state, reason)
        if not can_move(run.state, RunState.CANCELLING):
            return []
        self.change(run, stopping_as=state, reason=reason)
        return [*self.move(run, RunState.CANCELLING, reason), StopRun(run.run_id, state, reason)]

    def end(
        self, run: Run, state: RunState, reason: str, kind: FailureKind = FailureKind.CAPACITY
    ) -> list[Instruction]:
        """A run without ranks is over."""
        moves = self.move(run, state, reason)
        self.change(run, reason=reason)
        return [*moves, EndRun(run.run_id, state, reason, kind), *self.remove(run)]

    def give_up(
        self, run: Run, message: str, error: str = "CapacityError", kind: FailureKind = FailureKind.CAPACITY
    ) -> list[Instruction]:
        """A run will not get what it waits for: it fails, or is not even accepted."""
        if run.accepted:
            return self.end(run, RunState.FAILED, message, kind)
        return self.refuse(run, error, message)

    def refuse(self, run: Run, error: str, message: str) -> list[Instruction]:
        self.change(run, reason=message)
        return [RefuseRun(run.run_id, error, message), *self.remove(run)]

    def over(self, run: Run, state: RunState) -> list[Instruction]:
        """The run's own ranks are gone."""
        moves = self.move(run, state)
        if session_rules.on_its_devices(self.cells_of(run.run_id)):
            self.change(run, gone=True)
            return moves
        moves += self.remove(run)
        session = self.runs.get(run.spec.session)
        if session is not None and session.gone and not session_rules.on_its_devices(self.cells_of(session.run_id)):
            # that was the last thing that held its lease
            self.drop(session.run_id)
        elif session is not None and session.quiet_since is not None:
            self.change(session, quiet_since=self.now)
        return moves

    def remove(self, run: Run) -> list[Instruction]:
        """Forget the run; cells that wait for it, if it is a session, have nothing to wait for any more."""
        self.drop(run.run_id)
        return self.end_cells(run) if session_rules.is_session(run) else []

    def end_cells(self, session: Run) -> list[Instruction]:
        """The session ends: those of its cells that wait end here, those with processes of their own are stopped."""
        out: list[Instruction] = []
        for cell in self.cells_of(session.run_id):
            why = session_rules.end_of_cell(cell, session)
            if cell.lease is not None:
                out += self.stop(cell, RunState.CANCELLED, why) if cell.spec.fresh else []
            elif cell.accepted and session_rules.ends_as(session) is RunState.CANCELLED:
                out += self.end(cell, RunState.CANCELLED, why, FailureKind.SESSION)
            else:
                out += self.give_up(cell, f"{why}.", "SessionError", FailureKind.SESSION)
        return out

    # ------------------------------------------------------------ within

    def _index(self, run: Run, had: Lease | None, limit_before: float | None) -> None:
        """A run was added, changed or dropped, which had this lease and time limit until now."""
        is_there = run.run_id in self.runs
        has, limit = run.held_lease if is_there else None, run.time_limit
        if had is not has:
            self._leased(run, had, has)
        if limit is not None and limit != limit_before:
            heapq.heappush(self._limits, (limit, run.number))
        waits, in_session = run.lease is None, bool(run.spec.session)
        for members, is_one in (
            (self._waiting, waits and not in_session),
            (self._waiting_cells, waits and in_session),
            (self._asked, run.asked),
            (self._sessions, session_rules.is_session(run)),
            (self._final, run.state.is_final),
            (self._costly, run.meter.since is not None and bool(run.meter.hourly)),
            (self._limited, limit is not None),
        ):
            if is_one and is_there:
                members[run.number] = run
            else:
                members.pop(run.number, None)


def _in_order(runs: Mapping[int, Run]) -> list[Run]:
    return [runs[number] for number in sorted(runs)]
