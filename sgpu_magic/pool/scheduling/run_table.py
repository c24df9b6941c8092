"""The table of the scheduler's runs, and the few operations that change or remove one. Pure.

Only `add`, `change` and `drop` change a run or the table. They also maintain indexes for the queries after each
stimulus, since the table may have a thousand runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from sgpu_magic.pool.scheduling.end_reason import EndReason, SessionEnded
from sgpu_magic.pool.scheduling.run import ScheduledRun
from sgpu_magic.pool.scheduling.stimuli import EndUnstartedRun, Instruction, MoveRun, RefuseRun, StopRun
from sgpu_magic.wire.base import ErrorKind, FailureKind, RunLimit, RunState, can_move
from sgpu_magic.wire.devices import Lease

# a run that is over holds its devices until its ranks have exited; even a run with `wait_s=0` waits this long for that
_LEAVING_S = 1.0


class RunTable:
    """Every run that waits or holds a lease, in order of submission.

    Args:
        spent: Called with the time and a run's cost up to then, when its meter stops.
        leased: Called with a run, the lease that it held before, and the lease that it holds now.

    Attributes:
        runs: By ID. Only `add` and `drop` change it.
        now: The time of the current stimulus.
    """

    def __init__(
        self, spent: Callable[[float, float], None], leased: Callable[[ScheduledRun, Lease | None, Lease | None], None]
    ) -> None:
        self._spent = spent
        self._leased = leased
        self.runs: dict[str, ScheduledRun] = {}
        self.now = float("-inf")
        self._submitted = 0
        # keyed by the run's number
        self._waiting: dict[int, ScheduledRun] = {}
        self._waiting_cells: dict[int, ScheduledRun] = {}
        self._asked: dict[int, ScheduledRun] = {}
        self._sessions: dict[int, ScheduledRun] = {}
        self._final: dict[int, ScheduledRun] = {}
        self._costly: dict[int, ScheduledRun] = {}
        self._limited: dict[int, ScheduledRun] = {}
        self._cells: dict[str, dict[int, ScheduledRun]] = {}
        # heap of (time limit, run's number); may have outdated entries
        self._limits: list[tuple[float, int]] = []

    # ------------------------------------------------------------ queries

    def waiting(self) -> list[ScheduledRun]:
        """Return the runs that wait for devices."""
        return _in_order(self._waiting)

    def waiting_cells(self) -> list[ScheduledRun]:
        """Return the cells that wait for their sessions."""
        return _in_order(self._waiting_cells)

    def awaiting_nodes(self) -> list[ScheduledRun]:
        """Return the runs for which an engine asked the cluster for nodes that have not joined yet."""
        return _in_order(self._asked)

    def asked_too_long(self) -> list[ScheduledRun]:
        """Return the runs for which no node joined within their waiting time."""
        runs = [run for run in self.awaiting_nodes() if run.stopping_as is None]
        return [run for run in runs if run.queue_deadline is not None and self.now >= run.queue_deadline]

    def count_waiting(self) -> int:
        """Return how many runs wait for devices, sessions or nodes."""
        return len(self._waiting) + len(self._waiting_cells) + len(self._asked)

    def cells_of(self, session: str) -> list[ScheduledRun]:
        """Return all runs in the session, in order of submission."""
        return [*self._cells.get(session, {}).values()]

    def sessions(self) -> list[ScheduledRun]:
        return _in_order(self._sessions)

    def sessions_by_owner(self) -> dict[tuple[str, int, int], list[str]]:
        """Return the run ids of the open sessions that hold devices, by the process that started them."""
        found: dict[tuple[str, int, int], list[str]] = {}
        for session in self.sessions():
            if session.is_open and session.lease is not None:
                found.setdefault(session.spec.owner.process, []).append(session.run_id)
        return found

    def on_meter(self) -> list[ScheduledRun]:
        """Return the runs with a price whose meters run and that are not being stopped."""
        return [run for run in _in_order(self._costly) if run.is_on_meter]

    def live_cost(self) -> float:
        """Return what the runs with running meters have cost, including those that are being stopped."""
        return sum(run.meter.running_cost(self.now) for run in _in_order(self._costly))

    # ------------------------------------------------------------ times

    def past_time_limit(self) -> list[ScheduledRun]:
        """Return the runs past their time limit, in order of submission. Each is returned once."""
        due: set[int] = set()
        while self._limits and self._limits[0][0] <= self.now:
            due.add(heapq.heappop(self._limits)[1])
        runs = [self._limited[number] for number in sorted(due) if number in self._limited]
        return [run for run in runs if run.time_limit is not None and self.now >= run.time_limit]

    def next_limit(self) -> float | None:
        """Return the earliest time limit of a run, None when none has one."""
        while self._limits:
            time, number = self._limits[0]
            if number in self._limited and self._limited[number].time_limit == time:
                return time
            heapq.heappop(self._limits)
        return None

    def queue_deadline(self, run: ScheduledRun) -> float | None:
        """Return when a waiting run gives up; None for one that does not wait, or waits forever."""
        if (deadline := run.queue_deadline) is None or not self._leaving_before(run):
            return deadline
        return max(deadline, run.queued_at + _LEAVING_S)

    def waited_in_vain(self, run: ScheduledRun) -> bool:
        """Whether a waiting run gives up now."""
        deadline = self.queue_deadline(run)
        return deadline is not None and self.now >= deadline

    def quiet_until(self, session: ScheduledRun) -> float | None:
        """Return when the session ends for being idle; None while it has cells or is paused, or without a limit."""
        since, idle_s = session.quiet_since, session.spec.idle_s
        if since is None or idle_s is None or session.state is not RunState.RUNNING or session.restarting is not None:
            return None
        return None if self.cells_of(session.run_id) else since + idle_s

    # ------------------------------------------------------------ changes

    def add(self, run: ScheduledRun) -> None:
        """Add a submitted or adopted run."""
        self._submitted += 1
        self.change(run, number=self._submitted)
        self.runs[run.run_id] = run
        if run.spec.session:
            self._cells.setdefault(run.spec.session, {})[run.number] = run
        self._index(run, None, None)

    def change(self, run: ScheduledRun, **changes: Any) -> None:
        """Set attributes of a run. No other code sets them."""
        had, limit = run.held_lease, run.time_limit
        for name, value in changes.items():
            setattr(run, name, value)
        if run.run_id in self.runs:
            self._index(run, had, limit)

    def drop(self, run_id: str) -> None:
        """Forget a run; does nothing for an unknown one."""
        if (run := self.runs.pop(run_id, None)) is None:
            return
        self._index(run, run.held_lease, run.time_limit)
        cells = self._cells.get(run.spec.session, {})
        cells.pop(run.number, None)
        if not cells:
            self._cells.pop(run.spec.session, None)

    def move(self, run: ScheduledRun, state: RunState, reason: EndReason | None = None) -> list[Instruction]:
        """Change a run's state, the only place that does. A move without a transition is an outdated report."""
        out: list[Instruction] = []
        if not can_move(run.state, state):
            # a report may skip STARTING: ranks that run, or are done, have started
            not_begun = run.meter.since is None and can_move(run.state, RunState.STARTING)
            if not (not_begun and can_move(RunState.STARTING, state)):
                return out
            out += self.move(run, RunState.STARTING)
        begins = state is RunState.STARTING and run.meter.since is None and not run.freed
        self.change(run, state=state, meter=replace(run.meter, since=self.now) if begins else run.meter)
        if state.is_final:
            self.stop_meter(run)
        return [*out, MoveRun(run.run_id, state, reason)]

    def requeue(self, run: ScheduledRun, reason: str) -> list[Instruction]:
        """Requeue a run whose devices are gone, in its old place; its time and cost so far still count."""
        if not can_move(run.state, RunState.QUEUED):
            return []
        self.stop_meter(run)
        self.change(run, state=RunState.QUEUED, queued_at=self.now, lease=None, begun=False, asked=False)
        return [MoveRun(run.run_id, RunState.QUEUED, reason)]

    def free(self, run: ScheduledRun) -> None:
        """Free a run's devices for the next run, and stop its meter."""
        if run.lease is not None and not run.freed:
            self.stop_meter(run)
            self.change(run, freed=True)

    def stop_meter(self, run: ScheduledRun) -> None:
        """Stop a run's meter. Its cost so far counts towards its own limit and the pool's budget."""
        if cost := run.meter.billed_cost(self.now):
            self._spent(self.now, cost)
        self.change(run, meter=run.meter.stopped_copy(self.now))

    def stop(
        self, run: ScheduledRun, state: RunState, reason: EndReason, limit: RunLimit | None = None
    ) -> list[Instruction]:
        """End a waiting run; stop the ranks of one that has a lease, once.

        Args:
            run: The run.
            state: Its final state.
            reason: Why it ends.
            limit: The limit that ends it.
        """
        self.change(run, limit=limit)
        if run.lease is None:
            return self.end(run, state, reason)
        if not can_move(run.state, RunState.CANCELLING):
            return []
        self.change(run, stopping_as=state, reason=reason)
        return [*self.move(run, RunState.CANCELLING, reason), StopRun(run.run_id, state, reason, limit)]

    def end(
        self,
        run: ScheduledRun,
        state: RunState,
        reason: EndReason | None,
        kind: FailureKind = FailureKind.CAPACITY,
    ) -> list[Instruction]:
        """End a run without ranks."""
        moves = self.move(run, state, reason)
        self.change(run, reason=reason)
        return [*moves, EndUnstartedRun(run.run_id, state, reason, kind), *self.remove(run)]

    def give_up(
        self,
        run: ScheduledRun,
        reason: EndReason,
        error: ErrorKind = ErrorKind.CAPACITY,
        kind: FailureKind = FailureKind.CAPACITY,
    ) -> list[Instruction]:
        """Fail a run that will not get what it waits for, or refuse it if it was not accepted yet."""
        if run.accepted:
            return self.end(run, RunState.FAILED, reason, kind)
        return self.refuse(run, error, reason)

    def refuse(self, run: ScheduledRun, error: ErrorKind, reason: EndReason) -> list[Instruction]:
        self.change(run, reason=reason)
        return [RefuseRun(run.run_id, error, reason), *self.remove(run)]

    def remove_ended(self, run: ScheduledRun, state: RunState) -> list[Instruction]:
        """Remove a run whose own ranks are gone; a session stays while `--fresh` cells use its devices."""
        moves = self.move(run, state)
        if _on_its_devices(self.cells_of(run.run_id)):
            self.change(run, have_ranks_exited=True)
            return moves
        moves += self.remove(run)
        session = self.runs.get(run.spec.session)
        if session is not None and session.have_ranks_exited and not _on_its_devices(self.cells_of(session.run_id)):
            # that was the last cell on the session's devices
            self.drop(session.run_id)
        elif session is not None and session.quiet_since is not None:
            self.change(session, quiet_since=self.now)
        return moves

    def remove(self, run: ScheduledRun) -> list[Instruction]:
        """Forget a run, and end the cells of a session."""
        self.drop(run.run_id)
        return self.end_cells(run) if run.is_session else []

    def end_cells(self, session: ScheduledRun) -> list[Instruction]:
        """End the waiting cells of a session that ends, and stop its `--fresh` cells."""
        out: list[Instruction] = []
        cancelled = (session.stopping_as or session.state) is RunState.CANCELLED
        for cell in self.cells_of(session.run_id):
            name, has_started = session.spec.name, cell.lease is not None
            why = SessionEnded(session.run_id, name, session.reason, has_started)
            if has_started:
                out += self.stop(cell, RunState.CANCELLED, why) if cell.spec.fresh else []
            elif cell.accepted and cancelled:
                out += self.end(cell, RunState.CANCELLED, why, FailureKind.SESSION)
            else:
                failed = replace(why, fails_cell=True)
                out += self.give_up(cell, failed, ErrorKind.SESSION, FailureKind.SESSION)
        return out

    # ------------------------------------------------------------ internals

    def _leaving_before(self, run: ScheduledRun) -> bool:
        """Whether a run that is over still holds what a waiting run waits for."""
        if (session := self.runs.get(run.spec.session)) is None or session.lease is None:
            return bool(self._final)
        return any(cell.spec.in_session and cell.state.is_final for cell in self.cells_of(session.run_id))

    def _index(self, run: ScheduledRun, had: Lease | None, limit_before: float | None) -> None:
        """Update the indexes for a run that was added, changed or dropped.

        Args:
            run: The run.
            had: The lease that it held before.
            limit_before: Its time limit before.
        """
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
            (self._sessions, run.is_session),
            (self._final, run.state.is_final),
            (self._costly, run.meter.since is not None and bool(run.meter.hourly)),
            (self._limited, limit is not None),
        ):
            if is_one and is_there:
                members[run.number] = run
            else:
                members.pop(run.number, None)


def _in_order(runs: Mapping[int, ScheduledRun]) -> list[ScheduledRun]:
    return [runs[number] for number in sorted(runs)]


def _on_its_devices(cells: Sequence[ScheduledRun]) -> bool:
    """Whether `--fresh` cells use the session's devices."""
    return any(cell.spec.fresh and cell.lease is not None for cell in cells)
