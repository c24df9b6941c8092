"""The pool service: feeds the scheduler what happens and does what it says. No decision is taken here."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from sgpu_magic import __version__
from sgpu_magic.config import SEVEN_DAYS_S, Settings
from sgpu_magic.engines.base import Engine, LeaseUnavailable
from sgpu_magic.pool import stimuli as sched
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.lifecycle import PoolPresence
from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.pool.scheduler import Scheduler
from sgpu_magic.pool.server import ConnectedClient, Server
from sgpu_magic.pool.status import pool_status
from sgpu_magic.protocol.events import (
    EventBody,
    Noted,
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
    Launch,
    ReclaimPayload,
    Refused,
    ResultsReceived,
    StopPool,
    Submit,
    Warm,
    Welcome,
)
from sgpu_magic.protocol.records import Failure, InlinePayload, Inventory, Lease
from sgpu_magic.protocol.states import FailureKind, RunState

# an inventory older than this is taken anew before a run is placed on real devices
_INVENTORY_FRESH_S = 2.0
_QUEUE_REFRESH_S = 5.0


@dataclass(eq=False, slots=True)
class PoolRun:
    """A run as the service holds it, from its submission until its ranks are gone.

    Args:
        submit: What the client sent, with its raw frames.
        client: Who follows it; None when that process is dead.
        log: None until the run is accepted.
        state: What the scheduler moved it to.
        ended: The agent's last word came.
    """

    submit: Submit
    frames: Sequence[bytes]
    client: ConnectedClient | None
    log: RunLog | None = None
    state: RunState = RunState.QUEUED
    placed_at: float | None = None
    ended: bool = False


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
        self._runs: dict[str, PoolRun] = {}
        # ranks are gone, but the payload's memory is still being copied
        self._departed: dict[str, PoolRun] = {}
        self._inventory: Inventory | None = None
        self._inventory_at = 0.0
        self._waiting_for_inventory: list[Callable[[], None]] = []
        self._deadline: asyncio.TimerHandle | None = None
        self._idle_since = time.monotonic()
        self._started_at = time.time()
        self.finished = self._loop.create_future()
        for run_id in self._ledger.unfinished():
            self._ledger.update(
                run_id,
                state=RunState.FAILED,
                ended_at=time.time(),
                failure="the pool service ended while the run was going on",
            )
        engine.start(self)
        self._server = Server(presence.socket_path, self._heard, self._client_gone)
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._loop.add_signal_handler(number, self.stop)
        self._idle_timer = self._loop.call_later(self._idle_check_s, self._check_idle)

    def stop(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def close(self) -> None:
        """Withdraw, tell the clients of runs that end with the pool, end the ranks."""
        for run in self._runs.values():
            if run.log is not None and not run.ended:
                self._end_unlaunched(run, RunState.CANCELLED, "the pool was stopped", FailureKind.INTERNAL)
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
                    busy=bool(self._runs),
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
        if not is_valid_id(spec.run_id) or spec.run_id in self._runs or self._ledger.find(spec.run_id):
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
        self._runs[spec.run_id] = PoolRun(submit, frames, client)
        self._with_fresh_inventory(lambda: self._feed(sched.RunSubmitted(spec, time.monotonic())))

    def _cancel(self, client: ConnectedClient, message: Cancel) -> None:
        matches = [run_id for run_id in self._runs if message.run and run_id.startswith(message.run)]
        if len(matches) == 1:
            text = f"run {short(matches[0])} is being cancelled"
            self._server.send(client, Accepted(request=message.request, run_id=matches[0], text=text))
            self._feed(sched.CancelRequested(matches[0], message.reason, time.monotonic()))
            return
        if matches:
            text = f"{message.run!r} begins the ids of {len(matches)} runs: {', '.join(matches)}. Give more digits."
        else:
            text = f"no run of this pool that is going on has an id that begins with {message.run!r}. `sgpu runs` lists them."
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
        if self._runs and not message.force:
            names = ", ".join(short(run_id) for run_id in self._runs)
            text = f"the pool has runs going on ({names}). Wait for them, cancel them, or stop it with --force, which ends them."
            self._server.send(client, Refused(request=message.request, error="PoolError", message=text))
            return
        self._server.send(client, Accepted(request=message.request, text="the pool stops"))
        self._loop.call_later(0.05, self.stop)

    def _client_gone(self, client: ConnectedClient) -> None:
        """A kernel is dead or has unloaded: its runs have no owner any more."""
        self._idle_since = time.monotonic()
        for run_id, run in list(self._runs.items()):
            if run.client is client:
                run.client = None
                self._engine.results_received(run_id)
                self._feed(
                    sched.CancelRequested(run_id, "the notebook that started it is gone", time.monotonic())
                )

    # ------------------------------------------------------------ from the engine (EngineListener)

    def inventory_taken(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._inventory_at = time.monotonic()
        self._feed(sched.InventoryChanged(inventory, time.monotonic()))
        waiting, self._waiting_for_inventory = self._waiting_for_inventory, []
        for call in waiting:
            call()

    def run_happened(self, run_id: str, at: float, body: EventBody, frames: Sequence[bytes]) -> None:
        run = self._runs.get(run_id) or self._departed.get(run_id)
        if run is None:
            return
        now = time.monotonic()
        if isinstance(body, PayloadReleased):
            self._tell(run, body, at)
            if self._departed.pop(run_id, None) is not None and run.log is not None:
                run.log.close()
        elif isinstance(body, RanksStarted):
            self._ledger.update(run_id, started_at=at)
            self._tell(run, body, at)
            self._feed(sched.RunMoved(run_id, RunState.RUNNING, now))
        elif isinstance(body, RunEnded):
            submitted = run.submit.spec.submitted_at
            placed = run.placed_at or at
            body = msgspec.structs.replace(body, queued_s=placed - submitted, total_s=at - submitted)
            run.ended = True
            self._tell(run, body, at, frames)
            self._ledger.update(run_id, ended_at=at, failure=_headline(body.failure) or body.reason or None)
            self._feed(sched.RunMoved(run_id, body.state, now))
        else:
            self._tell(run, body, at, frames)

    def ranks_gone(self, run_id: str) -> None:
        run = self._runs.get(run_id)
        self._idle_since = time.monotonic()
        if run is not None:
            self._feed(
                sched.RunOver(run_id, run.state if run.state.is_final else RunState.FAILED, time.monotonic())
            )
            del self._runs[run_id]
            if not isinstance(run.submit.payload.source, InlinePayload):
                self._departed[run_id] = run
            elif run.log is not None:
                run.log.close()

    def nodes_lost(self, why: str) -> None:
        """The agent died: its runs end, and the pool with it; the next command starts a new one."""
        for run in list(self._runs.values()):
            if not run.ended and run.log is not None:
                self._end_unlaunched(
                    run, RunState.FAILED, f"{why}; the run's processes were ended", FailureKind.NODE_LOST
                )
        self.stop()

    # ------------------------------------------------------------ what the scheduler says

    def _feed(self, stimulus: sched.Stimulus) -> None:
        for instruction in self._scheduler.handle(stimulus):
            self._obey(instruction)
        self._set_deadline()

    def _obey(self, instruction: sched.Instruction) -> None:
        run = self._runs.get(instruction.run_id)
        if run is None:
            return
        match instruction:
            case sched.RefuseRun(error=error, message=message):
                del self._runs[instruction.run_id]
                if run.client is not None:
                    refused = Refused(request=run.submit.request, error=error, message=message)
                    self._server.send(run.client, refused)
            case sched.LaunchRun(lease=lease):
                self._accept(run)
                self._launch(run, lease)
            case sched.TellQueue(position=position, reason=reason):
                self._accept(run)
                self._tell(run, QueueMoved(position=position, reason=reason), time.time())
            case sched.MoveRun(state=state, reason=reason):
                run.state = state
                self._ledger.update(instruction.run_id, state=state)
                self._tell(run, StateChanged(state=state, reason=reason), time.time())
            case sched.StopRun(state=state, reason=reason):
                self._engine.end_run(instruction.run_id, state, reason)
            case sched.EndRun(state=state, reason=reason):
                kind = FailureKind.CAPACITY if state is RunState.FAILED else FailureKind.TIMEOUT
                self._end_unlaunched(run, state, reason, kind)
                del self._runs[instruction.run_id]

    def _accept(self, run: PoolRun) -> None:
        if run.log is not None:
            return
        spec = run.submit.spec
        run.log = RunLog(self._settings.runs_path / spec.run_id, spec.run_id)
        self._ledger.record(spec, RunState.QUEUED)
        if run.client is not None:
            self._server.send(run.client, Accepted(request=run.submit.request, run_id=spec.run_id))

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
            labels=labels,
            run_dir=str(self._settings.runs_path / run_id),
        )
        try:
            self._engine.launch(launch, run.frames)
        except LeaseUnavailable as error:
            self._loop.call_soon(
                self._feed, sched.LeaseRefused(run_id, error.uuids, error.why, time.monotonic())
            )
            return
        run.placed_at = time.time()
        # what was only needed to launch, and may be secret or large
        run.frames = ()
        self._ledger.update(run_id, lease=lease)
        host = self._inventory.host if self._inventory is not None else ""
        self._tell(run, Placed(lease=lease, host=host, labels=labels), run.placed_at)
        self._loop.call_soon(self._feed, sched.RunMoved(run_id, RunState.STARTING, time.monotonic()))

    def _end_unlaunched(self, run: PoolRun, state: RunState, reason: str, kind: FailureKind) -> None:
        now = time.time()
        cancelled = state is RunState.CANCELLED
        ended = RunEnded(
            state=state,
            failure=None if cancelled else Failure(kind=kind, message=reason, at=now),
            reason=reason if cancelled else "",
            queued_s=now - run.submit.spec.submitted_at,
            total_s=now - run.submit.spec.submitted_at,
        )
        run.ended = True
        self._tell(run, ended, now)
        self._ledger.update(run.submit.spec.run_id, state=state, ended_at=now, failure=reason)
        if run.log is not None:
            run.log.close()

    # ------------------------------------------------------------ within

    def _tell(self, run: PoolRun, body: EventBody, at: float, frames: Sequence[bytes] = ()) -> None:
        if run.log is None:
            return
        event = run.log.append(body, at, frames)
        if run.log.problem:
            problem, run.log.problem = run.log.problem, ""
            self._tell(run, Noted(text=problem), at)
        if run.client is not None:
            self._server.send(run.client, event, frames)

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
        if (
            waits_for_devices
            and self._inventory is not None
            and any(not d.simulated for d in self._inventory.devices)
        ):
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
        idle = not self._runs and not self._server.clients
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
        f"{devices[uuid].type.upper()} · {devices[uuid].index}" if uuid in devices else uuid
        for uuid in lease.uuids
    )
