"""The pool's scheduler: typed stimuli in, a list of typed instructions out.

Pure: no clock (`handle` takes the time of each stimulus, always from the same clock), no socket, no thread. The service
feeds it stimuli and executes its instructions. The design follows distributed's `worker_state_machine`.

    - `placement_request` interprets a request in this pool. `queue_rules` and `fair_share` decide which run gets
      devices first. `queue_status` finds why the others wait.
    - Reasons are facts (`wait_reason`, `end_reason`). The service words them, and remembers what it has sent.
    - `LaunchRun` grants the lease. `RanksReaped` frees it, or `LeaseFreed` if the run's final event comes later. The
      run stays queued until the agent's first `RunMoved`; until then the engine may return the lease with
      `LeaseRefused`.
    - A state changes only with a `MoveRun`, and only along `wire.base.TRANSITIONS`.
    - Cells in a session's own ranks take turns, first come, first served; `--fresh` cells start at once beside them.
      They hold no devices: the session does, until its own ranks and all `--fresh` processes on them are gone. When a
      session ends, the waiting cells end and fresh ones are stopped; the agent ends those in the session's ranks.
    - Runs end at their cost limit, and at the pool's budget: `costs`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from sgpu_magic.config.pool_terms import UserLimits
from sgpu_magic.pool.scheduling.capacity import ResourceRequest
from sgpu_magic.pool.scheduling.costs import Budget, CostRules, Tariff
from sgpu_magic.pool.scheduling.end_reason import (
    AlreadySubmitted,
    CellWaitLimitReached,
    EndReason,
    NoNodesInTime,
    SessionWasIdle,
    TimeLimitReached,
)
from sgpu_magic.pool.scheduling.fair_share import NO_LIMITS, FairShare
from sgpu_magic.pool.scheduling.placement_request import session_refusal
from sgpu_magic.pool.scheduling.queue_rules import QueueRules
from sgpu_magic.pool.scheduling.queue_status import QueueSnapshot, session_obstacle
from sgpu_magic.pool.scheduling.run import Meter, ScheduledRun
from sgpu_magic.pool.scheduling.run_table import RunTable
from sgpu_magic.pool.scheduling.stimuli import (
    CancelRequested,
    Instruction,
    InventoryChanged,
    LaunchRun,
    LeaseFreed,
    LeaseGranted,
    LeaseRefused,
    RanksReaped,
    RanksRemain,
    RefuseRun,
    RunAdopted,
    RunMoved,
    RunRequeued,
    RunSubmitted,
    SessionPaused,
    SessionResumed,
    Stimulus,
    StimulusOfRun,
    TimePassed,
)
from sgpu_magic.pool.scheduling.wait_reason import QueueStatus
from sgpu_magic.wire.base import ErrorKind, RunLimit, RunState
from sgpu_magic.wire.devices import Inventory, Lease
from sgpu_magic.wire.events import RemainingRank
from sgpu_magic.wire.run import RunSpec

_NO_PRICES = Tariff()


class Scheduler:
    """Decides which run gets which devices, and when.

    Args:
        inventory: What the node has; None holds submitted runs back until the first `InventoryChanged`.
        pass_over_s: Seconds from the first time a run is passed over until no run may pass it.
        tariff: The prices of devices.
        budget: What the pool's runs may cost together, on the stimuli's clock; None without a limit.
        limits: The users' quotas and priorities.
        fair_half_life_s: Seconds after which a user's past use of devices counts half for fair sharing.

    Attributes:
        budget: As given.
    """

    def __init__(
        self,
        inventory: Inventory | None = None,
        *,
        pass_over_s: float = 600.0,
        tariff: Tariff = _NO_PRICES,
        budget: Budget | None = None,
        limits: UserLimits = NO_LIMITS,
        fair_half_life_s: float = 3600.0,
    ) -> None:
        self._tariff = tariff
        self.budget = budget
        self._table = RunTable(
            budget.add if budget is not None else lambda now, cost: None,
            lambda run, had, has: self._queue.leased(run, had, has),
        )
        self._costs = CostRules(self._table, tariff, budget)
        self._fair = FairShare(limits, fair_half_life_s)
        self._queue = QueueRules(self._table, self._costs, self._fair, inventory, pass_over_s)
        self._runs = self._table.runs
        self._statuses: Mapping[str, QueueStatus] | None = None

    @property
    def runs(self) -> tuple[ScheduledRun, ...]:
        """Every run that waits or holds a lease, in order of submission."""
        return tuple(self._runs.values())

    @property
    def cpu_slots_free(self) -> int:
        return self._queue.room.cpu_slots_free

    @property
    def waits_for_devices(self) -> bool:
        """Whether a queued run may get devices after the next inventory."""
        stock = self._queue.room.stock
        some_real = stock.many or any(not line.simulated for line in stock.counts)
        return some_real and any(run.accepted for run in self._table.waiting())

    @property
    def waiting(self) -> list[ScheduledRun]:
        """The runs that wait for devices, sessions or nodes."""
        return [*self._table.waiting(), *self._table.waiting_cells(), *self._table.awaiting_nodes()]

    def count_waiting(self) -> int:
        """Return how many runs wait for devices, sessions or nodes."""
        return self._table.count_waiting()

    def queue(self) -> QueueSnapshot:
        """Return the queue as it is now; it is outdated after the next stimulus."""
        return QueueSnapshot(self._table, self._queue, self._fair)

    def statuses(self) -> Mapping[str, QueueStatus]:
        """Return each waiting run's position and reason, in the order in which they would start."""
        # cached, because the queue is unchanged between most status requests
        if self._statuses is None:
            self._statuses = self.queue().statuses()
        return self._statuses

    def remaining_ranks(self) -> Mapping[str, tuple[RemainingRank, ...]]:
        """Return the ranks that were killed and have not ended, by run."""
        return {run.run_id: run.remaining for run in self._runs.values() if run.remaining}

    def drop(self, run_id: str) -> None:
        """Forget a run that the pool could not accept."""
        self._statuses = None
        self._table.drop(run_id)

    def run(self, run_id: str) -> ScheduledRun | None:
        return self._runs.get(run_id)

    def holder(self, uuid: str) -> str | None:
        """Return the ID of the run that holds the device `uuid`, None when it is free."""
        return self._queue.room.holder(uuid)

    def quiet_until(self, session: ScheduledRun) -> float | None:
        """Return when the session ends for being idle; None while it has cells or is paused, or without a limit."""
        return self._table.quiet_until(session)

    def next_deadline(self) -> float | None:
        """Return when `TimePassed` is next useful; None when only events can change anything."""
        parts = (self._costs, self._queue)
        times = [self._table.next_limit(), *(part.next_deadline() for part in parts)]
        times += map(self._table.queue_deadline, self.waiting)
        times += [self._table.quiet_until(session) for session in self._table.sessions()]
        return min((time for time in times if time is not None), default=None)

    def handle(self, stimulus: Stimulus, now: float) -> list[Instruction]:
        """Handle a stimulus that occurred at `now`, and return the instructions to execute, in this order.

        Stimuli for unknown runs and outdated reports change nothing.

        Raises:
            ValueError: `RanksReaped` with a state that is not final.
        """
        self._table.now = max(self._table.now, now)
        self._statuses = None
        match stimulus:
            case RunSubmitted(run=run):
                out = self._submit(run)
            case RunAdopted():
                out = self._adopt(stimulus)
            case InventoryChanged(inventory=inventory):
                waiting = self._table.waiting() if self._queue.take_inventory(inventory) else []
                out = [instruction for run in waiting for instruction in self._resolve(run)]
            case TimePassed():
                out = []
            case _:
                known = self._runs.get(stimulus.run_id)
                out = [] if known is None else self._handle_for(known, stimulus)
        return out + self._advance()

    # ------------------------------------------------------------ stimuli

    def _submit(self, run: ScheduledRun) -> list[Instruction]:
        spec = run.spec
        if spec.run_id in self._runs:
            return [RefuseRun(spec.run_id, ErrorKind.USAGE, AlreadySubmitted(spec.run_id))]
        if spec.session and (refusal := session_refusal(spec, self._runs.get(spec.session))):
            return [RefuseRun(spec.run_id, ErrorKind.SESSION, refusal)]
        self._table.change(run, queued_at=self._table.now)
        self._table.add(run)
        return [] if spec.session or not self._queue.knows_devices else self._resolve(run)

    def _adopt(self, adopted: RunAdopted) -> list[Instruction]:
        run = adopted.run
        if run.run_id not in self._runs:
            hourly = self._tariff.hourly(adopted.lease) if adopted.hourly is None else adopted.hourly
            # a finished run is already in the ledger's sums
            is_unmetered = run.state is RunState.PREPARING or run.state.is_final
            since = None if is_unmetered else adopted.metered_at
            meter = Meter(adopted.lease, None if run.spec.session else hourly, since)
            self._table.change(
                run,
                queued_at=adopted.metered_at,
                accepted=True,
                lease=adopted.lease,
                freed=adopted.freed,
                orphaned=run.spec.fresh and run.spec.session not in self._runs,
                begun=True,
                meter=meter,
                quiet_since=self._table.now if run.state is RunState.RUNNING else None,
            )
            self._table.add(run)
            self._costs.adopted(run)
            if run.freed:
                self._table.stop_meter(run)
        return []

    def _resolve(self, run: ScheduledRun) -> list[Instruction]:
        """Put a waiting run into its queue, or into another one if the pool's devices have changed."""
        request = self._queue.resolve(run)
        if not isinstance(request, ResourceRequest):
            # devices that disappeared while the run waited may come back; the run's reason says so
            return self._table.refuse(run, *request) if run.request is None else []
        if run.request is None:
            if refusal := self._costs.refusal(run.spec, request) or self._fair.refusal(run.spec, request):
                return self._table.refuse(run, *refusal)
        elif run.request == request:
            return []
        if run.request is not None and run.request.line != request.line:
            self._table.change(run, passed_at=None, overtaken_at=None)
        self._table.change(run, request=request)
        return []

    def _handle_for(self, run: ScheduledRun, stimulus: StimulusOfRun) -> list[Instruction]:
        match stimulus:
            case RunMoved():
                return self._on_run_moved(run, stimulus)
            case CancelRequested(reason=reason):
                return self._table.stop(run, RunState.CANCELLED, reason)
            case RanksReaped(state=state):
                if not state.is_final:
                    raise ValueError(f"run {run.run_id} can't end as {state!r}: a final state is needed")
                return self._table.remove_ended(run, state)
            case LeaseFreed():
                self._table.free(run)
            case LeaseRefused():
                return self._lease_refused(run, stimulus)
            case LeaseGranted(lease=lease):
                if run.lease is not None and not run.spec.session:
                    meter = self._tariff.metered(run.meter, lease)
                    self._table.change(run, lease=lease, asked=False, meter=meter)
            case RunRequeued(why=why):
                return self._requeued(run, why)
            case RanksRemain(ranks=ranks):
                # each node reports only its own ranks
                hosts = {each.host for each in ranks}
                others = tuple(each for each in run.remaining if each.host not in hosts) if ranks else ()
                self._table.change(run, remaining=(*others, *ranks))
            case SessionPaused(ranks=ranks):
                self._set_restarting(run, ranks)
            case SessionResumed():
                self._set_restarting(run, None)
        return []

    def _set_restarting(self, session: ScheduledRun, ranks: tuple[int, ...] | None) -> None:
        quiet_since = None if session.quiet_since is None else self._table.now
        self._table.change(session, restarting=ranks, quiet_since=quiet_since)

    def _on_run_moved(self, run: ScheduledRun, moved: RunMoved) -> list[Instruction]:
        if run.lease is None or moved.state is RunState.QUEUED:
            return []
        quiet_since = self._table.now if moved.state is RunState.RUNNING else run.quiet_since
        # a running run has new ranks
        remaining = () if moved.state is RunState.RUNNING else run.remaining
        self._table.change(
            run,
            begun=True,
            asked=False,
            quiet_since=quiet_since,
            reason=run.reason or moved.reason,
            unstopped=moved.unstopped,
            remaining=remaining,
        )
        return self._table.move(run, moved.state)

    def _lease_refused(self, run: ScheduledRun, refused: LeaseRefused) -> list[Instruction]:
        if run.lease is None or run.begun:
            return []
        self._queue.room.refuse(run.lease, refused.uuids, refused.why)
        self._table.change(run, lease=None, asked=False)
        return [] if run.stopping_as is None else self._table.end(run, run.stopping_as, None)

    def _requeued(self, run: ScheduledRun, why: str) -> list[Instruction]:
        if run.lease is None or run.spec.session:
            return []
        if run.state.is_final:
            return self._table.remove_ended(run, run.state)
        if run.stopping_as is not None:
            # the run was being stopped, and no rank is left to report its end
            self._table.change(run, lease=None)
            return self._table.end(run, run.stopping_as, run.reason)
        return self._table.requeue(run, why)

    # ------------------------------------------------------------ after every stimulus

    def _advance(self) -> list[Instruction]:
        out = [
            *self._apply_times(),
            *self._costs.apply_limits(),
            *self._queue.advance(),
            # after the queue, which may have given a session its devices or ended it
            *self._advance_cells(),
        ]
        for run in self.waiting:
            # a request that the pool has not resolved yet may still be refused
            is_resolved = run.request is not None or bool(run.spec.session)
            if run.accepted != is_resolved:
                self._table.change(run, accepted=is_resolved)
        return out

    def _apply_times(self) -> list[Instruction]:
        now = self._table.now
        due: list[tuple[ScheduledRun, RunState, EndReason, RunLimit | None]] = [
            (run, RunState.TIMED_OUT, TimeLimitReached(run.spec.timeout_s), RunLimit.TIME)
            for run in self._table.past_time_limit()
        ]
        for session in self._table.sessions():
            if (until := self._table.quiet_until(session)) is not None and now >= until:
                due.append((session, RunState.CANCELLED, SessionWasIdle(session.spec.idle_s or 0.0), None))
        for run in self._table.asked_too_long():
            due.append((run, RunState.FAILED, NoNodesInTime(run.spec.wait_s or 0.0), None))
        due.sort(key=lambda one: one[0].number)
        return [instruction for one in due for instruction in self._table.stop(*one)]

    def _advance_cells(self) -> list[Instruction]:
        """Launch waiting cells of sessions, let them give up, or end them with their session."""
        closed = [run for run in self._table.sessions() if not run.is_open]
        out = [instruction for session in closed for instruction in self._table.end_cells(session)]
        for cell in self._table.waiting_cells():
            session = self._runs[cell.spec.session]
            if session.lease is not None and session_obstacle(self._table, cell) is None:
                lease = _share(session.lease, cell.spec)
                self._table.change(cell, lease=lease, accepted=True)
                out.append(LaunchRun(cell.run_id, lease))
            elif self._table.waited_in_vain(cell):
                out += self._table.give_up(
                    cell, CellWaitLimitReached(cell.spec.wait_s or 0.0, self.queue().reason(cell))
                )
        return out


def _share(lease: Lease, spec: RunSpec) -> Lease:
    """Return a cell's part of the session's lease: all of it, or its first devices for fewer `--fresh` ranks."""
    ranks = spec.placement.ranks
    if ranks >= lease.ranks:
        return lease
    return replace(lease, ranks=ranks, uuids=lease.uuids[:ranks], cpu_slots=min(lease.cpu_slots, ranks))
