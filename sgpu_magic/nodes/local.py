"""The local engine: this machine, one agent process, device locks shared with other users' pools."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from sgpu_magic.agent.ranks import run_processes
from sgpu_magic.agent.runs import ray_place
from sgpu_magic.config import Settings
from sgpu_magic.nodes.contract import EngineListener, LeaseUnavailable
from sgpu_magic.nodes.device_locks import DeviceLocks, DevicesLocked
from sgpu_magic.nodes.local_agent import LocalAgent
from sgpu_magic.packages.node.build_order import needs_build
from sgpu_magic.wire.attachments import Environment
from sgpu_magic.wire.client import ReclaimPayload, ResultsReceived, TellComms, Warm
from sgpu_magic.wire.devices import Inventory, Lease
from sgpu_magic.wire.events import RanksStarted
from sgpu_magic.wire.files import (
    FetchBlob,
    OpenStream,
    StoreRunFile,
    StreamClosed,
    StreamData,
    StreamEnded,
    StreamMessage,
    StreamOpened,
    StreamTaken,
)
from sgpu_magic.wire.node import (
    Adopt,
    AgentReady,
    Answered,
    BuildEnvironment,
    DetachRun,
    DevicesFree,
    EndRun,
    EventsKept,
    FromAgent,
    InventoryTaken,
    KillRanks,
    Launch,
    MasterBound,
    PartEnded,
    Question,
    RanksGone,
    RestartSessionRanks,
    RunEvent,
    SessionRanksRestarted,
    StacksTaken,
    TakeInventory,
    TakeStacks,
    TrackingAsked,
    TrackingKnown,
    WarmZygote,
)
from sgpu_magic.wire.pool_status import PROTOCOL_VERSION
from sgpu_magic.wire.rank import RankQuestion
from sgpu_magic.wire.run import Interpreter, RunSpec
from sgpu_magic.wire.states import RunState
from sgpu_magic.wire.tracking import TrackedRun

# an agent that dies this soon, this often in a row, and has never started a run, will not live the next time either
_SHORT_LIFE_S = 5.0
_SHORT_LIVES = 3


class LocalEngine:
    """Starts or finds the agent at once, so that its zygote imports torch while the pool service is still starting.

    An agent that a killed service left is taken over with its runs; one that dies is replaced.

    Args:
        settings: The pool's settings.
        warm: The interpreter to warm first, None for none.
    """

    grants_later = False
    far = False

    def __init__(self, settings: Settings, warm: Warm | None = None) -> None:
        self._settings = settings
        self._locks = DeviceLocks(settings.lock_path)
        self._leases = HeldLeases()
        self._listener: EngineListener | None = None
        self._warm = warm
        self._agent = LocalAgent(settings, warm)
        self._agent_since = time.monotonic()
        self._agent_has_worked = False
        self._short_lives = 0

    def start(self, listener: EngineListener) -> None:
        self._listener = listener
        self._agent.listen(self._said, self._agent_lost)

    def warm(self, order: Warm) -> None:
        self._warm = order
        self._agent.send(WarmZygote(interpreter=order.interpreter, ranks=order.ranks))

    def take_inventory(self) -> None:
        self._agent.send(TakeInventory())

    def prepare(self, run_id: str, interpreter: Interpreter, environment: Environment) -> None:
        if self.builds(interpreter, environment):
            order = BuildEnvironment(run_id=run_id, interpreter=interpreter, environment=environment)
            self._agent.send(order)

    def builds(self, interpreter: Interpreter, environment: Environment) -> bool:
        return needs_build(self._settings, environment)

    def tracking_known(self, run_id: str, tracked: TrackedRun | None, problem: str) -> None:
        self._agent.send(TrackingKnown(run_id=run_id, tracked=tracked, problem=problem))

    def launch(self, launch: Launch, frames: Sequence[bytes]) -> None:
        spec, lease = launch.spec, launch.lease
        locks: list[int] = []
        if not spec.session and has_locks(lease):
            try:
                self._locks.acquire(lease.uuids)
            except DevicesLocked as error:
                raise LeaseUnavailable(tuple(error.uuids), error.message) from None
            locks = self._locks.descriptors(lease.uuids)
        self._leases.take(spec, lease)
        self._agent.send(msgspec.structs.replace(launch, locks=len(locks)) if locks else launch, frames, locks)

    def adopt(self, run_id: str, numbers: Mapping[int, int]) -> None:
        self._agent.send(Adopt(run_id=run_id, number=numbers.get(0, 0)))

    def events_kept(self, run_id: str, numbers: Mapping[int, int]) -> None:
        self._agent.send(EventsKept(run_id=run_id, number=numbers.get(0, 0)))

    def detach_run(self, run_id: str) -> None:
        self._agent.send(DetachRun(run_id=run_id))

    def take_stacks(self, request: int, run_id: str) -> None:
        self._agent.send(TakeStacks(request=request, run_id=run_id))

    def end_run(self, run_id: str, state: RunState, reason: str) -> None:
        self._agent.send(EndRun(run_id=run_id, state=state, reason=reason))

    def kill_ranks(self, run_id: str) -> None:
        self._agent.send(KillRanks(run_id=run_id))

    def restart_session_ranks(self, request: int, session: str, ranks: tuple[int, ...]) -> None:
        self._agent.send(RestartSessionRanks(request=request, session=session, ranks=ranks))

    def ask_rank(self, request: int, session: str, question: RankQuestion) -> None:
        self._agent.send(Question(request=request, session=session, question=question))

    def tell_comms(self, message: TellComms, frames: Sequence[bytes]) -> None:
        self._agent.send(message, frames)

    def forward(self, run_id: str, rank: int, message: OpenStream | StreamMessage, frames: Sequence[bytes]) -> None:
        self._agent.send(message, frames)

    def give_back(self, run_id: str) -> None:
        """They are free once the ranks are gone: the run's files are here."""

    def reclaim_payload(self, run_id: str) -> None:
        self._agent.send(ReclaimPayload(run_id=run_id))

    def results_received(self, run_id: str) -> None:
        self._agent.send(ResultsReceived(run_id=run_id))

    def close(self) -> None:
        self._agent.end()
        self._locks.close()

    def _said(self, message: FromAgent, frames: Sequence[bytes]) -> None:
        listener = self._listener
        if listener is None:
            return
        match message:
            case AgentReady():
                self._ready(message, listener)
            case InventoryTaken():
                listener.inventory_taken(self._with_locks(message.inventory))
            case RunEvent():
                self._agent_has_worked |= isinstance(message.body, RanksStarted)
                listener.run_happened(message, frames)
            case StacksTaken():
                listener.stacks_taken(message.request, message.stacks)
            case SessionRanksRestarted():
                listener.session_ranks_restarted(message.request, message.session, message.problem)
            case Answered():
                listener.answered(message.request, message.answer)
            case StreamOpened() | StreamData() | StreamTaken() | StreamEnded() | StreamClosed():
                listener.forwarded(message, frames)
            case TrackingAsked(run_id=run_id):
                listener.tracking_asked(run_id)
            case RanksGone():
                self._release(message.run_id)
                listener.ranks_gone(message.run_id)
            case PartEnded() | DevicesFree() | MasterBound() | FetchBlob() | StoreRunFile():
                # of runs that have ranks on other machines
                pass

    def _ready(self, ready: AgentReady, listener: EngineListener) -> None:
        if ready.protocol_version != PROTOCOL_VERSION:
            # an agent of another version, left by a service of that version: its runs can't be followed
            self._agent.end()
            self._replace_agent()
            listener.nodes_lost("the agent on this machine was of another version of sgpu-magic")
            return
        for held in ready.runs:
            lease = held.launch.lease
            locks = self._agent.take_descriptors(held.locks)
            if not held.gone:
                self._leases.take(held.launch.spec, lease)
                if locks:
                    self._locks.take_over(lease.uuids, locks)
        listener.node_found(self._with_locks(ready.inventory), ready.runs)

    def _with_locks(self, inventory: Inventory) -> Inventory:
        """Mark the devices that another pool holds the lock of."""
        real = [device.uuid for device in inventory.devices if not device.simulated]
        elsewhere = self._locks.locked_elsewhere(real) if real else {}
        if not elsewhere:
            return inventory
        devices = tuple(
            msgspec.structs.replace(device, outside_use=f"leased by {elsewhere[device.uuid]}")
            if device.uuid in elsewhere
            else device
            for device in inventory.devices
        )
        return msgspec.structs.replace(inventory, devices=devices)

    def _agent_lost(self) -> None:
        self._agent.clean_up_after()
        for run_id in self._leases.runs:
            # what left its session, and was nobody's child any more when the agent died
            run_processes.kill_leftovers(run_id, ())
            ray_place.remove(run_id, self._settings)
            self._release(run_id)
        worked = self._agent_has_worked or time.monotonic() - self._agent_since >= _SHORT_LIFE_S
        self._short_lives = 0 if worked else self._short_lives + 1
        listener = self._listener
        if listener is None:
            return
        why = "the agent on this machine ended unexpectedly"
        if self._short_lives >= _SHORT_LIVES:
            listener.broken(f"{why} {_SHORT_LIVES} times in a row, as soon as it was started")
            return
        self._replace_agent()
        listener.nodes_lost(why)

    def _replace_agent(self) -> None:
        self._agent = LocalAgent(self._settings, self._warm, look=False)
        self._agent_since = time.monotonic()
        self._agent_has_worked = False
        self._agent.listen(self._said, self._agent_lost)

    def _release(self, run_id: str) -> None:
        for lease in self._leases.gone(run_id):
            if has_locks(lease):
                self._locks.release(lease.uuids)


class HeldLeases:
    """The leases of the runs that have ranks.

    A session's stays held after its own ranks are gone, until the new processes that `--fresh` runs have on its
    devices are gone too.
    """

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        # whose devices new processes are on: run id -> session
        self._sessions: dict[str, str] = {}
        self._kept: dict[str, Lease] = {}

    @property
    def runs(self) -> list[str]:
        """Ids of the runs that have processes of their own."""
        return [*self._leases, *self._sessions]

    def take(self, spec: RunSpec, lease: Lease) -> None:
        """The run's ranks are about to use the lease; a run in the ranks of a session adds nothing to that."""
        if not spec.session:
            self._leases[spec.run_id] = lease
        elif spec.fresh:
            self._sessions[spec.run_id] = spec.session

    def gone(self, run_id: str) -> list[Lease]:
        """The run's ranks are gone. Returns the leases that nobody uses any more."""
        session = self._sessions.pop(run_id, run_id)
        lease = self._leases.pop(run_id, None)
        if lease is not None:
            self._kept[run_id] = lease
        if session in self._leases or session in self._sessions.values():
            return []
        free = self._kept.pop(session, None)
        return [] if free is None else [free]


def has_locks(lease: Lease) -> bool:
    """Whether its devices are locked on the machine: real ones are."""
    return bool(lease.uuids) and not lease.simulated
