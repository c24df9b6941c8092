"""Handles the nodes' reports about runs: records them, sends them to followers and the scheduler, confirms them.

A failed group is restarted as often as its run allows (`instructions`).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence

import msgspec

from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.device_history import DeviceHistories
from sgpu_magic.pool.format_end import format_end
from sgpu_magic.pool.health import Guard
from sgpu_magic.pool.instructions import LaunchHandler
from sgpu_magic.pool.inventory import FreshInventory
from sgpu_magic.pool.ledger import Ledger, in_one_line
from sgpu_magic.pool.pool_run import GroupState, PoolRun
from sgpu_magic.pool.scheduling import stimuli as sched
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.events import (
    EnvironmentMoved,
    Noted,
    PayloadReleased,
    RanksRestarted,
    RanksStarted,
    RunEnded,
)
from sgpu_magic.wire.node import RunEvent
from sgpu_magic.wire.rank_events import Failure, Sampled

# events are confirmed to the agent this long after they are on disk
_CONFIRM_S = 1.0


class Reports:
    """Handles what the engine receives from its nodes.

    Args:
        engine: Where the ranks run.
        ledger: The rows of all runs.
        active: The active runs.
        stock: The newest inventory of the nodes.
        histories: The use of the devices in the last minutes.
        guard: Makes calls and contains their faults.
        feed: Feeds a stimulus to the scheduler and executes its instructions.
        launches: Decides whether a failed group is restarted.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        ledger: Ledger,
        active: ActiveRuns,
        stock: FreshInventory,
        histories: DeviceHistories,
        guard: Guard,
        feed: Callable[[sched.Stimulus], None],
        launches: LaunchHandler,
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._active = active
        self._stock = stock
        self._histories = histories
        self._guard = guard
        self._feed = feed
        self._launches = launches
        self._unconfirmed: set[str] = set()
        # whether a call of `_confirm_due` is scheduled
        self._confirms = False

    def on_run_event(self, event: RunEvent, frames: Sequence[bytes]) -> None:
        run = self._active.speaker(event.run_id)
        if run is None or run.log is None or event.number <= run.log.numbers.get(event.part, 0):
            # logged before the service was restarted
            return
        if run.ended and not isinstance(event.body, PayloadReleased | Noted):
            # the service itself wrote the final event after a fault; only late notes and the payload's release count
            run.log.skip(event)
            self.confirm_later(run.run_id)
            return
        at, body, now = event.at, event.body, time.monotonic()
        self.confirm_later(run.run_id)
        match body:
            case PayloadReleased():
                self._active.publish(run, body, at, report=event)
                self._confirm()
                self._active.payload_released(run)
            case EnvironmentMoved(ready=True):
                self._active.publish(run, body, at, report=event)
                self._feed(sched.RunMoved(run.run_id, RunState.STARTING))
            case RanksStarted():
                if not run.spec.retries:
                    run.release_payload()
                self._ledger.update(run.run_id, started_at=at)
                self._active.billing.ranks_started(run.scheduled, now)
                self._active.publish(run, body, at, report=event)
                self._feed(sched.RunMoved(run.run_id, RunState.RUNNING))
            case RunEnded():
                if (failed := self._launches.instead_of(run, body)) is not None:
                    self._active.publish(run, failed, at, report=event)
                    return
                # the report may be late if there was no pool service for a while
                ended_at = now - max(0.0, time.time() - at)
                queued_s = (run.placed_at or ended_at) - run.submitted_at
                total_s = ended_at - run.submitted_at
                body = msgspec.structs.replace(body, queued_s=queued_s, total_s=total_s)
                body, meter = self._active.billing.ended(run.scheduled, body, now)
                run.ended_as = body.state
                self._active.publish(run, body, at, frames, event)
                failure = in_one_line(body)
                self._ledger.update(run.run_id, ended_at=at, failure=failure or None, meter=meter)
                self._feed(sched.RunMoved(run.run_id, body.state, failure or None, body.unstopped))
                self._give_back(run)
            case Sampled(samples=samples):
                self._active.publish(run, body, at, frames, event)
                if (lease := run.scheduled.lease) is not None:
                    # samples of a time without a service arrive together and count as one point
                    self._histories.add_samples(lease, samples, now)
            case Noted(remaining=remaining) if remaining:
                self._active.publish(run, body, at, report=event)
                self._feed(sched.RanksRemain(run.run_id, remaining))
            case RanksRestarted():
                self._active.publish(run, body, at, report=event)
                self._feed(sched.RanksRemain(run.run_id, ()))
            case _:
                self._active.publish(run, body, at, frames, event)

    def devices_free(self, run_id: str) -> None:
        """Return the devices of a run whose processes are gone, even if its files are still being transferred."""
        if (run := self._active.get(run_id)) is not None:
            run.exit_group()
            self._give_back(run)

    def _give_back(self, run: PoolRun) -> None:
        """Return the devices of a run whose processes are gone, unless its group may be restarted on them."""
        if run.group is not GroupState.EXITED or run.may_restart:
            return
        if run.is_session and (not run.ended or self._has_fresh_runs(run)):
            return
        self._engine.give_back(run.run_id)
        if run.ended:
            self._report_reaped(run)
        else:
            # the final event follows once the results have been transferred
            self._feed(sched.LeaseFreed(run.run_id))

    def _has_fresh_runs(self, session: PoolRun) -> bool:
        """Whether `--fresh` runs use the session's devices."""
        return any(
            run.spec.session == session.run_id and run.spec.fresh and run.has_group for run in self._active.going
        )

    def ranks_exited(self, run_id: str) -> None:
        self._confirm()
        if (run := self._active.get(run_id)) is None:
            return
        run.exit_group()
        if not self._launches.restart(run):
            if run.lost_node is not None and not run.payload_released:
                # the agent that would report this may be dead
                self._active.publish(run, PayloadReleased(kept=False, reason=run.lost_node), time.time())
                run.payload_released = True
            if run.is_session:
                self._end_cells_of(run)
            self._report_reaped(run)
            self._active.ranks_exited(run)

    def _report_reaped(self, run: PoolRun) -> None:
        self._feed(sched.RanksReaped(run.run_id, run.ended_as or RunState.FAILED))

    def _end_cells_of(self, session: PoolRun) -> None:
        """End the cells in a session whose ranks are gone."""
        for run in self._active.going:
            if run.spec.session != session.run_id or not run.spec.in_session or run.placed_at is None:
                continue
            if not run.ended:
                why = (
                    f"session {session.spec.name} has ended, and its ranks with it; the cell may have run in part. "
                    "%sgpu_connect starts another one."
                )
                self._active.end_without_ranks(run, RunState.FAILED, why, FailureKind.SESSION)
            self._report_reaped(run)
            self._active.ranks_exited(run)

    def runs_lost(self, run_ids: Sequence[str], why: str, host: str) -> None:
        """End the runs of a lost node, or requeue them once none of their ranks is left on other nodes."""
        failure = _node_lost(why, host)
        lost = [run for run_id in run_ids if (run := self._active.get(run_id)) is not None]
        # end cells before their sessions, whose end would cancel their fresh cells
        for run in sorted(lost, key=lambda run: not run.spec.session):
            self._guard.for_run(run.run_id, functools.partial(self._lost_with_node, run, why, failure))

    def _lost_with_node(self, run: PoolRun, why: str, failure: Failure) -> None:
        run.lost_node = why
        if run.ended and self._engine.far:
            text = f"{why}; the run's files that had not reached the pool yet are lost"
            self._active.publish(run, Noted(text=text), failure.at)
        of_session = run.spec.session or run.is_session
        if not of_session:
            self._try_again(run, failure)
            if run.restart_after and self._engine.far:
                text = (
                    f"{why}; what its ranks there had written in this attempt is lost. The next attempt finds the "
                    "checkpoints of earlier attempts, and what the other nodes have written"
                )
                self._active.publish(run, Noted(text=text), failure.at)
        if of_session or not run.restart_after:
            self._feed(sched.RunMoved(run.run_id, self._lose(run, failure), failure.message))

    def nodes_lost(self, why: str) -> None:
        """End or restart the runs of the single agent, which died and was replaced; queued runs keep waiting."""
        self._unconfirmed.clear()
        failure = _node_lost(why, self._stock.inventory.host)
        self._active.memory_lost(why)
        # end these runs before any lease is returned: that places waiting runs on the new agent at once, and the next
        # cell would start in a session that still seems to run. End cells first: the end of a session cancels its fresh
        # cells
        had_ranks = [run for run in self._active.going if run.placed_at is not None]
        of_sessions = [run for run in had_ranks if run.spec.session or run.is_session]
        for run in sorted(of_sessions, key=lambda run: not run.spec.session):
            self._guard.for_run(
                run.run_id, functools.partial(self._end_in_session, run, failure), have_ranks_exited=True
            )
        for run in had_ranks:
            self._guard.for_run(
                run.run_id, functools.partial(self._lost_with_agent, run, failure), have_ranks_exited=True
            )

    def _end_in_session(self, run: PoolRun, failure: Failure) -> None:
        self._feed(sched.RunMoved(run.run_id, self._lose(run, failure), failure.message))

    def _lost_with_agent(self, run: PoolRun, failure: Failure) -> None:
        self._try_again(run, failure)
        run.exit_group()
        if not self._launches.restart(run):
            self._lose(run, failure)
            self._report_reaped(run)
            self._active.forget(run.run_id)

    def _try_again(self, run: PoolRun, failure: Failure) -> None:
        """Mark a run that lost ranks for a restart if one is due, and tell its followers."""
        if not run.ended and not run.restart_after:
            lost = RunEnded(state=RunState.FAILED, failure=failure)
            if (failed := self._launches.instead_of(run, lost)) is not None:
                self._active.publish(run, failed, time.time())

    def _lose(self, run: PoolRun, failure: Failure) -> RunState:
        """Write the final event of a run whose ranks died with their agent, unless it exists. Returns its state."""
        run.restart_after = None
        if run.ended_as is not None:
            return run.ended_as
        state = run.scheduled.stopping_as or RunState.FAILED
        if state is RunState.TIMED_OUT:
            # the time limit ended the run, and its agent died before it could report that
            self._active.publish(run, Noted(text=failure.message), failure.at)
            reason = str(format_end(run.scheduled.reason))
            failure = msgspec.structs.replace(failure, kind=FailureKind.TIMEOUT, message=reason)
        self._active.end_without_ranks(run, state, failure.message, failure.kind, failure)
        return state

    def confirm_later(self, run_id: str) -> None:
        """Confirm a run's events that are on disk, together with those of others."""
        if not self._confirms:
            self._confirms = True
            asyncio.get_running_loop().call_later(_CONFIRM_S, self._confirm_due)
        self._unconfirmed.add(run_id)

    def _confirm_due(self) -> None:
        # reset it first: later events are then confirmed even if this call fails
        self._confirms = False
        self._confirm()

    def _confirm(self) -> None:
        for run_id in self._unconfirmed:
            if (run := self._active.speaker(run_id)) is not None and run.log is not None:
                self._engine.events_kept(run_id, run.log.written)
        self._unconfirmed.clear()


def _node_lost(why: str, host: str) -> Failure:
    message = f"{why}; the run's processes were ended"
    return Failure(kind=FailureKind.NODE_LOST, message=message, host=host, at=time.time())
