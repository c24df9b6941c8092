"""The pool service: feeds stimuli to the scheduler and executes its instructions. It makes no decisions itself."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import signal
import time
from collections.abc import Sequence
from typing import Any

from sgpu_magic.config import Settings
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.nodes.engine_reports import NodeMessage
from sgpu_magic.pool.active_runs import ActiveRuns, PoolRun
from sgpu_magic.pool.billing import Billing, budget_of
from sgpu_magic.pool.file_requests import FileRequests
from sgpu_magic.pool.instructions import Instructions, Launches
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.lifecycle import Idleness, PoolPresence
from sgpu_magic.pool.parts import Adoption, FreshInventory, Guard, PoolParts, ServiceFault
from sgpu_magic.pool.permissions import Permissions
from sgpu_magic.pool.remote_clients import Listening
from sgpu_magic.pool.reports import Reports
from sgpu_magic.pool.requests import Requests
from sgpu_magic.pool.retention import Retention
from sgpu_magic.pool.scheduling import stimuli as sched
from sgpu_magic.pool.scheduling.costs import tariff_of
from sgpu_magic.pool.scheduling.scheduler import Scheduler
from sgpu_magic.pool.server import ConnectedClient, Server
from sgpu_magic.pool.submissions import KeptEnvironments
from sgpu_magic.pool.tracker import Tracker
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.client import ClientMessage, Goodbye
from sgpu_magic.wire.costs import read_limits
from sgpu_magic.wire.devices import Inventory, Lease
from sgpu_magic.wire.node import Answered, HeldRun, RunEvent, SessionRanksRestarted, TrackingAsked
from sgpu_magic.wire.pool_status import AskStatus, Hello
from sgpu_magic.wire.rank_events import RankStack

# how long a queued run may not notice that a GPU came free outside the pool; a look takes some 20 ms on each node
_QUEUE_REFRESH_S = 1.0
_MANY_NODES_REFRESH_S = 5.0
# a service that failed sooner than this would meet the same fault again, so no new one is started
_SHORT_LIFE_S = 5.0


class PoolService:
    """One pool (an `EngineListener`).

    Args:
        settings: The pool's settings.
        presence: Its lock and address.
        engine: Where its ranks run; started here.
        listening: Where the pool listens for clients on other machines; None for a local pool. A pool that listens
            never ends for being idle.
    """

    def __init__(
        self, settings: Settings, presence: PoolPresence, engine: Engine, listening: Listening | None = None
    ) -> None:
        self._presence = presence
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._ledger = Ledger(settings.state_path / "ledger.sqlite3", self._loop)
        tariff = tariff_of(settings, settings.pool or "local")
        self._scheduler = Scheduler(
            pass_over_s=settings.pass_over_s,
            tariff=tariff,
            budget=budget_of(settings, self._ledger, time.monotonic(), time.time()),
            limits=read_limits(settings.user_priorities, settings.user_quotas),
            fair_half_life_s=settings.fair_half_life_s,
        )
        self._stock = FreshInventory(engine.take_inventory)
        self._deadline: asyncio.TimerHandle | None = None
        self._begun_at = time.monotonic()
        self.finished = self._loop.create_future()
        # set once the engine knows its nodes
        self.ready = asyncio.Event()
        # why no run can start here any more; "" while runs can
        self.broken_why = ""
        self._loop.set_exception_handler(self._broken)
        server = self._server = Server(presence.socket_path, self._heard, self._gone, listening)
        self.address, self.bulk_port = server.address, server.bulk_port
        billing = Billing(self._ledger, tariff)
        self._active = ActiveRuns(self._ledger, settings.runs_path, server.send, server.offer, billing)
        local_log = f"its log is {settings.state_path / 'pool.log'}"
        where = local_log if listening is None else "its operator's log has the details"
        self._guard = Guard(server, self._active, where)
        parts = PoolParts(
            settings, server, engine, self._ledger, self._active, self._scheduler, self._stock, self._guard, self.feed
        )
        self._kept = KeptEnvironments(settings.state_path / "environment-files", settings.runs_path)
        self._launches = Launches(parts, self._kept)
        self._reports = Reports(parts, self._launches)
        self._adoption = Adoption(parts)
        permissions = Permissions(parts)
        self._files = FileRequests(parts, permissions)
        self._tracker = Tracker(settings, self._active, engine, self._is_live)
        idle_s = settings.pool_idle_s if listening is None else math.inf
        self._idleness = Idleness(idle_s, lambda: bool(self._active.going), server.notify, self.stop)
        self._requests = Requests(parts, permissions, self._kept, self._files, self._tracker, self._idleness, self.stop)
        self._instructions = Instructions(parts, self._launches, self._requests.submissions, self._tracker)
        self._guard.end = self._instructions.end_of_fault
        self._active.on_forgotten = self._forgotten
        self._active.on_written = self._reports.confirm_later
        self._retention = Retention(settings, self._is_live, self._ledger.cells, removed=self._looked_after)
        presence.keep_in_place(server.listen_again, self._guard.log)
        engine.start(self)
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._loop.add_signal_handler(number, self.stop)

    def stop(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle a fault that belongs to no run: leave all ranks to the next service."""
        if (error := context.get("exception")) is None:
            loop.default_exception_handler(context)
        else:
            self._guard.log("it ends, and the next one takes over its runs", error)
            if not self.finished.done():
                self.finished.set_exception(ServiceFault(str(error)))

    def leave(self) -> bool:
        """Release the pool for the next service and keep all ranks running. Returns whether to start it at once."""
        with contextlib.suppress(Exception):
            self._ledger.close()
        self._presence.hand_over()
        return time.monotonic() - self._begun_at > _SHORT_LIFE_S

    def close(self) -> None:
        """End all runs and their ranks, tell their clients, and withdraw the pool's address."""
        self._idleness.close()
        self._retention.close()
        self._end_all(RunState.CANCELLED, "the pool was stopped", FailureKind.INTERNAL)
        self._files.close()
        self._server.close()
        self._engine.close()
        self._tracker.close()
        self._ledger.close()
        self._presence.withdraw()

    # ------------------------------------------------------------ from and to clients

    def _heard(self, client: ConnectedClient, message: ClientMessage, frames: Sequence[bytes]) -> None:
        if not isinstance(message, Hello | AskStatus):
            self._idleness.touched()
        self._guard.for_client(client, message, lambda: self._requests.heard(client, message, frames))

    def _gone(self, client: ConnectedClient) -> None:
        self._guard.for_client(client, Goodbye(), lambda: self._requests.client_gone(client))

    # ------------------------------------------------------------ from the engine (EngineListener)

    def node_found(self, inventory: Inventory, held: Sequence[HeldRun]) -> None:
        if not self._active.settled:
            self._adoption.take_over(held)
            for run in self._active.going:
                self._guard.for_run(run.run_id, functools.partial(self._goes_on, run))
            self._tracker.look_for_leftovers()
            self._retention.schedule()
        self.inventory_taken(inventory)

    def _goes_on(self, run: PoolRun) -> None:
        self._tracker.follow(run)
        self._files.hold(run.submit)

    def inventory_taken(self, inventory: Inventory) -> None:
        waiting = self._stock.taken(inventory)
        self.ready.set()
        self.feed(sched.InventoryChanged(inventory))
        for call in waiting:
            call()

    def run_happened(self, event: RunEvent, frames: Sequence[bytes]) -> None:
        self._guard.for_run(event.run_id, lambda: self._reports.run_happened(event, frames))

    def devices_free(self, run_id: str) -> None:
        self._guard.for_run(run_id, lambda: self._reports.devices_free(run_id))

    def ranks_gone(self, run_id: str) -> None:
        run = self._active.get(run_id)
        self._idleness.touched()
        self._guard.for_run(run_id, lambda: self._requests.ranks_gone(run_id))
        self._guard.for_run(run_id, lambda: self._reports.ranks_gone(run_id), gone=True)
        self._retention.schedule(soon=run is None or not run.spec.in_session)

    def stacks_taken(self, request: int, stacks: tuple[RankStack, ...]) -> None:
        self._guard.for_nobody(lambda: self._requests.ranks.stacks_taken(request, stacks))

    def node_said(self, message: NodeMessage, frames: Sequence[bytes]) -> None:
        match message:
            case SessionRanksRestarted(request=request, session=session, problem=problem):
                self._idleness.touched()
                self._guard.for_run(session, lambda: self._requests.ranks.restarted(request, session, problem))
            case Answered():
                self._guard.for_nobody(lambda: self._requests.ranks.answered(message.request, message.answer))
            case TrackingAsked(run_id=run_id):
                self._guard.for_run(run_id, lambda: self._tracker.asked(run_id))
            case _:
                self._guard.for_nobody(lambda: self._requests.forwarding.from_node(message, frames))

    def lease_granted(self, run_id: str, lease: Lease) -> None:
        # deferred: the engine may call this from within `launch`
        self._loop.call_soon(self._guard.for_run, run_id, functools.partial(self._launches.granted, run_id, lease))

    def lease_refused(self, run_id: str, uuids: tuple[str, ...], why: str) -> None:
        # deferred, as above
        self._loop.call_soon(self.feed, sched.LeaseRefused(run_id, uuids, why))

    def runs_lost(self, run_ids: Sequence[str], why: str, host: str) -> None:
        for run_id in run_ids:
            self._requests.ranks_gone(run_id)
        self._reports.runs_lost(run_ids, why, host)

    def nodes_lost(self, why: str) -> None:
        for run in self._active.going:
            self._requests.ranks_gone(run.run_id)
        self._reports.nodes_lost(why)

    def broken(self, why: str) -> None:
        """End all runs and the pool: no agent is left, so nothing can run here any more."""
        self.broken_why = why
        self._end_all(RunState.FAILED, why, FailureKind.NODE_LOST)
        self.stop()

    def _end_all(self, state: RunState, why: str, kind: FailureKind) -> None:
        for run in self._active.going:
            if run.log is not None and not run.ended:
                self._active.end_without_ranks(run, state, why, kind)

    def feed(self, stimulus: sched.Stimulus) -> None:
        try:
            instructions = self._scheduler.handle(stimulus, time.monotonic())
        except Exception:
            if isinstance(stimulus, sched.RunSubmitted):
                self._scheduler.drop(stimulus.run.run_id)
            raise
        for instruction in instructions:
            self._guard.for_run(instruction.run_id, functools.partial(self._instructions.obey, instruction))
        self._set_deadline()

    def _forgotten(self, run_id: str) -> None:
        self._tracker.over(run_id)
        self._files.let_go(run_id)

    def _looked_after(self) -> None:
        self._kept.remove_unlinked()
        if self._active.going:
            self._loop.run_in_executor(None, self._ledger.checkpoint_beside)
        else:
            self._ledger.checkpoint()

    def _is_live(self, run_id: str) -> bool:
        return self._active.speaker(run_id) is not None or run_id in self._active.resubmittable

    def _set_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        due = self._scheduler.next_deadline()
        if self._scheduler.waits_for_devices:
            refresh_s = _MANY_NODES_REFRESH_S if self._stock.inventory.nodes else _QUEUE_REFRESH_S
            due = min(due or float("inf"), time.monotonic() + refresh_s)
        time_passed = functools.partial(self.feed, sched.TimePassed())
        look_again = functools.partial(self._stock.when_fresh, time_passed, _QUEUE_REFRESH_S / 2)
        self._deadline = None if due is None else self._loop.call_later(max(0.0, due - time.monotonic()), look_again)
