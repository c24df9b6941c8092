"""Does what the scheduler says, one instruction after the other; starts groups on the leases that it gave."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable

from sgpu_magic.files.content_store import store_name
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.adoption import Adoption
from sgpu_magic.pool.file_requests import needed_blobs
from sgpu_magic.pool.guard import Guarded
from sgpu_magic.pool.kept_environments import KeptEnvironments
from sgpu_magic.pool.pool_run import PoolRun
from sgpu_magic.pool.reports import Restarts
from sgpu_magic.pool.scheduling import stimuli as sched
from sgpu_magic.pool.scheduling.scheduler import Scheduler
from sgpu_magic.pool.server import Server
from sgpu_magic.pool.status import FreshInventory
from sgpu_magic.pool.submissions import Submissions
from sgpu_magic.pool.tracker import Tracker
from sgpu_magic.wire.devices import Inventory, Lease
from sgpu_magic.wire.events import Noted, QueueMoved, StateChanged
from sgpu_magic.wire.node import Launch
from sgpu_magic.wire.states import FailureKind, RunState

# the files of a run's environment come into its directory when its ranks have started
_LINK_LATER_S = 0.1


class Instructions:
    """Of one service.

    Args:
        server: Where the clients are connected.
        engine: Where the ranks are.
        active: The runs.
        launches: Starts their groups.
        restarts: Knows which are started again.
        adoption: Has runs that wait to be submitted again.
        submissions: Had their packages prepared.
        tracker: Follows them.
        stock: What the nodes have.
        feed: Tells the scheduler.
    """

    def __init__(
        self,
        server: Server,
        engine: Engine,
        active: ActiveRuns,
        launches: Launches,
        restarts: Restarts,
        adoption: Adoption,
        submissions: Submissions,
        tracker: Tracker,
        stock: FreshInventory,
        feed: Callable[[sched.Stimulus], None],
    ) -> None:
        self._server = server
        self._engine = engine
        self._active = active
        self._launches = launches
        self._restarts = restarts
        self._adoption = adoption
        self._submissions = submissions
        self._tracker = tracker
        self._stock = stock
        self._feed = feed
        self._loop = asyncio.get_running_loop()

    def obey(self, instruction: sched.Instruction) -> None:
        """Do one."""
        run = self._active.get(instruction.run_id)
        if run is None:
            return
        match instruction:
            case sched.RefuseRun(error=error, message=message):
                self._refuse(run, message, error)
            case sched.LaunchRun(lease=lease) if self._accept(run):
                self._launches.order(run, lease)
                if run.spec.in_session:
                    # its ranks wait for it: everything else can be done while they work
                    self._launches.launched(run, lease, self._stock.inventory)
            case sched.TellQueue(position=position, reason=reason) if self._accept(run):
                self._active.tell(run, QueueMoved(position=position, reason=reason), time.time())
            case sched.MoveRun(state=state, reason=reason):
                self._active.move(run, state)
                if state is not RunState.STARTING or not run.spec.in_session:
                    self._active.tell(run, StateChanged(state=state, reason=reason), time.time())
            case sched.Remark(text=text):
                self._active.tell(run, Noted(text=text), time.time())
            case sched.StopRun(state=state, reason=reason):
                self._engine.end_run(instruction.run_id, state, reason)
            case sched.EndRun(state=state, reason=reason):
                self._submissions.unprepare(run)
                kind = instruction.kind if state is RunState.FAILED else FailureKind.TIMEOUT
                self._active.end_without_ranks(run, state, reason, kind)
                self._active.forget(instruction.run_id)
            case sched.LaunchRun() | sched.TellQueue():
                # it could not be recorded, and was refused
                pass

    def end_of_fault(self, run: PoolRun, why: str, gone: bool) -> None:
        """Let a run end of a fault of the service; what it has elsewhere ends behind it.

        Args:
            run: The run.
            why: A sentence.
            gone: Its ranks are gone.
        """
        now = time.monotonic()
        if run.log is None:
            self._adoption.submitted(run.run_id)
            self._refuse(run, why, "InternalError")
        elif not run.ended:
            self._active.end_without_ranks(run, RunState.FAILED, why, FailureKind.INTERNAL)
        run.state = run.state if run.state.is_final else RunState.FAILED
        self._restarts.give_up(run)
        if run.ordered and not gone:
            self._engine.end_run(run.run_id, run.state, why)
            self._loop.call_soon(self._feed, sched.RunMoved(run.run_id, run.state, now, why))
            return
        if not gone:
            self._submissions.unprepare(run)
        self._active.forget(run.run_id)
        self._loop.call_soon(self._feed, sched.RunOver(run.run_id, run.state, now))

    # ------------------------------------------------------------ within

    def _accept(self, run: PoolRun) -> bool:
        """Whether the run is recorded; else it was refused."""
        self._adoption.submitted(run.run_id)
        why = self._active.accept(run)
        if why:
            self._refuse(run, why, "PoolError")
            self._loop.call_soon(self._feed, sched.RunOver(run.run_id, RunState.FAILED, time.monotonic()))
            return False
        self._tracker.follow(run)
        return True

    def _refuse(self, run: PoolRun, message: str, error: str) -> None:
        self._submissions.unprepare(run)
        self._active.forget(run.run_id)
        if run.owner is not None:
            self._server.refuse(run.owner, run.submit.request, message, error)


class Launches:
    """Orders groups from the engine, and tells the scheduler what became of them.

    Args:
        engine: Where the ranks are.
        active: The runs.
        kept_environments: What describes the runs' packages.
        scheduler: Knows which lease a run has.
        feed: Tells the scheduler.
        guarded: Makes a call for a run, which pays for its faults.
    """

    def __init__(
        self,
        engine: Engine,
        active: ActiveRuns,
        kept_environments: KeptEnvironments,
        scheduler: Scheduler,
        feed: Callable[[sched.Stimulus], None],
        guarded: Guarded,
    ) -> None:
        self._guarded = guarded
        self._engine = engine
        self._active = active
        self._kept_environments = kept_environments
        self._scheduler = scheduler
        self._feed = feed
        self._loop = asyncio.get_running_loop()

    def granted(self, run_id: str, lease: Lease, inventory: Inventory | None) -> None:
        """The engine has its devices, which the scheduler had only proposed; its ranks are being started.

        Args:
            run_id: An accepted run.
            lease: Its devices.
            inventory: They are named as they are here.
        """
        run = self._active.get(run_id)
        if run is None or run.placed_at is not None:
            # it is over, or started again on the lease that it has
            return
        self.launched(run, lease, inventory)
        scheduled = self._scheduler.run(run.run_id)
        if scheduled is None or scheduled.lease != lease:
            self._feed(sched.LeaseGranted(run.run_id, lease, time.monotonic()))
        self._begin(run)

    def launched(self, run: PoolRun, lease: Lease, inventory: Inventory | None) -> None:
        """Write down that its group was ordered."""
        run.placed_at = time.monotonic()
        spec = run.spec
        link = functools.partial(self._kept_environments.link, spec.environment, run.run_id, spec.owner.user)
        self._loop.call_later(_LINK_LATER_S, self._guarded, run.run_id, link)
        if not run.spec.retries:
            # what was only needed to launch, and may be secret or large
            run.frames = ()
        host = inventory.host if inventory is not None else ""
        if lease.shares:
            host = ", ".join(dict.fromkeys(share.host for share in lease.shares))
        self._active.placed(run, lease, host, _labels(lease, inventory))

    def order(self, run: PoolRun, lease: Lease) -> None:
        """Order its group from the engine, and nothing else: `granted` follows when its devices can be had."""
        submit = run.submit
        launch = Launch(
            spec=submit.spec,
            interpreter=submit.interpreter,
            context=submit.context,
            payload=submit.payload,
            lease=lease,
            run_dir=str(self._active.directory(run.run_id)),
            attempt=run.attempt,
            number=0 if run.log is None else run.log.number,
            environment=submit.environment,
            code=submit.code,
            tracking=submit.tracking,
            uploads=submit.uploads,
            store=store_name(submit.spec.owner.user) if needed_blobs(submit) else "",
        )
        self._engine.launch(launch, run.frames)
        run.ordered, run.processes_gone = True, False

    def relaunch(self, run: PoolRun) -> str:
        """Start the run's group again on its lease. Returns why that is not possible, "" when it is done."""
        scheduled = self._scheduler.run(run.run_id)
        if scheduled is None or scheduled.lease is None:
            return "its devices were given back"
        if run.spec.session and not self._scheduler.is_open(run.spec.session):
            return "its session has ended"
        self.order(run, scheduled.lease)
        if not self._prepares(run):
            self._feed(sched.RunMoved(run.run_id, RunState.STARTING, time.monotonic()))
        return ""

    def requeue(self, run: PoolRun, why: str) -> None:
        """Its node was lost, and its lease is given back: it waits for another one."""
        run.placed_at = None
        run.ordered = False
        self._active.billing.paused(run, time.monotonic())
        self._loop.call_soon(self._feed, sched.RunRequeued(run.run_id, why, time.monotonic()))

    def _begin(self, run: PoolRun) -> None:
        state = RunState.PREPARING if self._prepares(run) else RunState.STARTING
        self._feed(sched.RunMoved(run.run_id, state, time.monotonic()))

    def _prepares(self, run: PoolRun) -> bool:
        """Whether its node makes its packages ready first; it says when they are. Not once it has started."""
        environment = run.submit.environment
        if environment is None or run.state not in (RunState.QUEUED, RunState.PREPARING):
            return False
        return self._engine.builds(run.submit.interpreter, environment)


def _labels(lease: Lease, inventory: Inventory | None) -> tuple[str, ...]:
    """`A10 · 0` for each device of the lease, in rank order."""
    devices = {device.uuid: device for device in inventory.devices} if inventory is not None else {}
    return tuple(
        f"{devices[uuid].type.upper()} · {devices[uuid].index}" if uuid in devices else uuid for uuid in lease.uuids
    )
