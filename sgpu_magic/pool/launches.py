"""Groups of ranks are started on the leases that the scheduler gave their runs."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable

from sgpu_magic.files.content_store import store_name
from sgpu_magic.nodes.base import Engine, LeaseUnavailable
from sgpu_magic.pool import stimuli as sched
from sgpu_magic.pool.byte_desk import needed_blobs
from sgpu_magic.pool.kept_environments import KeptEnvironments
from sgpu_magic.pool.run_book import PoolRun, RunBook
from sgpu_magic.pool.scheduler import Scheduler
from sgpu_magic.wire.devices import Inventory, Lease
from sgpu_magic.wire.node_messages import Launch
from sgpu_magic.wire.states import RunState

Guarded = Callable[[str, Callable[[], None]], None]

# the files of a run's environment come into its directory when its ranks have started
_LINK_LATER_S = 0.1


class Launches:
    """Orders groups from the engine, and tells the scheduler what became of them.

    Args:
        engine: Where the ranks are.
        book: The runs.
        kept_environments: What describes the runs' packages.
        scheduler: Knows which lease a run has.
        feed: Tells the scheduler.
        guarded: Makes a call for a run, which pays for its faults.
    """

    def __init__(
        self,
        engine: Engine,
        book: RunBook,
        kept_environments: KeptEnvironments,
        scheduler: Scheduler,
        feed: Callable[[sched.Stimulus], None],
        guarded: Guarded,
    ) -> None:
        self._guarded = guarded
        self._engine = engine
        self._book = book
        self._kept_environments = kept_environments
        self._scheduler = scheduler
        self._feed = feed
        self._loop = asyncio.get_running_loop()

    def launch(self, run: PoolRun, lease: Lease, inventory: Inventory | None) -> None:
        """Start the run's group, or hand its lease back when the engine can't have the devices.

        Args:
            run: An accepted run.
            lease: Its devices.
            inventory: They are named as they are here.
        """
        try:
            self.order(run, lease)
        except LeaseUnavailable as error:
            refused = sched.LeaseRefused(run.run_id, error.uuids, error.why, time.monotonic())
            self._loop.call_soon(self._feed, refused)
            return
        if not self._engine.grants_later:
            self.launched(run, lease, inventory)
            self._loop.call_soon(self._guarded, run.run_id, functools.partial(self._begin, run))

    def granted(self, run: PoolRun, lease: Lease, inventory: Inventory | None) -> None:
        """The engine has its devices, which the scheduler had only proposed; its ranks are being started."""
        if run.placed_at is not None:
            # started again on the lease that it has
            return
        self.launched(run, lease, inventory)
        # on the loop: the engine may say so while it is asked to launch
        self._loop.call_soon(self._feed, sched.LeaseGranted(run.run_id, lease, time.monotonic()))
        self._loop.call_soon(self._guarded, run.run_id, functools.partial(self._begin, run))

    def launched(self, run: PoolRun, lease: Lease, inventory: Inventory | None) -> None:
        """Write down that its group was ordered."""
        run.placed_at = time.time()
        spec = run.spec
        link = functools.partial(self._kept_environments.link, spec.environment, run.run_id, spec.owner.user)
        self._loop.call_later(_LINK_LATER_S, self._guarded, run.run_id, link)
        if not run.spec.retries:
            # what was only needed to launch, and may be secret or large
            run.frames = ()
        host = inventory.host if inventory is not None else ""
        if lease.shares:
            host = ", ".join(dict.fromkeys(share.host for share in lease.shares))
        self._book.placed(run, lease, host, _labels(lease, inventory))

    def order(self, run: PoolRun, lease: Lease) -> None:
        """Order its group from the engine, and nothing else.

        Raises:
            LeaseUnavailable: Its devices can't be had.
        """
        submit = run.submit
        launch = Launch(
            spec=submit.spec,
            interpreter=submit.interpreter,
            context=submit.context,
            payload=submit.payload,
            lease=lease,
            run_dir=str(self._book.directory(run.run_id)),
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
        try:
            self.order(run, scheduled.lease)
        except LeaseUnavailable as error:
            return error.why
        if not self._prepares(run):
            self._feed(sched.RunMoved(run.run_id, RunState.STARTING, time.monotonic()))
        return ""

    def requeue(self, run: PoolRun, why: str) -> None:
        """Its node was lost, and its lease is given back: it waits for another one."""
        run.placed_at = None
        run.ordered = False
        self._book.billing.paused(run, time.monotonic())
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
