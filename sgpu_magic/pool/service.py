"""The pool service: feeds the scheduler what happens and does what it says. No decision is taken here."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from sgpu_magic import __version__
from sgpu_magic.config import SEVEN_DAYS_S, Settings
from sgpu_magic.engines.base import Engine, LeaseUnavailable
from sgpu_magic.pool import stimuli as sched
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.lifecycle import PoolPresence
from sgpu_magic.pool.run_book import PoolRun, RunBook
from sgpu_magic.pool.scheduler import Scheduler
from sgpu_magic.pool.server import ConnectedClient, Server
from sgpu_magic.pool.status import pool_status
from sgpu_magic.protocol.events import (
    EventBody,
    PayloadReleased,
    Placed,
    QueueMoved,
    RanksStarted,
    RunEnded,
    StateChanged,
)
from sgpu_magic.protocol.ids import is_valid_id, short
from sgpu_magic.protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    AskStatus,
    Cancel,
    ClientMessage,
    Goodbye,
    Hello,
    ReclaimPayload,
    Refused,
    ResultsReceived,
    StopPool,
    Submit,
    Warm,
    Welcome,
)
from sgpu_magic.protocol.node_messages import Launch
from sgpu_magic.protocol.records import Failure, Inventory, Lease
from sgpu_magic.protocol.states import FailureKind, RunState

# an inventory older than this is taken anew before a run is placed on real devices
_INVENTORY_FRESH_S = 2.0
_QUEUE_REFRESH_S = 5.0


class PoolService:
    """One pool (an `EngineListener`).

    Args:
        settings: The pool's settings.
        presence: Its lock and address.
        engine: Where its ranks run; started here.
    """

    def __init__(self, settings: Settings, presence: PoolPresence, engine: Engine) -> None:
        self._settings = settings
        self._presence = presence
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._scheduler = Scheduler(pass_over_s=settings.pass_over_s)
        self._ledger = Ledger(settings.state_path / "ledger.sqlite3")
        self._inventory: Inventory | None = None
        self._inventory_at = 0.0
        self._waiting_for_inventory: list[Callable[[], None]] = []
        self._deadline: asyncio.TimerHandle | None = None
        self._idle_since = time.monotonic()
        self._started_at = time.time()
        self.finished = self._loop.create_future()
        self._loop.set_exception_handler(self._broken)
        for run_id in self._ledger.unfinished():
            self._ledger.update(
                run_id,
                state=RunState.FAILED,
                ended_at=time.time(),
                failure="the pool service ended while the run was going on",
            )
        self._server = Server(presence.socket_path, self._heard, self._client_gone)
        self._book = RunBook(self._ledger, settings.runs_path, self._server.send)
        engine.start(self)
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._loop.add_signal_handler(number, self.stop)
        self._idle_timer = self._loop.call_later(self._idle_check_s, self._check_idle)

    def stop(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A fault of this program in a callback: say it in the log and end, so that no cell waits for ever."""
        loop.default_exception_handler(context)
        self.stop()

    def close(self) -> None:
        """Withdraw, tell the clients of runs that end with the pool, end the ranks."""
        for run in self._book.going:
            if run.log is not None and not run.ended:
                self._book.end_without_ranks(run, RunState.CANCELLED, "the pool was stopped", FailureKind.INTERNAL)
        self._server.close()
        self._engine.close()
        self._ledger.close()
        self._presence.withdraw()

    # ------------------------------------------------------------ from clients

    def _heard(self, client: ConnectedClient, message: ClientMessage, frames: Sequence[bytes]) -> None:
        self._idle_since = time.monotonic()
        match message:
            case Hello():
                welcome = Welcome(
                    protocol_version=PROTOCOL_VERSION,
                    package_version=__version__,
                    pid=os.getpid(),
                    busy=bool(self._book.going),
                )
                self._server.send(client, welcome)
            case Warm():
                self._engine.warm(message)
            case Submit():
                self._submit(client, message, frames)
            case Cancel():
                self._cancel(client, message)
            case ReclaimPayload():
                self._engine.reclaim_payload(message.run_id)
            case ResultsReceived():
                self._engine.results_received(message.run_id)
            case AskStatus():
                self._with_fresh_inventory(lambda: self._tell_status(client, message))
            case StopPool():
                self._stop_asked(client, message)
            case Goodbye():
                self._server.drop(client)
                self._client_gone(client)

    def _submit(self, client: ConnectedClient, submit: Submit, frames: Sequence[bytes]) -> None:
        spec = submit.spec
        problem = ""
        if not is_valid_id(spec.run_id) or self._book.get(spec.run_id) or self._ledger.find(spec.run_id):
            problem = "the run's id is not valid or was used before."
        elif spec.placement.ranks < 1:
            problem = f"a run needs at least one rank, not {spec.placement.ranks}."
        elif not 0 < spec.timeout_s <= SEVEN_DAYS_S:
            problem = "a run's time limit is more than 0 s and at most 7 days."
        if problem:
            self._server.send(client, Refused(request=submit.request, error="UsageError", message=problem))
            return
        spec = msgspec.structs.replace(spec, submitted_at=time.time())
        submit = msgspec.structs.replace(submit, spec=spec)
        self._book.add(PoolRun(submit, frames, client))
        self._with_fresh_inventory(lambda: self._feed(sched.RunSubmitted(spec, time.monotonic())))

    def _cancel(self, client: ConnectedClient, message: Cancel) -> None:
        going = [run.run_id for run in self._book.going]
        matches = [run_id for run_id in going if message.run and run_id.startswith(message.run)]
        if len(matches) == 1:
            text = f"run {short(matches[0])} is being cancelled"
            self._server.send(client, Accepted(request=message.request, run_id=matches[0], text=text))
            self._feed(sched.CancelRequested(matches[0], message.reason, time.monotonic()))
            return
        if matches:
            text = f"{message.run!r} begins the ids of {len(matches)} runs: {', '.join(matches)}. Give more digits."
        else:
            text = f"no run that is going on here has an id that begins with {message.run!r}. `sgpu runs` lists them."
        self._server.send(client, Refused(request=message.request, error="UsageError", message=text))

    def _tell_status(self, client: ConnectedClient, message: AskStatus) -> None:
        if self._inventory is None:
            self._waiting_for_inventory.append(lambda: self._tell_status(client, message))
            return
        status = pool_status(
            message,
            self._inventory,
            self._scheduler,
            self._ledger,
            started_at=self._started_at,
            clients=len(self._server.clients),
        )
        self._server.send(client, status)

    def _stop_asked(self, client: ConnectedClient, message: StopPool) -> None:
        if self._book.going and not message.force:
            names = ", ".join(short(run.run_id) for run in self._book.going)
            text = f"the pool has runs going on ({names}). Wait for them, or stop it with --force, which ends them."
            self._server.send(client, Refused(request=message.request, error="PoolError", message=text))
            return
        self._server.send(client, Accepted(request=message.request, text="the pool stops"))
        self._loop.call_later(0.05, self.stop)

    def _client_gone(self, client: ConnectedClient) -> None:
        """A kernel is dead or has unloaded: its runs have no owner any more."""
        self._idle_since = time.monotonic()
        reason = "the notebook that started it is gone"
        for run in self._book.going:
            if run.client is client:
                run.client = None
                self._engine.results_received(run.run_id)
                self._feed(sched.CancelRequested(run.run_id, reason, time.monotonic()))

    # ------------------------------------------------------------ from the engine (EngineListener)

    def inventory_taken(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._inventory_at = time.monotonic()
        self._feed(sched.InventoryChanged(inventory, time.monotonic()))
        waiting, self._waiting_for_inventory = self._waiting_for_inventory, []
        for call in waiting:
            call()

    def run_happened(self, run_id: str, at: float, body: EventBody, frames: Sequence[bytes]) -> None:
        run = self._book.speaker(run_id)
        if run is None:
            return
        now = time.monotonic()
        if isinstance(body, PayloadReleased):
            self._book.tell(run, body, at)
            self._book.payload_released(run)
        elif isinstance(body, RanksStarted):
            self._ledger.update(run_id, started_at=at)
            self._book.tell(run, body, at)
            self._feed(sched.RunMoved(run_id, RunState.RUNNING, now))
        elif isinstance(body, RunEnded):
            submitted = run.submit.spec.submitted_at
            placed = run.placed_at or at
            body = msgspec.structs.replace(body, queued_s=placed - submitted, total_s=at - submitted)
            run.ended = True
            self._book.tell(run, body, at, frames)
            self._ledger.update(run_id, ended_at=at, failure=_headline(body.failure) or body.reason or None)
            self._feed(sched.RunMoved(run_id, body.state, now))
        else:
            self._book.tell(run, body, at, frames)

    def ranks_gone(self, run_id: str) -> None:
        run = self._book.get(run_id)
        self._idle_since = time.monotonic()
        if run is not None:
            state = run.state if run.state.is_final else RunState.FAILED
            self._feed(sched.RunOver(run_id, state, time.monotonic()))
            self._book.ranks_gone(run)

    def nodes_lost(self, why: str) -> None:
        """The agent died: its runs end, and the pool with it; the next command starts a new one."""
        reason = f"{why}; the run's processes were ended"
        for run in self._book.going:
            if run.log is not None and not run.ended:
                self._book.end_without_ranks(run, RunState.FAILED, reason, FailureKind.NODE_LOST)
        self.stop()

    # ------------------------------------------------------------ what the scheduler says

    def _feed(self, stimulus: sched.Stimulus) -> None:
        for instruction in self._scheduler.handle(stimulus):
            self._obey(instruction)
        self._set_deadline()

    def _obey(self, instruction: sched.Instruction) -> None:
        run = self._book.get(instruction.run_id)
        if run is None:
            return
        match instruction:
            case sched.RefuseRun(error=error, message=message):
                self._book.forget(instruction.run_id)
                if run.client is not None:
                    refused = Refused(request=run.submit.request, error=error, message=message)
                    self._server.send(run.client, refused)
            case sched.LaunchRun(lease=lease):
                self._book.accept(run)
                self._launch(run, lease)
            case sched.TellQueue(position=position, reason=reason):
                self._book.accept(run)
                self._book.tell(run, QueueMoved(position=position, reason=reason), time.time())
            case sched.MoveRun(state=state, reason=reason):
                self._book.move(run, state)
                self._book.tell(run, StateChanged(state=state, reason=reason), time.time())
            case sched.StopRun(state=state, reason=reason):
                self._engine.end_run(instruction.run_id, state, reason)
            case sched.EndRun(state=state, reason=reason):
                kind = FailureKind.CAPACITY if state is RunState.FAILED else FailureKind.TIMEOUT
                self._book.end_without_ranks(run, state, reason, kind)
                self._book.forget(instruction.run_id)

    def _launch(self, run: PoolRun, lease: Lease) -> None:
        submit = run.submit
        run_id = submit.spec.run_id
        labels = _labels(lease, self._inventory)
        launch = Launch(
            spec=submit.spec,
            interpreter=submit.interpreter,
            context=submit.context,
            payload=submit.payload,
            lease=lease,
            run_dir=str(self._book.directory(run_id)),
        )
        try:
            self._engine.launch(launch, run.frames)
        except LeaseUnavailable as error:
            self._loop.call_soon(self._feed, sched.LeaseRefused(run_id, error.uuids, error.why, time.monotonic()))
            return
        run.placed_at = time.time()
        # what was only needed to launch, and may be secret or large
        run.frames = ()
        self._ledger.update(run_id, lease=lease)
        host = self._inventory.host if self._inventory is not None else ""
        self._book.tell(run, Placed(lease=lease, host=host, labels=labels), run.placed_at)
        self._loop.call_soon(self._feed, sched.RunMoved(run_id, RunState.STARTING, time.monotonic()))

    # ------------------------------------------------------------ within

    def _with_fresh_inventory(self, call: Callable[[], None]) -> None:
        """Real devices may be in use outside the pool since the last look."""
        inventory = self._inventory
        if inventory is not None and (
            all(device.simulated for device in inventory.devices)
            or time.monotonic() - self._inventory_at < _INVENTORY_FRESH_S
        ):
            call()
            return
        if inventory is not None and not self._waiting_for_inventory:
            self._engine.take_inventory()
        self._waiting_for_inventory.append(call)

    def _set_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        due = self._scheduler.next_deadline()
        waits_for_devices = any(run.lease is None and run.accepted for run in self._scheduler.runs)
        if waits_for_devices and self._inventory is not None and any(not d.simulated for d in self._inventory.devices):
            due = min(due or float("inf"), time.monotonic() + _QUEUE_REFRESH_S)
        if due is not None:
            self._deadline = self._loop.call_later(max(0.0, due - time.monotonic()), self._time_passed)

    def _time_passed(self) -> None:
        self._deadline = None
        self._with_fresh_inventory(lambda: self._feed(sched.TimePassed(time.monotonic())))

    @property
    def _idle_check_s(self) -> float:
        return max(0.2, min(30.0, self._settings.pool_idle_s / 4))

    def _check_idle(self) -> None:
        idle = not self._book.going and not self._server.clients
        if idle and time.monotonic() - self._idle_since > self._settings.pool_idle_s:
            self.stop()
            return
        if not idle:
            self._idle_since = time.monotonic()
        self._idle_timer = self._loop.call_later(self._idle_check_s, self._check_idle)


def _headline(failure: Failure | None) -> str | None:
    """One line for the ledger: `rank 1: ValueError: NaN in batch 118`."""
    if failure is None:
        return None
    message = failure.message.splitlines()[0] if failure.message else ""
    name = failure.type_name.rpartition(".")[2]
    text = f"{name}: {message}" if name else message
    return f"rank {failure.rank}: {text}" if failure.rank is not None and name else text


def _labels(lease: Lease, inventory: Inventory | None) -> tuple[str, ...]:
    """`A10 · 0` for each device of the lease, in rank order."""
    devices = {device.uuid: device for device in inventory.devices} if inventory is not None else {}
    return tuple(
        f"{devices[uuid].type.upper()} · {devices[uuid].index}" if uuid in devices else uuid for uuid in lease.uuids
    )
