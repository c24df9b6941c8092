"""The scheduler's runs, and the few ways in which one changes or goes. Pure.

What is asked of them after each stimulus is kept as an index by `add`, `change` and `drop`, the only ones that change a
run or the table: it may have a thousand runs.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from sgpu_magic.pool.scheduling import session_rules
from sgpu_magic.pool.scheduling.capacity import Line
from sgpu_magic.pool.scheduling.run import Run
from sgpu_magic.pool.scheduling.stimuli import EndRun, Instruction, MoveRun, RefuseRun, StopRun
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.states import FailureKind, RunState, can_move

# a run that is over holds its devices until its ranks have left; one that was not to wait waits for that
_LEAVING_S = 1.0

LeaseChange = tuple[Run, Lease | None, Lease | None]


class _Indexed(NamedTuple):
    """What decides where a run is in the indexes.

    Args:
        held: The devices that nobody else may have.
        waits: It has no lease.
        time_limit: When its time is over.
        kinds: Whether it is in each of `RunTable._kinds`.
    """

    held: Lease | None = None
    waits: bool = False
    time_limit: float | None = None
    kinds: tuple[bool, ...] = (False,) * 4


_NOWHERE = _Indexed()


def _indexed(run: Run) -> _Indexed:
    kinds = (
        session_rules.is_session(run),
        run.state.is_final,
        run.meter.since is not None and bool(run.meter.hourly),
        run.asked,
    )
    return _Indexed(run.held_lease, run.lease is None, run.time_limit, kinds)


class RunTable:
    """Every run that waits or holds a lease, in order of submission.

    Args:
        spent: Called with the time and with what a run has cost up to then, when its meter stops.

    Attributes:
        runs: By their ids. Changed by `add` and `drop` alone.
        now: The time of the stimulus that is being handled.
    """

    def __init__(self, spent: Callable[[float, float], None]) -> None:
        self._spent = spent
        self.runs: dict[str, Run] = {}
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
        self._asked: set[str] = set()
        self._kinds = (self._sessions, self._final, self._costly, self._asked)
        self._limits: list[tuple[float, int]] = []
        self._lease_changes: list[LeaseChange] = []

    # ------------------------------------------------------------ what there is

    def number(self, run_id: str) -> int:
        """The run's place in the order of submission."""
        return self._numbers[run_id]

    def waiting(self) -> list[Run]:
        """Runs that wait for devices."""
        return [self.runs[self._ids[number]] for number in self._waiting]

    def waiting_cells(self) -> list[Run]:
        """Cells that wait for their sessions."""
        return [self.runs[self._ids[number]] for number in self._waiting_cells]

    def asked(self) -> dict[Line, list[Run]]:
        """By line, runs for which an engine asked the cluster for nodes that have not come."""
        found: dict[Line, list[Run]] = {}
        for run in self._in_order(self._asked):
            if run.want is not None:
                found.setdefault(run.want.line, []).append(run)
        return found

    def who_waits(self) -> list[Run]:
        """Whoever waits for anything."""
        return [*self.waiting(), *self.waiting_cells(), *self._in_order(self._asked)]

    def asked_too_long(self) -> list[Run]:
        """Runs for which nothing came in the time that they wait."""
        runs = [run for run in self._in_order(self._asked) if run.stopping_as is None]
        return [run for run in runs if run.queue_deadline is not None and self.now >= run.queue_deadline]

    def count_waiting(self) -> int:
        """How many runs wait for anything."""
        return len(self._waiting) + len(self._waiting_cells) + len(self._asked)

    def cells_of(self, session: str) -> list[Run]:
        """Every run in the session, in order of submission."""
        return [self.runs[run_id] for run_id in self._cells.get(session, ())]

    def sessions(self) -> list[Run]:
        return self._in_order(self._sessions)

    def on_meter(self) -> list[Run]:
        """Runs that cost something every second."""
        return [run for run in self._in_order(self._costly) if run.is_on_meter]

    def live_cost(self, now: float) -> float:
        """What runs that have not ended have cost so far; those that are being stopped among them."""
        return sum(run.meter.running_cost(now) for run in self._in_order(self._costly))

    def take_lease_changes(self) -> list[LeaseChange]:
        """Return which run had which lease and has which, since this was asked last."""
        changes, self._lease_changes = self._lease_changes, []
        return changes

    # ------------------------------------------------------------ times

    def over_time(self) -> list[Run]:
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

    def queue_deadline(self, run: Run) -> float | None:
        """When a run that waits has waited long enough; None for one that does not wait, or waits for ever."""
        deadline = run.queue_deadline
        if deadline is not None and self._final:
            return max(deadline, run.queued_at + _LEAVING_S)
        return deadline

    # ------------------------------------------------------------ changes

    def add(self, run: Run) -> None:
        """A run came."""
        self._next += 1
        self._numbers[run.run_id] = self._next
        self._ids[self._next] = run.run_id
        self.runs[run.run_id] = run
        if run.spec.session:
            self._cells.setdefault(run.spec.session, {})[run.run_id] = None
        self._index(run, _NOWHERE, _indexed(run))

    def change(self, run: Run, **changes: Any) -> None:
        """Set what is known of a run anew. Nobody else sets any of it."""
        before = _indexed(run)
        for name, value in changes.items():
            setattr(run, name, value)
        if run.run_id in self.runs:
            self._index(run, before, _indexed(run))

    def drop(self, run_id: str) -> None:
        """Forget a run; nothing happens when it is not there."""
        run = self.runs.pop(run_id, None)
        if run is None:
            return
        self._index(run, _indexed(run), _NOWHERE)
        del self._ids[self._numbers.pop(run_id)]
        cells = self._cells.get(run.spec.session, {})
        cells.pop(run_id, None)
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

    def free(self, run: Run) -> list[Instruction]:
        """The next run may have its devices, and it costs nothing any more."""
        if run.lease is not None and not run.freed:
            self.stop_meter(run)
            self.change(run, freed=True)
        return []

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

    def _in_order(self, run_ids: set[str]) -> list[Run]:
        return [self.runs[run_id] for run_id in sorted(run_ids, key=self._numbers.__getitem__)]

    def _index(self, run: Run, old: _Indexed, new: _Indexed) -> None:
        number = self._numbers[run.run_id]
        if old.held is not new.held:
            self._lease_changes.append((run, old.held, new.held))
        if old.waits != new.waits:
            numbers = self._waiting_cells if run.spec.session else self._waiting
            if new.waits:
                bisect.insort(numbers, number)
            else:
                del numbers[bisect.bisect_left(numbers, number)]
        if new.time_limit is not None and new.time_limit != old.time_limit:
            heapq.heappush(self._limits, (new.time_limit, number))
        for members, was_one, is_one in zip(self._kinds, old.kinds, new.kinds, strict=True):
            if is_one and not was_one:
                members.add(run.run_id)
            elif was_one and not is_one:
                members.discard(run.run_id)
