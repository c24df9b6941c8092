"""The agent: obeys the pool service, keeps zygotes and a standby group warm, ends everything when the pool is gone."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from sgpu_magic.agent import leftovers, telemetry
from sgpu_magic.agent.execution import Execution
from sgpu_magic.agent.group import Group
from sgpu_magic.agent.keeper import Keeper
from sgpu_magic.agent.stream import MessageStream
from sgpu_magic.agent.zygotes import Zygotes, raise_open_files_limit
from sgpu_magic.config import Settings
from sgpu_magic.protocol import codec
from sgpu_magic.protocol.events import EventBody, RunEnded
from sgpu_magic.protocol.messages import PROTOCOL_VERSION, ReclaimPayload, ResultsReceived
from sgpu_magic.protocol.node_messages import (
    AgentReady,
    EndRun,
    InventoryTaken,
    Launch,
    RanksGone,
    RunEvent,
    TakeInventory,
    ToAgent,
    WarmZygote,
)
from sgpu_magic.protocol.records import Failure, Interpreter, Inventory
from sgpu_magic.protocol.states import FailureKind, RunState

# above this the ranks of a standby group join late: gloo's loops cost CPU while they wait
_JOIN_EARLY_MAX = 8
_REPLENISH_DELAY_S = 0.15
_KEEP_DELAY_S = 2.0
# results that nobody fetched are given up with their run after this
_RESULTS_KEPT_S = 600.0
_HOUSEKEEPING_S = 5.0


class Agent:
    """One node's agent (an `ExecutionListener`).

    Args:
        sock: The connection to the pool service; its end of file ends the agent.
        settings: The pool's settings.
    """

    def __init__(self, sock: socket.socket, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.finished = self._loop.create_future()
        self._zygotes = Zygotes(settings.state_path / "logs", settings.zygote_idle_s)
        self._keeper = Keeper()
        self._executions: dict[str, Execution] = {}
        self._standby: Group | None = None
        self._last_on_gpus = False
        self._departing: list[Group] = []
        self._background: set[asyncio.Task[None]] = set()
        self._pool = MessageStream[ToAgent](sock, codec.to_agent, self._obey, self._pool_lost)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        self._housekeeping = self._loop.call_later(_HOUSEKEEPING_S, self._keep_house)

    def broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A fault of this program in a callback: say it in the log and end, so that no cell waits for ever."""
        loop.default_exception_handler(context)
        self._pool_lost()

    async def report_ready(self) -> None:
        """Tell the pool what this node has."""
        self._pool.send(
            AgentReady(pid=os.getpid(), protocol_version=PROTOCOL_VERSION, inventory=await self._take_inventory())
        )

    # ------------------------------------------------------------ from the pool

    def _obey(self, message: ToAgent, frames: Sequence[bytes]) -> None:
        match message:
            case Launch():
                self._launch(message, frames)
            case EndRun():
                execution = self._executions.get(message.run_id)
                if execution is not None:
                    execution.end_as(message.state, message.reason)
            case WarmZygote():
                self._warm(message.interpreter, message.ranks)
            case ReclaimPayload():
                execution = self._executions.get(message.run_id)
                if execution is not None:
                    execution.give_payload_up()
            case ResultsReceived():
                execution = self._executions.get(message.run_id)
                if execution is not None:
                    execution.results_received()
            case TakeInventory():
                self._background.add(task := self._loop.create_task(self._tell_inventory()))
                task.add_done_callback(self._background.discard)

    def _launch(self, launch: Launch, frames: Sequence[bytes]) -> None:
        try:
            group, warm = self._group_for(launch)
        except OSError as error:
            self._refuse_launch(launch, f"{launch.interpreter.executable} can't be started: {error}")
            return
        try:
            execution = Execution(launch, frames, group, warm, self._keeper, self._settings, self)
        except (OSError, ValueError) as error:
            group.dismiss()
            self._departing.append(group)
            self._refuse_launch(launch, f"the run's directory can't be made: {error}")
            return
        self._executions[launch.spec.run_id] = execution
        execution.start()

    def _refuse_launch(self, launch: Launch, message: str) -> None:
        failure = Failure(kind=FailureKind.ENVIRONMENT, message=message, host=socket.gethostname(), at=time.time())
        self.happened(launch.spec.run_id, RunEnded(state=RunState.FAILED, failure=failure), ())
        self._pool.send(RanksGone(run_id=launch.spec.run_id))

    async def _tell_inventory(self) -> None:
        self._pool.send(InventoryTaken(inventory=await self._take_inventory()))

    async def _take_inventory(self) -> Inventory:
        """In a thread of its own: a real driver may take seconds to answer."""
        own = [pid for execution in self._executions.values() for pid in execution.group.pids]
        take = functools.partial(
            telemetry.take_inventory,
            simulate=self._settings.simulate,
            cpu_slots=self._settings.cpu_slot_count,
            own_pids=[*own, *self._zygotes.pids()],
        )
        return await self._loop.run_in_executor(None, take)

    # ------------------------------------------------------------ groups

    def _group_for(self, launch: Launch) -> tuple[Group, str]:
        interpreter, ranks, on_gpus = launch.interpreter, launch.spec.placement.ranks, _on_gpus(launch)
        standby = self._standby
        if standby is not None and _fits(standby, interpreter, ranks, on_gpus) and not standby.has_dead_rank():
            self._standby = None
            return standby, "standby"
        self._drop_standby()
        zygote = self._zygotes.get(interpreter)
        warm = "zygote" if zygote.ready else "cold"
        return self._make_group(interpreter, ranks, join_early=not on_gpus), warm

    def _make_group(self, interpreter: Interpreter, ranks: int, join_early: bool, *, rehearse: bool = False) -> Group:
        settings = self._settings
        zygote = self._zygotes.get(interpreter)
        return Group(zygote, ranks, join_early, settings.output_limit, settings.runtime_path, rehearse=rehearse)

    def _warm(self, interpreter: Interpreter, ranks: int) -> None:
        try:
            self._zygotes.get(interpreter)
        except OSError:
            # told when a run needs it
            return
        if ranks:
            self._replenish(interpreter, ranks)

    def _replenish(self, interpreter: Interpreter, ranks: int) -> None:
        if not self._settings.standby or any(not execution.group.gone for execution in self._executions.values()):
            return
        if self._standby is not None:
            if _fits(self._standby, interpreter, ranks, self._last_on_gpus):
                self._standby.wanted_at = self._loop.time()
                return
            self._drop_standby()
        try:
            join_early = ranks <= _JOIN_EARLY_MAX and not self._last_on_gpus
            self._standby = self._make_group(interpreter, ranks, join_early, rehearse=join_early)
        except OSError:
            return

    def _drop_standby(self) -> None:
        if self._standby is not None:
            self._standby.dismiss()
            self._departing.append(self._standby)
            self._standby = None

    # ------------------------------------------------------------ from executions

    def happened(self, run_id: str, body: EventBody, frames: Sequence[bytes]) -> None:
        self._pool.send(RunEvent(run_id=run_id, number=0, at=time.time(), body=body), frames)

    def run_gone(self, execution: Execution) -> None:
        self._pool.send(RanksGone(run_id=execution.run_id))
        launch = execution.launch
        self._last_on_gpus = _on_gpus(launch)
        if not execution.group.broken:
            self._loop.call_later(_REPLENISH_DELAY_S, self._replenish, launch.interpreter, launch.spec.placement.ranks)
        self._loop.call_later(_KEEP_DELAY_S, self._keep, execution)

    def _keep(self, execution: Execution) -> None:
        execution.keep_large_parts()
        if execution.holds_memory:
            self._loop.call_later(_RESULTS_KEPT_S, self._forget, execution)
        else:
            self._forget(execution)

    def _forget(self, execution: Execution) -> None:
        execution.close()
        self._executions.pop(execution.run_id, None)

    # ------------------------------------------------------------ housekeeping

    def _keep_house(self) -> None:
        standby = self._standby
        if standby is not None and (
            standby.broken or self._loop.time() - standby.wanted_at > self._settings.standby_idle_s
        ):
            self._drop_standby()
        for group in [group for group in self._departing if group.gone]:
            group.close()
            self._departing.remove(group)
        self._zygotes.retire()
        self._housekeeping = self._loop.call_later(_HOUSEKEEPING_S, self._keep_house)

    def _reap(self) -> None:
        """Zygotes are our children; as a subreaper we also get what a dead zygote leaves."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return

    def _pool_lost(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def close(self) -> None:
        """End every rank and zygote of this node. Nothing outlives the agent."""
        self._housekeeping.cancel()
        self._pool.close()
        for execution in self._executions.values():
            leftovers.kill_leftovers(execution.run_id, set(execution.group.pids))
        self._zygotes.close()
        self._keeper.close()


def _on_gpus(launch: Launch) -> bool:
    return bool(launch.lease.uuids) and not launch.lease.simulated


def _fits(group: Group, interpreter: Interpreter, ranks: int, on_gpus: bool) -> bool:
    if group.broken or group.zygote.interpreter.key != interpreter.key or len(group.ranks) != ranks:
        return False
    # one that has joined is a group of gloo: NCCL asks the driver, which then no longer hears which devices are its
    return not (on_gpus and group.join_early)


def run(sock: socket.socket, settings: Settings) -> None:
    """Be the agent until the pool service is gone."""
    raise_open_files_limit()
    asyncio.run(_run(sock, settings))


async def _run(sock: socket.socket, settings: Settings) -> None:
    (settings.state_path / "logs").mkdir(mode=0o700, parents=True, exist_ok=True)
    agent = Agent(sock, settings)
    asyncio.get_running_loop().set_exception_handler(agent.broken)
    try:
        await agent.report_ready()
        await agent.finished
    finally:
        agent.close()


def decode_settings(text: str) -> Settings:
    """The settings as the pool passes them on the command line: JSON."""
    return msgspec.json.decode(text, type=Settings)
