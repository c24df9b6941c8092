"""The pool's scheduler: typed stimuli in, a list of typed instructions out.

Pure: no clock (every stimulus carries `now`, seconds of any one clock), no socket, no thread. The service
feeds it what happened and does what it says. In the style of distributed's `worker_state_machine`.

    - Who gets devices first: `queue_rules`.
    - `LaunchRun` gives the lease, `RunOver` frees it. The run stays queued until the agent's first
      `RunMoved`; until then the engine may hand the lease back with `LeaseRefused`.
    - A state changes only with a `MoveRun`, and only along `protocol.states.TRANSITIONS`.
    - Cells of a session wait for it and for each other: `session_rules`.
    - Runs end at their cost limit, and at the pool's budget: `cost_rules`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sgpu_magic.pool import session_rules
from sgpu_magic.pool.budget import Budget
from sgpu_magic.pool.cost_rules import CostRules
from sgpu_magic.pool.placement import Refusal, resolve
from sgpu_magic.pool.prices import Tariff
from sgpu_magic.pool.queue_rules import QueueRules
from sgpu_magic.pool.run_table import RunTable
from sgpu_magic.pool.scheduled_run import ScheduledRun, span
from sgpu_magic.pool.stimuli import (
    CancelRequested,
    Instruction,
    InventoryChanged,
    LaunchRun,
    LeaseRefused,
    RefuseRun,
    RunAdopted,
    RunMoved,
    RunOver,
    RunSubmitted,
    SessionPaused,
    Stimulus,
)
from sgpu_magic.protocol.device_types import CPU
from sgpu_magic.protocol.devices import Inventory
from sgpu_magic.protocol.records import RunSpec
from sgpu_magic.protocol.states import RunState

_NO_PRICES = Tariff()


class Scheduler:
    """Decides which run gets which devices, and when.

    Args:
        inventory: What the node has; None holds submitted runs back until the first `InventoryChanged`.
        pass_over_s: Seconds from the first time a run is passed over until nothing may pass it.
        tariff: What devices cost.
        budget: What the pool's runs may cost together, None without a limit; on the stimuli's clock.
    """

    def __init__(
        self,
        inventory: Inventory | None = None,
        *,
        pass_over_s: float = 600.0,
        tariff: Tariff = _NO_PRICES,
        budget: Budget | None = None,
    ) -> None:
        self._tariff = tariff
        self._table = RunTable(budget)
        self._costs = CostRules(self._table, tariff, budget)
        self._queue = QueueRules(self._table, self._costs, tariff, inventory, pass_over_s)
        self._runs = self._table.runs

    @property
    def runs(self) -> tuple[ScheduledRun, ...]:
        """Every run that waits or holds a lease, in order of submission."""
        return tuple(self._runs.values())

    @property
    def cpu_slots_free(self) -> int:
        room = self._queue.room
        return 0 if room is None else room.cpu_slots_free

    def run(self, run_id: str) -> ScheduledRun | None:
        return self._runs.get(run_id)

    def holder(self, uuid: str) -> str | None:
        """The run that holds the device `uuid`, None when it is free."""
        room = self._queue.room
        return None if room is None else room.holder(uuid)

    def is_open(self, session: str) -> bool:
        """Whether the session takes cells."""
        run = self._runs.get(session)
        return run is not None and session_rules.is_open(run)

    def quiet_until(self, session: str) -> float | None:
        """When the session ends because nothing runs in it, None while something does, or it never ends so."""
        run = self._runs.get(session)
        return None if run is None else session_rules.quiet_until(self._runs, run)

    def next_deadline(self) -> float | None:
        """When `TimePassed` is next useful, None when only events can change anything."""
        now = self._table.now
        times = [self._costs.next_deadline(now), self._queue.next_deadline(now)]
        for run in self._runs.values():
            times += [self._table.queue_deadline(run), run.time_limit, session_rules.quiet_until(self._runs, run)]
        return min((time for time in times if time is not None), default=None)

    def handle(self, stimulus: Stimulus) -> list[Instruction]:
        """Take in what happened and return what to do, in this order.

        Stimuli about unknown runs, and reports that came too late to matter, change nothing.

        Raises:
            ValueError: `RunOver` with a state that is not final.
        """
        now = self._table.now = max(self._table.now, stimulus.now)
        match stimulus:
            case RunSubmitted(spec=spec):
                out = self._submit(spec, now)
            case RunAdopted():
                out = self._adopt(stimulus)
            case InventoryChanged(inventory=inventory):
                out = self._look_again(inventory)
            case RunMoved(run_id=run_id) if run_id in self._runs:
                out = self._moved(self._runs[run_id], stimulus, now)
            case CancelRequested(run_id=run_id, reason=reason) if run_id in self._runs:
                out = self._table.stop(self._runs[run_id], RunState.CANCELLED, reason)
            case RunOver(run_id=run_id, state=state) if run_id in self._runs:
                out = self._over(self._runs[run_id], state)
            case LeaseRefused(run_id=run_id, uuids=uuids, why=why) if run_id in self._runs:
                out = self._lease_refused(self._runs[run_id], uuids, why)
            case SessionPaused(session=session, reason=reason) if session in self._runs:
                out = self._pause(self._runs[session], reason, now)
            case _:
                out = []
        return out + self._settle(now)

    # ------------------------------------------------------------ one method per stimulus

    def _submit(self, spec: RunSpec, now: float) -> list[Instruction]:
        if spec.run_id in self._runs:
            message = f"run {spec.run_id} was submitted before; each needs an id of its own."
            return [RefuseRun(spec.run_id, "UsageError", message)]
        run = ScheduledRun(spec, submitted_at=now)
        if spec.session:
            refusal = session_rules.refusal(spec, self._runs.get(spec.session))
            if refusal is not None:
                return [RefuseRun(spec.run_id, refusal.error, refusal.message)]
            self._table.put(run)
            return []
        if self._queue.inventory is None:
            self._table.put(run)
            return []
        return self._judge(run, self._queue.inventory)

    def _adopt(self, adopted: RunAdopted) -> list[Instruction]:
        if adopted.spec.run_id not in self._runs:
            run = ScheduledRun(
                adopted.spec,
                submitted_at=adopted.metered_at,
                state=adopted.state,
                accepted=True,
                lease=adopted.lease,
                begun=True,
                metered_at=None if adopted.state is RunState.PREPARING else adopted.metered_at,
                quiet_since=adopted.now if adopted.state is RunState.RUNNING else None,
                hourly=None if adopted.spec.session else self._tariff.hourly(adopted.lease),
            )
            self._table.put(self._costs.adopted(run, adopted.now))
        return []

    def _look_again(self, inventory: Inventory) -> list[Instruction]:
        self._queue.seen(inventory)
        waiting = [run for run in self._runs.values() if run.lease is None and not run.spec.session]
        return [instruction for run in waiting for instruction in self._judge(run, inventory)]

    def _judge(self, run: ScheduledRun, inventory: Inventory) -> list[Instruction]:
        """Give a waiting run its place in a line, a new one when the devices changed under it."""
        want = resolve(run.spec.placement, inventory)
        if isinstance(want, Refusal):
            if run.want is not None:
                return []  # its devices went away while it waited and may come back; its reason says so
            return self._table.refuse(run, want.error, want.message)
        if run.want is None and (refusal := self._costs.refusal(run.spec, want)) is not None:
            return self._table.refuse(run, refusal.error, refusal.message)
        moved_line = run.want is not None and run.want.line != want.line
        self._table.put(replace(run, want=want, passed_at=None if moved_line else run.passed_at))
        return []

    def _moved(self, run: ScheduledRun, moved: RunMoved, now: float) -> list[Instruction]:
        if run.lease is None:
            return []
        quiet_since = now if moved.state is RunState.RUNNING else run.quiet_since
        reason = run.reason or moved.reason
        self._table.put(replace(run, begun=True, quiet_since=quiet_since, reason=reason, unstopped=moved.unstopped))
        return self._table.move(run.run_id, moved.state)

    def _pause(self, session: ScheduledRun, reason: str, now: float) -> list[Instruction]:
        quiet_since = None if session.quiet_since is None else now
        self._table.put(replace(session, paused=reason, quiet_since=quiet_since))
        return []

    def _over(self, run: ScheduledRun, state: RunState) -> list[Instruction]:
        if not state.is_final:
            raise ValueError(f"run {run.run_id} can't be over as {state!r}: a final state is needed")
        return self._table.over(run, state)

    def _lease_refused(self, run: ScheduledRun, uuids: Iterable[str], why: str) -> list[Instruction]:
        if run.lease is None or run.begun:
            return []
        # at least one of its own devices is barred, else the same lease would come again and again
        barred = set(uuids) & set(run.lease.uuids) or set(run.lease.uuids) or {CPU}
        self._queue.refused(barred, why)
        run = replace(run, lease=None, hourly=None)
        self._table.put(run)
        return [] if run.stopping_as is None else self._table.end(run, run.stopping_as, "")

    # ------------------------------------------------------------ what follows from every stimulus

    def _settle(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for run in self.runs:
            if run.time_limit is not None and now >= run.time_limit:
                reason = f"its time limit of {span(run.spec.timeout_s)} is over"
                out += self._table.stop(run, RunState.TIMED_OUT, reason)
                continue
            quiet_until = session_rules.quiet_until(self._runs, run)
            if quiet_until is not None and now >= quiet_until:
                out += self._table.stop(run, RunState.CANCELLED, session_rules.too_quiet(run))
        out += self._costs.settle(now)
        out += self._settle_cells(now)
        return out + self._queue.settle(now)

    def _settle_cells(self, now: float) -> list[Instruction]:
        """Let cells of sessions begin, give up, or end with their session."""
        out: list[Instruction] = []
        for session in [run for run in self.runs if session_rules.is_session(run) and not session_rules.is_open(run)]:
            out += self._table.end_cells(session)
        for cell in session_rules.waiting_cells(self._runs):
            session = self._runs[cell.spec.session]
            why = session_rules.obstacle(self._runs, cell)
            deadline = self._table.queue_deadline(cell)
            if not why and session.lease is not None:
                lease = session_rules.share(session.lease, cell.spec)
                self._table.put(replace(cell, lease=lease, told=None, accepted=True))
                out.append(LaunchRun(cell.run_id, lease))
            elif deadline is not None and now >= deadline:
                out += self._table.give_up(cell, session_rules.waited_in_vain(cell, why))
        return out
