"""Runs of an earlier service that this one takes over."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.files.run_directory import read_spec
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.health import Guard
from sgpu_magic.pool.ledger import Ledger, Metered, in_one_line
from sgpu_magic.pool.pool_run import PoolRun, submitted_fields
from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.pool.scheduling import stimuli as sched
from sgpu_magic.system.processes import may_be_alive
from sgpu_magic.wire.base import CancelReason, FailureKind, RunState
from sgpu_magic.wire.client import Submit
from sgpu_magic.wire.costs import cost_so_far, gpu_s_so_far
from sgpu_magic.wire.events import Noted, RunEnded, Submitted
from sgpu_magic.wire.node import HeldRun
from sgpu_magic.wire.rank_events import Failure
from sgpu_magic.wire.run import Owner, RunSpec

_TAKEN_OVER = "the pool service ended unexpectedly; a new one was started and has taken over the run"
_LOST = "the pool service and the agent of its ranks ended unexpectedly"
_NOT_AGAIN = "the pool service ended while the run waited in its queue, and its notebook did not submit it again"
_POLL_S = 0.25


class Adoption:
    """Takes over an earlier service's runs, once, when the node has reported what it holds.

    Args:
        settings: The pool's settings.
        engine: Where the ranks run.
        ledger: The rows of all runs.
        active: The active runs.
        guard: Makes calls and contains their faults.
        feed: Feeds a stimulus to the scheduler and executes its instructions.
        run_lost: Called with each run that ended with the earlier service, and with its end.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        engine: Engine,
        ledger: Ledger,
        active: ActiveRuns,
        guard: Guard,
        feed: Callable[[sched.Stimulus], None],
        run_lost: Callable[[RunSpec, RunEnded], None],
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._active = active
        self._guard = guard
        self._feed = feed
        self._run_lost = run_lost
        self._loop = asyncio.get_running_loop()
        # read before this service accepts any run
        self._unfinished = ledger.unfinished()
        # deadline for notebooks to reconnect to their runs
        self._until = self._loop.time() + settings.adopt_timeout_s

    def adopt_all(self, held: Sequence[HeldRun]) -> None:
        self._active.settled = True
        # adopt a session before the cells in it
        for one in sorted(held, key=lambda one: bool(one.launch.spec.session)):
            self._guard.for_run(one.launch.spec.run_id, functools.partial(self._adopt, one))
        adopted = {one.launch.spec.run_id for one in held}
        for run_id in self._unfinished:
            if run_id not in adopted:
                self._guard.for_run(run_id, functools.partial(self._requeue_or_close, run_id))
        if held or self._active.resubmittable:
            self._check()

    def _adopt(self, held: HeldRun) -> None:
        launch = held.launch
        now = time.monotonic()
        log = RunLog(self._active.directory(launch.spec.run_id), launch.spec.run_id)
        ended = log.ended
        # the end of a group is not the end of the run until a service has handled it: it may be restarted
        state = RunState.RUNNING if held.state.is_final else held.state
        run = PoolRun(Submit(request=0, **submitted_fields(launch)), (), None, state if ended is None else ended.state)
        run.log = log
        launched_at = time.time() - held.started_s
        run.order_group()
        run.launch_group(now - held.started_s)
        run.attempt = launch.attempt
        run.adopted, run.is_on_line = True, launch.over_line
        run.ended_as = None if ended is None else ended.state
        run.payload_released = log.payload_released
        if log.failed_attempt is not None and log.failed_attempt.attempt > launch.attempt:
            # the earlier service was killed between one attempt and the next
            run.attempt, run.restart_after = log.failed_attempt.attempt, log.failed_attempt.failure
        self._active.add(run)
        if not log.seq:
            # a cell in a session is launched before its first event is written
            self._active.publish(run, Submitted(spec=launch.spec), launch.spec.submitted_at)
            placed = self._active.billing.placed_event(launch.lease, launch.spec.owner.host, ())
            self._active.publish(run, placed, launched_at)
        if not self._ledger.has(run.run_id):
            self._ledger.record(launch.spec, run.state)
        # the run's meter may have started with an earlier attempt
        metered_at, hourly = self._active.billing.adopted(run.scheduled, launch.lease, launched_at, now)
        if not (held.have_ranks_exited and run.ended):
            # otherwise the earlier service knew that the run was over, and may have given its devices to another run
            freed = held.have_ranks_exited and not run.may_restart
            self._feed(sched.RunAdopted(run.scheduled, launch.lease, metered_at, freed, hourly))
        if ended is None:
            self._ledger.update(run.run_id, state=run.state, lease=launch.lease)
            self._active.publish(run, Noted(text=_TAKEN_OVER), time.time())
        elif run.run_id in self._unfinished:
            # the final event was logged, but not yet recorded in the ledger
            self._record_end(run.run_id, ended)
        self._engine.adopt(run.run_id, log.numbers)

    def _requeue_or_close(self, run_id: str) -> None:
        row = self._ledger.summary(run_id)
        spec = read_spec(self._active.directory(run_id))
        if row is not None and row.state is RunState.QUEUED and not row.started_at and spec is not None:
            self._active.resubmittable[run_id] = spec
        else:
            self._close(run_id, _LOST)

    def _check(self) -> None:
        """End runs whose notebooks are dead or do not reconnect, as the earlier service would have done."""
        is_late = self._loop.time() > self._until
        for run_id, spec in list(self._active.resubmittable.items()):
            if is_late or not _owner_may_live(spec.owner):
                del self._active.resubmittable[run_id]
                self._close(run_id, _NOT_AGAIN)
        waits = bool(self._active.resubmittable)
        for run in self._active.going:
            if run.adopted and run.owner is None and not run.spec.detach and not run.ended:
                if is_late or not _owner_may_live(run.spec.owner):
                    self._feed(sched.CancelRequested(run.run_id, CancelReason.OWNER_GONE))
                else:
                    waits = True
        if waits:
            self._loop.call_later(_POLL_S, self._check)

    def _close(self, run_id: str, why: str) -> None:
        """Write the final event of a lost run; its logs stay."""
        now = time.time()
        ended = RunEnded(state=RunState.FAILED, failure=Failure(kind=FailureKind.NODE_LOST, message=why, at=now))
        directory = self._active.directory(run_id)
        if directory.is_dir():
            log = RunLog(directory, run_id)
            if log.ended is not None:
                # the run had ended, but its end was not recorded in the ledger
                ended = log.ended
            else:
                if (row := self._ledger.summary(run_id)) is not None and row.metered_at is not None:
                    # the time at which the ranks died is unknown: stop the meter at the last event
                    gpu_s, cost = gpu_s_so_far(row, log.at), cost_so_far(row, log.at)
                    currency = row.currency if cost is not None else ""
                    ended = msgspec.structs.replace(ended, gpu_s=gpu_s, cost=cost, currency=currency)
                last_at = log.at
                log.append(ended, now)
                if (spec := read_spec(directory)) is not None:
                    # when the ranks died is unknown: the run took at least until its last event
                    took_s = max(0.0, last_at - spec.submitted_at)
                    self._run_lost(spec, msgspec.structs.replace(ended, total_s=took_s))
            log.close()
        self._record_end(run_id, ended)

    def _record_end(self, run_id: str, ended: RunEnded) -> None:
        meter = Metered(gpu_s=ended.gpu_s, cost=ended.cost)
        failure = in_one_line(ended) or None
        self._ledger.update(run_id, state=ended.state, ended_at=time.time(), failure=failure, meter=meter)


def _owner_may_live(owner: Owner) -> bool:
    return may_be_alive(owner.pid, owner.host, owner.namespace)
