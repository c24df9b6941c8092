"""What the nodes report of their runs: written down, sent to followers, passed on to the scheduler, confirmed.

A group that failed is started again as often as its run allows.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence

import msgspec

from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.pool_run import PoolRun
from sgpu_magic.pool.scheduling import stimuli as sched
from sgpu_magic.pool.scheduling.scheduler import Scheduler
from sgpu_magic.wire.attachments import FilePayload, InlinePayload, SharedPayload, StoredPayload
from sgpu_magic.wire.events import AttemptFailed, EnvironmentMoved, Noted, PayloadReleased, RanksStarted, RunEnded
from sgpu_magic.wire.failures import Failure
from sgpu_magic.wire.files import PAYLOAD
from sgpu_magic.wire.node import RunEvent
from sgpu_magic.wire.states import FailureKind, RunKind, RunState

# events are confirmed to the agent this long after they are on disk
_CONFIRM_S = 1.0
_NOT_USERS_FAULT = (FailureKind.WORKER_DIED, FailureKind.NODE_LOST)


class Reports:
    """Takes in what the engine hears from its nodes.

    Args:
        ledger: Times and failures go there.
        active: The runs.
        engine: Is told which events are on disk.
        restarts: Says which ends are not the end.
        scheduler: Says which runs are being stopped.
        feed: Tells the scheduler.
    """

    def __init__(
        self,
        ledger: Ledger,
        active: ActiveRuns,
        engine: Engine,
        restarts: Restarts,
        scheduler: Scheduler,
        feed: Callable[[sched.Stimulus], None],
    ) -> None:
        self._ledger = ledger
        self._active = active
        self._engine = engine
        self._restarts = restarts
        self._scheduler = scheduler
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        self._unconfirmed: set[str] = set()

    def run_happened(self, event: RunEvent, frames: Sequence[bytes]) -> None:
        run = self._active.speaker(event.run_id)
        if run is None or run.log is None or event.number <= run.log.numbers.get(event.part, 0):
            # one that was kept before the service was started again
            return
        if run.ended and not isinstance(event.body, PayloadReleased | Noted):
            # its last word was said here, since something had gone wrong; what was left out on a node comes after any
            run.log.skip(event)
            self._confirm_later(run.run_id)
            return
        at, body = event.at, event.body
        now = time.monotonic()
        self._confirm_later(run.run_id)
        match body:
            case PayloadReleased():
                self._active.tell(run, body, at, told=event)
                self._confirm()
                self._active.payload_released(run)
            case EnvironmentMoved(ready=True):
                self._active.tell(run, body, at, told=event)
                self._feed(sched.RunMoved(run.run_id, RunState.STARTING, now))
            case RanksStarted():
                if not run.spec.retries:
                    run.let_payload_go()
                self._ledger.update(run.run_id, started_at=at)
                self._active.billing.ranks_started(run, now)
                self._active.tell(run, body, at, told=event)
                self._feed(sched.RunMoved(run.run_id, RunState.RUNNING, now))
            case RunEnded():
                failed = self._restarts.instead_of(run, body)
                if failed is not None:
                    self._active.tell(run, failed, at, told=event)
                    return
                # its agent may have had nobody to tell for a while
                ended_at = now - max(0.0, time.time() - at)
                queued_s = (run.placed_at or ended_at) - run.submitted_at
                body = msgspec.structs.replace(body, queued_s=queued_s, total_s=ended_at - run.submitted_at)
                body, meter = self._active.billing.ended(run, body, now)
                run.ended = True
                self._active.tell(run, body, at, frames, event)
                failure = _headline(body.failure) or body.reason
                self._ledger.update(run.run_id, ended_at=at, failure=failure or None, meter=meter)
                self._feed(sched.RunMoved(run.run_id, body.state, now, failure, body.unstopped))
                self._give_back(run)
            case _:
                self._active.tell(run, body, at, frames, event)

    def devices_free(self, run_id: str) -> None:
        """The next run may have the run's devices; all else waits for its files."""
        run = self._active.get(run_id)
        if run is not None:
            run.processes_gone = True
            self._give_back(run)

    def _give_back(self, run: PoolRun) -> None:
        """Let go of the devices of a run whose processes are gone, unless its group may be started again on them."""
        if not run.processes_gone or run.may_start_again:
            return
        if run.spec.kind is RunKind.SESSION and (not run.ended or self._has_fresh_runs(run)):
            return
        now = time.monotonic()
        self._engine.give_back(run.run_id)
        if run.ended:
            self._over(run)
        else:
            # its last word waits for its results
            self._active.billing.paused(run, now)
            self._feed(sched.LeaseFreed(run.run_id, now))

    def _has_fresh_runs(self, session: PoolRun) -> bool:
        """Whether new processes are on the session's devices."""
        return any(run.spec.session == session.run_id and run.spec.fresh and run.ordered for run in self._active.going)

    def ranks_gone(self, run_id: str) -> None:
        self._confirm()
        run = self._active.get(run_id)
        if run is not None and not self._goes_on(run):
            if run.lost_node and not run.payload_over:
                # who would have said so may be dead
                self._active.tell(run, PayloadReleased(kept=False, reason=run.lost_node), time.time())
                run.payload_over = True
            if run.spec.kind is RunKind.SESSION:
                self._end_cells_of(run)
            self._over(run)
            self._active.ranks_gone(run)

    def _over(self, run: PoolRun) -> None:
        state = run.state if run.state.is_final else RunState.FAILED
        self._feed(sched.RunOver(run.run_id, state, time.monotonic()))

    def _end_cells_of(self, session: PoolRun) -> None:
        """The ranks of a session are gone: no cell can be in them any more."""
        for run in self._active.going:
            if run.spec.session != session.run_id or not run.spec.in_session or run.placed_at is None:
                continue
            if not run.ended:
                why = "the ranks of its session are gone"
                self._active.end_without_ranks(run, RunState.FAILED, why, FailureKind.SESSION)
            self._over(run)
            self._active.ranks_gone(run)

    def _goes_on(self, run: PoolRun) -> bool:
        """The run's ranks are gone: start them again where that is due."""
        scheduled = self._scheduler.run(run.run_id)
        return self._restarts.ranks_gone(run, None if scheduled is None else scheduled.stopping_as)

    def runs_lost(self, run_ids: Sequence[str], why: str, host: str) -> None:
        """A node of these runs is gone: they end now, or are placed again once nothing is left of them elsewhere."""
        failure = _node_lost(why, host)
        lost = [run for run_id in run_ids if (run := self._active.get(run_id)) is not None]
        # cells before their sessions: of a session that still seems to run the next cell would begin
        for run in sorted(lost, key=lambda run: not run.spec.session):
            run.lost_node = why
            if run.ended and self._engine.far:
                text = f"{why}; files of the run that were not here yet are lost"
                self._active.tell(run, Noted(text=text), failure.at)
            of_session = run.spec.session or run.spec.kind is RunKind.SESSION
            if not (of_session or run.ended or run.restarting):
                failed = self._restarts.instead_of(run, RunEnded(state=RunState.FAILED, failure=failure))
                if failed is not None:
                    self._active.tell(run, failed, time.time())
            if of_session or not run.restarting:
                self._lose(run, failure)
                self._feed(sched.RunMoved(run.run_id, run.state, time.monotonic(), failure.message))

    def nodes_lost(self, why: str, host: str) -> None:
        """The agent of `host` died and has a successor: its runs end or are started again; those that wait, wait."""
        self._unconfirmed.clear()
        failure = _node_lost(why, host)
        self._active.memory_lost(why)
        # before a lease is given back: what waits is placed on the new agent at once. Cells before their sessions:
        # of a session that still seems to run the next cell would begin
        had_ranks = [run for run in self._active.going if run.placed_at is not None]
        of_sessions = [run for run in had_ranks if run.spec.session or run.spec.kind is RunKind.SESSION]
        for run in sorted(of_sessions, key=lambda run: not run.spec.session):
            self._lose(run, failure)
            self._feed(sched.RunMoved(run.run_id, run.state, time.monotonic(), failure.message))
        for run in had_ranks:
            if not run.ended and not run.restarting:
                failed = self._restarts.instead_of(run, RunEnded(state=RunState.FAILED, failure=failure))
                if failed is not None:
                    self._active.tell(run, failed, time.time())
            if self._goes_on(run):
                continue
            self._lose(run, failure)
            self._over(run)
            self._active.forget(run.run_id)

    def _lose(self, run: PoolRun, failure: Failure) -> None:
        """Say the last word of a run whose ranks died with their agent, unless it was said."""
        self._restarts.give_up(run)
        if run.ended:
            return
        scheduled = self._scheduler.run(run.run_id)
        stopping_as = None if scheduled is None else scheduled.stopping_as
        run.state = stopping_as or RunState.FAILED
        if scheduled is not None and stopping_as is RunState.TIMED_OUT:
            # that ended it, and its agent died before it could say so
            self._active.tell(run, Noted(text=failure.message), failure.at)
            failure = msgspec.structs.replace(failure, kind=FailureKind.TIMEOUT, message=scheduled.reason)
        self._active.end_without_ranks(run, run.state, failure.message, failure.kind, failure)

    def written(self, run: PoolRun) -> None:
        """Events that the disk had not taken are on it."""
        self._confirm_later(run.run_id)

    def _confirm_later(self, run_id: str) -> None:
        if not self._unconfirmed:
            self._loop.call_later(_CONFIRM_S, self._confirm)
        self._unconfirmed.add(run_id)

    def _confirm(self) -> None:
        for run_id in self._unconfirmed:
            run = self._active.speaker(run_id)
            if run is not None and run.log is not None:
                self._engine.events_kept(run_id, run.log.written)
        self._unconfirmed.clear()


def _node_lost(why: str, host: str) -> Failure:
    message = f"{why}; the run's processes were ended"
    return Failure(kind=FailureKind.NODE_LOST, message=message, host=host, at=time.time())


def _headline(failure: Failure | None) -> str | None:
    """One line for the ledger: `rank 1: ValueError: NaN in batch 118`."""
    if failure is None:
        return None
    message = failure.message.splitlines()[0] if failure.message else ""
    name = failure.type_name.rpartition(".")[2]
    text = f"{name}: {message}" if name else message
    return f"rank {failure.rank}: {text}" if failure.rank is not None and name else text


class Restarts:
    """Decides whether a failed group is started again, and does so once its ranks are gone.

    Args:
        active: Says a run's last word when it can't be.
        relaunch: Starts the group on the lease it has; returns why it could not, "" when it did.
        requeue: Lets it wait for another lease, given why.
    """

    def __init__(
        self, active: ActiveRuns, relaunch: Callable[[PoolRun], str], requeue: Callable[[PoolRun, str], None]
    ) -> None:
        self._active = active
        self._relaunch = relaunch
        self._requeue = requeue
        self._failures: dict[str, Failure] = {}

    def instead_of(self, run: PoolRun, ended: RunEnded) -> AttemptFailed | None:
        """What to tell in place of this end: that the group is started again. None when the end stands."""
        spec, failure = run.spec, ended.failure
        if ended.state is not RunState.FAILED or failure is None or run.attempt >= spec.retries:
            return None
        if run.state is RunState.CANCELLING or not (spec.retry_any or failure.kind in _NOT_USERS_FAULT):
            return None
        run.attempt += 1
        run.restarting = True
        self._failures[run.run_id] = failure = msgspec.structs.replace(failure, exception=None)
        return AttemptFailed(attempt=run.attempt, attempts=spec.retries + 1, failure=failure)

    def resume(self, run: PoolRun, failed: AttemptFailed) -> None:
        """An earlier service was killed between the end of one group and the start of the next."""
        run.attempt = failed.attempt
        run.restarting = True
        self._failures[run.run_id] = failed.failure

    def give_up(self, run: PoolRun) -> None:
        """It is not started again after all."""
        run.restarting = False
        self._failures.pop(run.run_id, None)

    def ranks_gone(self, run: PoolRun, stopping_as: RunState | None) -> bool:
        """The failed group is gone. True when its successor was started, so the run goes on.

        Args:
            stopping_as: What the run was told to end as; None when it was not.
        """
        if not run.restarting:
            return False
        run.restarting = False
        failure = self._failures.pop(run.run_id)
        if stopping_as is not None:
            self._active.end_without_ranks(run, stopping_as, "it was stopped between two attempts", FailureKind.TIMEOUT)
            run.state = stopping_as
            return False
        if run.lost_node:
            why = self._find_payload(run)
            if not why:
                self._requeue(run, run.lost_node)
                run.lost_node = ""
        else:
            why = self._find_payload(run) or self._relaunch(run)
        if not why:
            return True
        failure = msgspec.structs.replace(failure, message=f"{failure.message}\nIt was not started again: {why}.")
        self._active.end_without_ranks(run, RunState.FAILED, failure.message, failure.kind, failure)
        run.state = RunState.FAILED
        return False

    def _find_payload(self, run: PoolRun) -> str:
        """See that a new agent can have the run's variables. Returns why not, "" when it can."""
        source = run.submit.payload.source
        match source:
            case InlinePayload():
                lost = not run.frames
            case SharedPayload(pid=pid, fd=fd):
                lost = not os.path.exists(f"/proc/{pid}/fd/{fd}")
            case FilePayload(path=path):
                lost = not os.path.exists(path)
            case StoredPayload():
                # the store keeps it as long as the run goes on
                lost = False
        if not lost:
            return ""
        kept = self._active.directory(run.run_id) / PAYLOAD
        if not kept.is_file():
            return "its variables were in the memory of processes that are gone"
        file = FilePayload(path=str(kept), size=kept.stat().st_size)
        run.submit = msgspec.structs.replace(
            run.submit, payload=msgspec.structs.replace(run.submit.payload, source=file)
        )
        return ""
