"""The pool service: assembles its parts, feeds stimuli to the scheduler and has its instructions executed.

It makes no decisions itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec

from sgpu_magic.config import Settings, load_settings
from sgpu_magic.config.pool_terms import read_limits
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.nodes.engine_reports import NodeMessage
from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.adoption import Adoption
from sgpu_magic.pool.billing import Billing, budget_of
from sgpu_magic.pool.detached_run_notifier import DetachedRunNotifier
from sgpu_magic.pool.device_history import DeviceHistories
from sgpu_magic.pool.environment_store import EnvironmentStore
from sgpu_magic.pool.file_requests import FileRequestHandler
from sgpu_magic.pool.health import Guard, Health, ServiceFault
from sgpu_magic.pool.instructions import Instructions, LaunchHandler
from sgpu_magic.pool.inventory import FreshInventory
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.lifecycle import Idleness, PoolPresence
from sgpu_magic.pool.line_cells import LineCells
from sgpu_magic.pool.permissions import Permissions
from sgpu_magic.pool.pool_run import PoolRun
from sgpu_magic.pool.queue_updates import QueueUpdates
from sgpu_magic.pool.rank_requests import Forwarding, RankRequests
from sgpu_magic.pool.remote_clients import Listening
from sgpu_magic.pool.reports import Reports
from sgpu_magic.pool.requests import Requests
from sgpu_magic.pool.retention import Retention
from sgpu_magic.pool.scheduling import stimuli as sched
from sgpu_magic.pool.scheduling.costs import tariff_of
from sgpu_magic.pool.scheduling.scheduler import Scheduler
from sgpu_magic.pool.server import ConnectedClient, Server
from sgpu_magic.pool.status import StatusReports
from sgpu_magic.pool.submissions import Submissions
from sgpu_magic.pool.tracker import Tracker
from sgpu_magic.system.processes import write_log
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.client import ClientMessage, Goodbye
from sgpu_magic.wire.devices import Inventory, Lease
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.node import Answered, CellTaken, HeldRun, RunEvent, SessionRanksRestarted, TrackingAsked
from sgpu_magic.wire.pool_status import AskStatus, Hello
from sgpu_magic.wire.rank_events import RankStack
from sgpu_magic.wire.run import RunSpec

# interval at which queued runs check for GPUs that became free outside the pool; a query takes 20 ms on each node
_QUEUE_REFRESH_S = 1.0
_MANY_NODES_REFRESH_S = 5.0
# a service that failed sooner than this would meet the same fault again, so its successor is degraded
_SHORT_LIFE_S = 5.0
# a degraded service accepts new runs again after this long without a fault
_PROBATION_S = 60.0
EARLIER_FAULT = "SGPU_SERVICE_FAULT"
"""The environment variable that passes its predecessor's fault to a degraded service."""

_IGNORED = "a report of the engine was ignored"


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class PoolService:
    """One pool (an `EngineListener`).

    Args:
        settings: The pool's settings.
        presence: Its lock and address.
        engine: Where its ranks run; started here.
        listening: Where the pool listens for clients on other machines; None for a local pool. A pool that listens
            never ends for being idle.
        earlier_fault: The fault that ended the service before this one soon after its start; "" for none. With one
            this service is degraded: it adopts, follows and ends runs, refuses new ones, and survives further faults.
    """

    def __init__(
        self,
        settings: Settings,
        presence: PoolPresence,
        engine: Engine,
        listening: Listening | None = None,
        *,
        earlier_fault: str = "",
    ) -> None:
        self._presence = presence
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        ledger = self._ledger = Ledger(settings.state_path / "ledger.sqlite3", self._loop)
        tariff = tariff_of(settings, settings.pool or "local")
        scheduler = self._scheduler = Scheduler(
            pass_over_s=settings.pass_over_s,
            tariff=tariff,
            budget=budget_of(settings, ledger, time.monotonic(), time.time()),
            limits=read_limits(settings.user_priorities, settings.user_quotas),
            fair_half_life_s=settings.fair_half_life_s,
        )
        self._queue_updates = QueueUpdates(scheduler)
        stock = self._stock = FreshInventory(engine.take_inventory)
        histories = self._histories = DeviceHistories()
        self._notifier = DetachedRunNotifier(load_settings) if listening is None else None
        self._deadline: asyncio.TimerHandle | None = None
        self._begun_at = time.monotonic()
        self.finished = self._loop.create_future()
        # set once the engine knows its nodes
        self.ready = asyncio.Event()
        # why no run can start here any more; None while runs can
        self.broken_why: str | None = None
        self._health = Health()
        self._probation: asyncio.TimerHandle | None = None
        if earlier_fault:
            self._degrade(earlier_fault)
        self._loop.set_exception_handler(self._broken)
        state = settings.state_path
        where = f"its log is {state / 'pool.log'}" if listening is None else "its operator's log has the details"

        # what all parts share
        server = self._server = Server(
            presence.socket_path, self._on_message, self._on_disconnect, listening, settings.link_timeout_s
        )
        self.address, self.bulk_port = server.address, server.bulk_port
        active = self._active = ActiveRuns(
            ledger=ledger,
            runs_path=settings.runs_path,
            send=server.send,
            offer=server.offer,
            billing=Billing(ledger, tariff),
            on_end=self._notify_of_end,
            on_forgotten=self._forgotten,
            on_written=self._on_run_written,
        )
        guard = self._guard = Guard(server, active, where, self._end_after_fault)
        permissions = Permissions(ledger=ledger, active=active)
        environments = self._environments = EnvironmentStore(state / "environment-files", settings.runs_path)
        self._tracker = Tracker(settings, active, engine, self._is_live)
        idle_s = settings.pool_idle_s if listening is None else math.inf
        self._idleness = Idleness(idle_s, lambda: bool(active.going), server.notify, self.stop)
        self._files = FileRequestHandler(settings=settings, server=server, active=active, permissions=permissions)

        # from the clients
        self._ranks = RankRequests(server=server, engine=engine, ledger=ledger, active=active, feed=self.feed)
        self._forwarding = Forwarding(server=server, engine=engine, find=permissions.own_going)
        self._submissions = Submissions(
            settings=settings,
            server=server,
            engine=engine,
            ledger=ledger,
            active=active,
            stock=stock,
            guard=guard,
            health=self._health,
            feed=self.feed,
            no_session=self._ranks.no_session,
            files=self._files,
        )
        status = StatusReports(
            settings=settings,
            server=server,
            ledger=ledger,
            scheduler=scheduler,
            active=active,
            engine=engine,
            stock=stock,
            histories=histories,
            health=self._health,
            permissions=permissions,
            idleness=self._idleness,
        )
        # from the scheduler
        self._launches = LaunchHandler(
            engine=engine,
            active=active,
            scheduler=scheduler,
            stock=stock,
            guard=guard,
            feed=self.feed,
            kept_environments=environments,
        )
        line_cells = self._line_cells = LineCells(
            server=server,
            engine=engine,
            ledger=ledger,
            active=active,
            launches=self._launches,
            tracker=self._tracker,
            feed=self.feed,
        )
        self._instructions = Instructions(
            server=server,
            engine=engine,
            active=active,
            feed=self.feed,
            launches=self._launches,
            submissions=self._submissions,
            tracker=self._tracker,
        )

        self._requests = Requests(
            settings=settings,
            server=server,
            engine=engine,
            ledger=ledger,
            active=active,
            stock=stock,
            guard=guard,
            feed=self.feed,
            permissions=permissions,
            kept_environments=environments,
            files=self._files,
            tracker=self._tracker,
            status=status,
            forwarding=self._forwarding,
            ranks=self._ranks,
            submissions=self._submissions,
            line_cells=line_cells,
            stop=self.stop,
        )

        # from the nodes
        self._reports = Reports(
            engine=engine,
            ledger=ledger,
            active=active,
            stock=stock,
            histories=histories,
            guard=guard,
            feed=self.feed,
            launches=self._launches,
        )
        self._adoption = Adoption(
            settings=settings,
            engine=engine,
            ledger=ledger,
            active=active,
            guard=guard,
            feed=self.feed,
            run_lost=self._notify_of_end,
        )

        self._retention = Retention(settings, self._is_live, ledger.cells, removed=self._looked_after)
        presence.restore_files(server.listen_again, guard.log)
        engine.start(self)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            self._loop.add_signal_handler(number, self.stop)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            self._loop.add_signal_handler(number, engine.relay_signal, number)

    def stop(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle a fault that belongs to no run: leave all ranks to the next service."""
        error = context.get("exception")
        if error is None or isinstance(error, msgspec.DecodeError):
            # a process sent malformed data: only that message is lost
            loop.default_exception_handler(context)
        elif self._probation is not None:
            self._guard.log("it goes on, without new runs, as the service before it ended for a fault too", error)
            self._degrade(_describe_error(error))
        else:
            self._guard.log("it ends, and the next one takes over its runs", error)
            if not self.finished.done():
                self.finished.set_exception(ServiceFault(_describe_error(error)))

    def _degrade(self, fault: str) -> None:
        """Refuse new runs until there has been no fault for a while."""
        if self._probation is not None:
            self._probation.cancel()
        self._health.report("service", f"its service failed right after its start ({fault})")
        self._probation = asyncio.get_running_loop().call_later(_PROBATION_S, self._recover)

    def _recover(self) -> None:
        self._probation = None
        self._health.report("service", "")

    def hand_over_and_exit(self, fault: str, start_next: Callable[[], None]) -> NoReturn:
        """Release the pool for the next service, start that one, and exit as if killed, so that all ranks continue.

        Nothing may prevent the exit: the caller would go on to end the runs. If no process can be started, a client
        starts the next service, or the agent does for a detached run.

        Args:
            fault: Why this service ends.
            start_next: Starts the next service; finds the fault in the environment if that one is to be degraded.
        """
        try:
            with contextlib.suppress(Exception):
                self._ledger.close()
            self._presence.hand_over()
            if time.monotonic() - self._begun_at < _SHORT_LIFE_S:
                os.environ[EARLIER_FAULT] = fault
            start_next()
        except BaseException as error:  # noqa: BLE001  the exit below is the purpose
            write_log("the next pool service can't be started from here: ", error)
        finally:
            os._exit(1)

    def close(self) -> None:
        """End all runs and their ranks, tell their clients, and withdraw the pool's address."""
        self._presence.conceal()
        self._idleness.close()
        self._retention.close()
        steps = (
            lambda: self._end_all(RunState.CANCELLED, "the pool was stopped", FailureKind.INTERNAL),
            self._files.close,
            self._server.close,
            self._engine.close,
            self._tracker.close,
            self._ledger.close,
            self._presence.withdraw,
        )
        for step in steps:
            # a step that fails must not prevent the end of the ranks
            self._guard.for_nobody(step, "a part of the service did not end properly")

    # ------------------------------------------------------------ from and to clients

    def _on_message(self, client: ConnectedClient, message: ClientMessage, frames: Sequence[bytes]) -> None:
        if not isinstance(message, Hello | AskStatus):
            self._idleness.touched()
        self._guard.for_client(client, message, lambda: self._requests.on_message(client, message, frames))

    def _on_disconnect(self, client: ConnectedClient) -> None:
        self._guard.for_client(client, Goodbye(), lambda: self._requests.on_client_disconnect(client))

    # ------------------------------------------------------------ from the engine (EngineListener)

    def node_found(self, inventory: Inventory, held: Sequence[HeldRun]) -> None:
        self._guard.for_nobody(lambda: self._on_inventory(inventory, held), _IGNORED)

    def _on_inventory(self, inventory: Inventory, held: Sequence[HeldRun]) -> None:
        if not self._active.settled:
            self._adoption.adopt_all(held)
            for run in self._active.going:
                self._guard.for_run(run.run_id, functools.partial(self._resume, run))
            self._tracker.find_leftovers()
            self._retention.schedule()
        self.inventory_taken(inventory)

    def _resume(self, run: PoolRun) -> None:
        self._tracker.follow(run)
        self._files.hold(run.submit)

    def inventory_taken(self, inventory: Inventory) -> None:
        waiting = self._stock.receive(inventory)
        self._histories.add_inventory(self._stock.inventory, time.monotonic())
        self.ready.set()
        for call in (functools.partial(self.feed, sched.InventoryChanged(inventory)), *waiting):
            self._guard.for_nobody(call, _IGNORED)

    def on_run_event(self, event: RunEvent, frames: Sequence[bytes]) -> None:
        self._guard.for_run(event.run_id, lambda: self._reports.on_run_event(event, frames))

    def cell_taken(self, taken: CellTaken) -> None:
        self._idleness.touched()
        self._guard.for_run(taken.launch.spec.run_id, lambda: self._line_cells.record(taken))

    def devices_free(self, run_id: str) -> None:
        self._guard.for_run(run_id, lambda: self._reports.devices_free(run_id))

    def ranks_exited(self, run_id: str) -> None:
        run = self._active.get(run_id)
        self._idleness.touched()
        self._guard.for_run(run_id, lambda: self._requests.ranks_exited(run_id))
        self._guard.for_run(run_id, lambda: self._reports.ranks_exited(run_id), have_ranks_exited=True)
        self._retention.schedule(soon=run is None or not run.spec.in_session)

    def stacks_taken(self, request: int, stacks: tuple[RankStack, ...]) -> None:
        self._guard.for_nobody(lambda: self._ranks.stacks_taken(request, stacks))

    def on_node_message(self, message: NodeMessage, frames: Sequence[bytes]) -> None:
        match message:
            case SessionRanksRestarted(request=request, session=session, problem=problem):
                self._idleness.touched()
                self._guard.for_run(session, lambda: self._ranks.restarted(request, session, problem))
            case Answered():
                self._guard.for_nobody(lambda: self._ranks.answered(message.request, message.answer))
            case TrackingAsked(run_id=run_id):
                self._guard.for_run(run_id, lambda: self._tracker.report_run(run_id))
            case _:
                self._guard.for_nobody(lambda: self._forwarding.from_node(message, frames))

    def lease_granted(self, run_id: str, lease: Lease) -> None:
        # deferred: the engine may call this from within `launch`
        self._loop.call_soon(self._guard.for_run, run_id, functools.partial(self._launches.granted, run_id, lease))

    def lease_refused(self, run_id: str, uuids: tuple[str, ...], why: str) -> None:
        # deferred, as above
        refused = functools.partial(self.feed, sched.LeaseRefused(run_id, uuids, why))
        self._loop.call_soon(self._guard.for_run, run_id, refused)

    def runs_lost(self, run_ids: Sequence[str], why: str, host: str) -> None:
        for run_id in run_ids:
            self._guard.for_run(run_id, functools.partial(self._requests.ranks_exited, run_id))
        self._guard.for_nobody(lambda: self._reports.runs_lost(run_ids, why, host), _IGNORED)

    def nodes_lost(self, why: str) -> None:
        for run in self._active.going:
            self._guard.for_run(run.run_id, functools.partial(self._requests.ranks_exited, run.run_id))
        self._guard.for_nobody(lambda: self._reports.nodes_lost(why), _IGNORED)

    def degraded(self, why: str) -> None:
        self._health.report("engine", why)

    def failed(self, run_id: str, error: Exception) -> None:
        def fail() -> None:
            raise error

        if run_id:
            self._guard.for_run(run_id, fail)
        else:
            self._guard.for_nobody(fail, _IGNORED)

    def _notify_of_end(self, spec: RunSpec, ended: RunEnded) -> None:
        if self._notifier is not None:
            self._notifier.run_ended(spec, ended)

    def broken(self, why: str) -> None:
        """End all runs and the pool: no agent is left, so nothing can run here any more."""
        self.broken_why = why
        self._end_all(RunState.FAILED, why, FailureKind.NODE_LOST)
        self.stop()

    def _end_all(self, state: RunState, why: str, kind: FailureKind) -> None:
        for run in self._active.going:
            if run.log is not None and not run.ended:
                end = functools.partial(self._active.end_without_ranks, run, state, why, kind)
                self._guard.for_nobody(end, f"the end of run {run.run_id} is not recorded")

    def feed(self, stimulus: sched.Stimulus) -> None:
        now = time.monotonic()
        try:
            instructions = self._scheduler.handle(stimulus, now)
            statuses = self._queue_updates.due(now)
        except Exception:
            if isinstance(stimulus, sched.RunSubmitted):
                self._scheduler.drop(stimulus.run.run_id)
            raise
        for instruction in instructions:
            self._guard.for_run(instruction.run_id, functools.partial(self._instructions.execute, instruction))
        for run_id, status in statuses.items():
            self._guard.for_run(run_id, functools.partial(self._instructions.publish_status, run_id, status))
        self._set_deadline()

    def _end_after_fault(self, run: PoolRun, why: str, have_ranks_exited: bool) -> None:
        self._instructions.end_of_fault(run, why, have_ranks_exited)

    def _on_run_written(self, run_id: str) -> None:
        self._reports.confirm_later(run_id)

    def _forgotten(self, run_id: str) -> None:
        self._tracker.run_ended(run_id)
        self._files.release(run_id)

    def _looked_after(self) -> None:
        self._environments.remove_unlinked()
        if self._active.going:
            self._loop.run_in_executor(None, self._ledger.checkpoint_in_background)
        else:
            self._ledger.checkpoint()

    def _is_live(self, run_id: str) -> bool:
        return self._active.speaker(run_id) is not None or run_id in self._active.resubmittable

    def _set_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        times = (self._scheduler.next_deadline(), self._queue_updates.next_deadline())
        due = min((at for at in times if at is not None), default=None)
        if self._scheduler.waits_for_devices:
            refresh_s = _MANY_NODES_REFRESH_S if self._stock.inventory.nodes else _QUEUE_REFRESH_S
            due = min(due or float("inf"), time.monotonic() + refresh_s)
        time_passed = functools.partial(self.feed, sched.TimePassed())
        refresh = functools.partial(self._stock.when_fresh, time_passed, _QUEUE_REFRESH_S / 2)
        self._deadline = None if due is None else self._loop.call_later(max(0.0, due - time.monotonic()), refresh)
