"""Executes the scheduler's instructions, and starts groups of ranks on the leases that it grants."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable

import msgspec

from sgpu_magic.files.content_store import store_name
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.environment_store import EnvironmentStore
from sgpu_magic.pool.file_requests import needed_blobs
from sgpu_magic.pool.format_end import format_end, format_warning
from sgpu_magic.pool.format_queue import format_wait
from sgpu_magic.pool.health import Guard
from sgpu_magic.pool.inventory import FreshInventory
from sgpu_magic.pool.pool_run import GroupState, PoolRun, submitted_fields
from sgpu_magic.pool.scheduling import stimuli as sched
from sgpu_magic.pool.scheduling.scheduler import Scheduler
from sgpu_magic.pool.scheduling.wait_reason import QueueStatus
from sgpu_magic.pool.server import Server
from sgpu_magic.pool.submissions import Submissions
from sgpu_magic.pool.tracker import Tracker
from sgpu_magic.system.processes import stopped_below
from sgpu_magic.wire.attachments import FilePayload, InlinePayload, SharedPayload, StoredPayload
from sgpu_magic.wire.base import ErrorKind, FailureKind, RunState
from sgpu_magic.wire.devices import Inventory, Lease
from sgpu_magic.wire.events import AttemptFailed, Noted, OwnSession, QueueMoved, RunEnded, StateChanged, as_warning
from sgpu_magic.wire.files import PAYLOAD
from sgpu_magic.wire.node import Launch
from sgpu_magic.wire.option_text import Text

# delay until a run's environment files are linked into its directory, so that its ranks start first
_LINK_LATER_S = 0.1
# a run that takes longer to start may wait for a stopped process
_START_LOOK_S = 5.0
_NOT_USERS_FAULT = (FailureKind.WORKER_DIED, FailureKind.NODE_LOST)


class Instructions:
    """Executes the instructions of one service's scheduler.

    Args:
        server: Where the clients are connected.
        engine: Where the ranks run.
        active: The active runs.
        feed: Feeds a stimulus to the scheduler and executes its instructions.
        launches: Starts groups of ranks.
        submissions: Prepares runs' packages.
        tracker: Has accepted runs written to MLflow.
    """

    def __init__(
        self,
        *,
        server: Server,
        engine: Engine,
        active: ActiveRuns,
        feed: Callable[[sched.Stimulus], None],
        launches: LaunchHandler,
        submissions: Submissions,
        tracker: Tracker,
    ) -> None:
        self._server = server
        self._engine = engine
        self._active = active
        self._feed = feed
        self._launches = launches
        self._submissions = submissions
        self._tracker = tracker
        self._loop = asyncio.get_running_loop()

    def execute(self, instruction: sched.Instruction) -> None:
        """Execute one instruction."""
        if (run := self._active.get(instruction.run_id)) is None:
            return
        match instruction:
            case sched.RefuseRun(error=error, reason=reason):
                self._refuse(run, format_end(reason), error)
            case sched.LaunchRun(lease=lease) if self._accept(run):
                self._launches.order(run, lease)
                if run.spec.in_session:
                    # the session's ranks are waiting: record the launch while they already work
                    self._launches.launched(run, lease)
            case sched.MoveRun(state=state, reason=reason):
                self._active.move(run, state)
                if state is not RunState.STARTING or not run.spec.in_session:
                    self._active.publish(run, StateChanged(state=state, reason=str(format_end(reason))), time.time())
            case sched.PublishWarning(warning=warning):
                self._active.publish(run, Noted(text=format_warning(warning)), time.time())
            case sched.StopRun(state=state, reason=reason, limit=limit):
                self._engine.end_run(instruction.run_id, state, format_end(reason), limit)
            case sched.EndUnstartedRun(state=state, reason=reason):
                self._submissions.unprepare(run)
                kind = instruction.kind if state is RunState.FAILED else FailureKind.TIMEOUT
                self._active.end_without_ranks(run, state, format_end(reason), kind)
                self._active.forget(instruction.run_id)
            case sched.LaunchRun():
                # the run could not be recorded, and has been refused
                pass

    def publish_status(self, run_id: str, status: QueueStatus) -> None:
        """Send a waiting run's position and reason to its followers."""
        run = self._active.get(run_id)
        if run is not None and self._accept(run):
            own = tuple(OwnSession(held.run_id, held.session or "") for held in status.own_sessions)
            moved = QueueMoved(position=status.position, reason=format_wait(status.reason), own_sessions=own)
            self._active.publish(run, moved, time.time())

    def end_of_fault(self, run: PoolRun, why: str, have_ranks_exited: bool) -> None:
        """End a run after a fault of the service, and order the end of its ranks.

        Args:
            run: The run.
            why: What happened, a sentence.
            have_ranks_exited: Whether its ranks are gone.
        """
        if run.log is None:
            self._active.resubmittable.pop(run.run_id, None)
            self._refuse(run, why, ErrorKind.INTERNAL)
        elif not run.ended:
            self._active.end_without_ranks(run, RunState.FAILED, why, FailureKind.INTERNAL)
        state = run.ended_as or RunState.FAILED
        run.restart_after = None
        if run.has_group and not have_ranks_exited:
            self._engine.end_run(run.run_id, state, why)
            self._loop.call_soon(self._feed, sched.RunMoved(run.run_id, state, why))
            return
        if not have_ranks_exited:
            self._submissions.unprepare(run)
        self._active.forget(run.run_id)
        self._loop.call_soon(self._feed, sched.RanksReaped(run.run_id, state))

    # ------------------------------------------------------------ internals

    def _accept(self, run: PoolRun) -> bool:
        """Record the run. Returns False if that failed and the run was refused."""
        self._active.resubmittable.pop(run.run_id, None)
        if (why := self._active.accept(run)) is not None:
            self._refuse(run, why, ErrorKind.POOL)
            self._loop.call_soon(self._feed, sched.RanksReaped(run.run_id, RunState.FAILED))
            return False
        self._tracker.follow(run)
        return True

    def _refuse(self, run: PoolRun, message: Text, error: ErrorKind) -> None:
        self._submissions.unprepare(run)
        self._active.forget(run.run_id)
        if run.owner is not None:
            self._server.refuse(run.owner, run.submit.request, message, error)


class LaunchHandler:
    """Orders groups of ranks from the engine, and reports their outcome to the scheduler.

    Args:
        engine: Where the ranks run.
        active: The active runs.
        scheduler: Decides which run gets which devices.
        stock: The newest inventory of the nodes.
        guard: Makes calls and contains their faults.
        feed: Feeds a stimulus to the scheduler and executes its instructions.
        kept_environments: The files that describe the runs' packages.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        active: ActiveRuns,
        scheduler: Scheduler,
        stock: FreshInventory,
        guard: Guard,
        feed: Callable[[sched.Stimulus], None],
        kept_environments: EnvironmentStore,
    ) -> None:
        self._engine = engine
        self._active = active
        self._scheduler = scheduler
        self._stock = stock
        self._guard = guard
        self._feed = feed
        self._kept_environments = kept_environments
        self._loop = asyncio.get_running_loop()

    def granted(self, run_id: str, lease: Lease) -> None:
        """Record that the engine has a run's devices, which the scheduler only proposed, and starts its ranks."""
        if (run := self._active.get(run_id)) is None or run.group is not GroupState.ORDERED:
            # the run is over, or has its devices already: it is in a session, or was restarted on its lease
            return
        self.launched(run, lease)
        if self._scheduler.run(run.run_id) is None or run.lease != lease:
            self._feed(sched.LeaseGranted(run.run_id, lease))
        state = RunState.PREPARING if self._prepares(run) else RunState.STARTING
        self._feed(sched.RunMoved(run.run_id, state))

    def launched(self, run: PoolRun, lease: Lease) -> None:
        """Record that the run's group was ordered."""
        run.launch_group(time.monotonic())
        spec = run.spec
        link = functools.partial(self._kept_environments.link, spec.environment, run.run_id, spec.owner.user)
        self._loop.call_later(_LINK_LATER_S, self._guard.for_run, run.run_id, link)
        if not spec.in_session:
            self._look_later(run)
        if not run.spec.retries:
            # only needed for the launch; may be secret or large
            run.frames = ()
        inventory = self._stock.inventory
        host = ", ".join(dict.fromkeys(share.host for share in lease.shares)) or inventory.host
        self._active.record_placed(run, lease, host, _labels(lease, inventory))

    def order(self, run: PoolRun, lease: Lease) -> None:
        """Order the run's group from the engine, and nothing else; `granted` follows once the devices are taken."""
        launch = Launch(
            **submitted_fields(msgspec.structs.replace(run.submit, spec=run.spec)),
            lease=lease,
            run_dir=str(self._active.directory(run.run_id)),
            attempt=run.attempt,
            number=0 if run.log is None else run.log.number,
            store=store_name(run.spec.owner.user) if needed_blobs(run.submit) else "",
        )
        self._engine.launch(launch, run.frames)
        run.order_group()

    def _look_later(self, run: PoolRun) -> None:
        self._loop.call_later(_START_LOOK_S, self._guard.for_run, run.run_id, lambda: self._look_at_start(run))

    def _look_at_start(self, run: PoolRun) -> None:
        """Tell a run that does not start which stopped processes it waits for, once."""
        if run.ended or run.scheduled.state is not RunState.STARTING:
            return
        agent = self._engine.agent_pid
        stopped = [] if agent is None else stopped_below(agent, 1)
        if not stopped:
            self._look_later(run)
            return
        pids = " ".join(map(str, stopped))
        which, them = f"process {pids} of the pool is", "it"
        if len(stopped) > 1:
            which, them = f"processes {pids} of the pool are", "them"
        text = (
            f"{which} stopped, by a signal or a debugger, so the ranks can't start: `kill -CONT {pids}` "
            f"continues {them}"
        )
        self._active.publish(run, Noted(text=as_warning(text)), time.time())

    # ------------------------------------------------------------ restarts

    def instead_of(self, run: PoolRun, ended: RunEnded) -> AttemptFailed | None:
        """Return the event that replaces this end if the group is restarted; None if the end is final."""
        spec, failure = run.spec, ended.failure
        if ended.state is not RunState.FAILED or failure is None or run.attempt >= spec.retries:
            return None
        if run.state is RunState.CANCELLING or not (spec.retry_on_any or failure.kind in _NOT_USERS_FAULT):
            return None
        run.attempt += 1
        run.restart_after = msgspec.structs.replace(failure, exception=None)
        return AttemptFailed(attempt=run.attempt, attempts=spec.retries + 1, failure=run.restart_after)

    def restart(self, run: PoolRun) -> bool:
        """Restart the run's group after its ranks are gone, if a restart is due. Returns whether it was."""
        failure, run.restart_after = run.restart_after, None
        if failure is None:
            return False
        if run.scheduled.stopping_as is not None:
            why = "it was stopped between two attempts"
            self._active.end_without_ranks(run, run.scheduled.stopping_as, why, FailureKind.TIMEOUT)
            return False
        why = self._find_payload(run)
        if why is None and run.lost_node is not None:
            self._requeue(run, run.lost_node)
        elif why is None:
            why = self._relaunch(run)
        if why is not None:
            failure = msgspec.structs.replace(failure, message=f"{failure.message}\nIt was not started again: {why}.")
            self._active.end_without_ranks(run, RunState.FAILED, failure.message, failure.kind, failure)
        return why is None

    def _relaunch(self, run: PoolRun) -> str | None:
        """Restart the run's group on its lease. Returns why that is not possible; None when it is done."""
        if self._scheduler.run(run.run_id) is None or run.lease is None:
            return "its devices were released"
        session = self._scheduler.run(run.spec.session)
        if run.spec.session and (session is None or not session.is_open):
            return "its session has ended"
        self.order(run, run.lease)
        if not self._prepares(run):
            self._feed(sched.RunMoved(run.run_id, RunState.STARTING))
        return None

    def _requeue(self, run: PoolRun, why: str) -> None:
        """Return a run to the queue after its node was lost and its lease given back."""
        run.requeue()
        self._loop.call_soon(self._feed, sched.RunRequeued(run.run_id, why))

    def _find_payload(self, run: PoolRun) -> str | None:
        """Find the run's payload for another launch. Returns why it is lost; None when it was found."""
        match run.submit.payload.source:
            case InlinePayload():
                lost = not run.frames
            case SharedPayload(pid=pid, fd=fd):
                lost = not os.path.exists(f"/proc/{pid}/fd/{fd}")
            case FilePayload(path=path):
                lost = not os.path.exists(path)
            case StoredPayload():
                # the store keeps it while the run is active
                lost = False
        if not lost:
            return None
        kept = self._active.directory(run.run_id) / PAYLOAD
        if not kept.is_file():
            return "its variables were in the memory of processes that have ended"
        run.move_payload(FilePayload(path=str(kept), size=kept.stat().st_size))
        return None

    # ------------------------------------------------------------ internals

    def _prepares(self, run: PoolRun) -> bool:
        """Whether the node first prepares the run's packages, and reports when they are ready."""
        if (environment := run.submit.environment) is None or run.state not in (RunState.QUEUED, RunState.PREPARING):
            return False
        return self._engine.builds(run.submit.interpreter, environment)


def _labels(lease: Lease, inventory: Inventory) -> tuple[str, ...]:
    """Return a label such as `A10 · 0` for each device of the lease, in rank order."""
    devices = {device.uuid: device for device in inventory.devices}
    return tuple(
        f"{devices[uuid].type.upper()} · {devices[uuid].index}" if uuid in devices else uuid for uuid in lease.uuids
    )
