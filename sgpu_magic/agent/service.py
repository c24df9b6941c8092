"""The agent: obeys the pool service, keeps zygotes and a standby group warm, outlives a killed service for a while."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from sgpu_magic.agent import leftovers
from sgpu_magic.agent.door import Door
from sgpu_magic.agent.execution import Execution
from sgpu_magic.agent.groups import Groups
from sgpu_magic.agent.inventory import take_inventory
from sgpu_magic.agent.keeper import Keeper
from sgpu_magic.agent.orphaned import Orphaned
from sgpu_magic.agent.reports import Reports
from sgpu_magic.agent.sampling import Sampling
from sgpu_magic.agent.stream import MessageStream
from sgpu_magic.agent.successor import Successor
from sgpu_magic.agent.zygotes import raise_open_files_limit
from sgpu_magic.config import Settings
from sgpu_magic.protocol import codec
from sgpu_magic.protocol.address import agent_socket_file
from sgpu_magic.protocol.events import EventBody, RunEnded
from sgpu_magic.protocol.messages import PROTOCOL_VERSION, ReclaimPayload, ResultsReceived
from sgpu_magic.protocol.node_messages import (
    Adopt,
    AgentReady,
    DetachRun,
    EndAgent,
    EndRun,
    EventsKept,
    HeldRun,
    InventoryTaken,
    Launch,
    StacksTaken,
    TakeInventory,
    TakeStacks,
    ToAgent,
    WarmZygote,
)
from sgpu_magic.protocol.records import Failure, Inventory, Record
from sgpu_magic.protocol.states import FailureKind, RunState

_REPLENISH_DELAY_S = 0.15
_KEEP_DELAY_S = 2.0
# results that nobody fetched are given up with their run after this
_RESULTS_KEPT_S = 600.0
_HOUSEKEEPING_S = 5.0


class Agent:
    """One node's agent (an `ExecutionListener`).

    Args:
        sock: The connection to the pool service that started it. At its end of file the ranks go on and wait for
            the next service, which comes through the agent's own socket.
        settings: The pool's settings.
    """

    def __init__(self, sock: socket.socket, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.finished = self._loop.create_future()
        self._groups = Groups(settings)
        self._keeper = Keeper()
        self._sampling = Sampling()
        self._executions: dict[str, Execution] = {}
        self._background: set[asyncio.Task[None]] = set()
        # descriptors of device locks by run: a device is locked for as long as a rank may use it
        self._locks: dict[str, list[int]] = {}
        self._reports = Reports(self._send)
        self._successor = Successor(settings.state_path / "pool.log")
        self._orphaned = Orphaned(
            self._executions.values,
            self._reports.has_unkept,
            self._successor,
            settings.adopt_timeout_s,
            self._finish,
        )
        self._door = Door(agent_socket_file(settings.runtime_path), self._pool_came)
        self._pool: MessageStream[ToAgent] | None = None
        self._connect(sock)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        self._housekeeping = self._loop.call_later(_HOUSEKEEPING_S, self._keep_house)

    def broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A fault of this program in a callback: say it in the log and end, so that no cell waits for ever."""
        loop.default_exception_handler(context)
        self._finish()

    async def report_ready(self) -> None:
        """Tell the pool what this node has, and which runs."""
        inventory = await self._take_inventory()
        held: list[HeldRun] = []
        locks: list[int] = []
        for run_id, execution in self._executions.items():
            own = self._locks.get(run_id, [])
            locks += own
            held.append(
                HeldRun(
                    launch=execution.launch,
                    state=execution.state,
                    started_s=execution.age_s,
                    gone=execution.gone,
                    locks=len(own),
                )
            )
        ready = AgentReady(pid=os.getpid(), protocol_version=PROTOCOL_VERSION, inventory=inventory, runs=tuple(held))
        self._send(ready, descriptors=locks)

    # ------------------------------------------------------------ the pool comes and goes

    def _connect(self, sock: socket.socket) -> None:
        self._pool = MessageStream[ToAgent](sock, codec.to_agent, self._obey, self._pool_lost)

    def _pool_came(self, sock: socket.socket) -> None:
        """A service was started again. Only one has the pool's lock, so the old one is dead."""
        if self._pool is not None:
            self._pool.close()
            self._reports.service_lost()
        self._orphaned.over()
        self._connect(sock)
        self._in_background(self.report_ready())

    def _pool_lost(self) -> None:
        self._pool = None
        self._reports.service_lost()
        if self._executions:
            self._orphaned.begin()
        else:
            self._finish()

    def _finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def _send(self, message: Record, frames: Sequence[bytes] = (), descriptors: Sequence[int] = ()) -> None:
        if self._pool is not None:
            self._pool.send(message, frames, descriptors)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        self._background.add(task := self._loop.create_task(work))
        task.add_done_callback(self._background.discard)

    # ------------------------------------------------------------ from the pool

    def _obey(self, message: ToAgent, frames: Sequence[bytes]) -> None:
        match message:
            case Launch():
                self._launch(message, frames)
            case WarmZygote():
                self._groups.warm(message.interpreter, 0 if self._busy else message.ranks)
            case TakeInventory():
                self._in_background(self._tell_inventory())
            case EventsKept():
                self._reports.kept(message.run_id, message.number)
            case Adopt():
                self._reports.adopt(message.run_id, message.number)
            case EndAgent():
                self._finish()
            case _:
                execution = self._executions.get(message.run_id)
                if execution is not None:
                    self._obey_for(execution, message)

    def _obey_for(
        self, execution: Execution, message: EndRun | ReclaimPayload | ResultsReceived | DetachRun | TakeStacks
    ) -> None:
        match message:
            case EndRun():
                execution.end_as(message.state, message.reason)
            case ReclaimPayload():
                execution.give_payload_up()
            case ResultsReceived():
                execution.results_received()
            case DetachRun():
                execution.detach()
            case TakeStacks(request=request, run_id=run_id):
                execution.take_stacks(
                    lambda stacks: self._send(StacksTaken(request=request, run_id=run_id, stacks=stacks))
                )

    def _launch(self, launch: Launch, frames: Sequence[bytes]) -> None:
        run_id = launch.spec.run_id
        if launch.locks and self._pool is not None:
            self._locks[run_id] = self._pool.take_descriptors(launch.locks)
        self._reports.begin(run_id, launch.number)
        try:
            group, warm = self._groups.take(launch)
        except OSError as error:
            self._refuse_launch(launch, f"{launch.interpreter.executable} can't be started: {error}")
            return
        try:
            execution = Execution(
                launch,
                frames,
                group,
                warm,
                self._keeper,
                self._settings,
                self._sampling,
                self,
                self._executions.get(run_id),
            )
        except (OSError, ValueError) as error:
            self._groups.dismiss(group)
            self._refuse_launch(launch, f"the run's directory can't be made: {error}")
            return
        self._executions[run_id] = execution
        execution.start()

    def _refuse_launch(self, launch: Launch, message: str) -> None:
        failure = Failure(kind=FailureKind.ENVIRONMENT, message=message, host=socket.gethostname(), at=time.time())
        self.happened(launch.spec.run_id, RunEnded(state=RunState.FAILED, failure=failure), ())
        self._ranks_gone(launch.spec.run_id)

    async def _tell_inventory(self) -> None:
        self._send(InventoryTaken(inventory=await self._take_inventory()))

    async def _take_inventory(self) -> Inventory:
        """In a thread of its own: a real driver may take seconds to answer."""
        own = [pid for execution in self._executions.values() for pid in execution.group.pids]
        take = functools.partial(
            take_inventory,
            simulate=self._settings.simulate,
            cpu_slots=self._settings.cpu_slot_count,
            own_pids=[*own, *self._groups.zygote_pids()],
        )
        return await self._loop.run_in_executor(None, take)

    # ------------------------------------------------------------ from executions

    def happened(self, run_id: str, body: EventBody, frames: Sequence[bytes]) -> None:
        self._reports.happened(run_id, body, frames)

    def run_gone(self, execution: Execution) -> None:
        self._ranks_gone(execution.run_id)
        if not execution.group.broken:
            self._loop.call_later(_REPLENISH_DELAY_S, self._replenish, execution.launch)
        self._loop.call_later(_KEEP_DELAY_S, self._keep, execution)

    def _replenish(self, launch: Launch) -> None:
        if not self._busy:
            self._groups.replenish_after(launch)

    @property
    def _busy(self) -> bool:
        """Ranks of a run live: nothing may compete with them."""
        return any(not execution.group.gone for execution in self._executions.values())

    def _ranks_gone(self, run_id: str) -> None:
        for descriptor in self._locks.pop(run_id, ()):
            os.close(descriptor)
        self._reports.gone(run_id)

    def _keep(self, execution: Execution) -> None:
        if self._executions.get(execution.run_id) is not execution:
            # its group was started again, and the next attempt has the payload
            return
        execution.belongings.keep_large_parts()
        if execution.belongings.in_memory:
            self._loop.call_later(_RESULTS_KEPT_S, self._forget, execution)
        else:
            self._forget(execution)

    def _forget(self, execution: Execution) -> None:
        if self._executions.get(execution.run_id) is not execution:
            return
        if self._pool is None or self._reports.has_unkept(execution.run_id):
            self._loop.call_later(_KEEP_DELAY_S, self._forget, execution)
        else:
            execution.belongings.close()
            self._reports.forget(execution.run_id)
            del self._executions[execution.run_id]

    # ------------------------------------------------------------ housekeeping

    def _keep_house(self) -> None:
        self._groups.tend()
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
            self._successor.reaped(pid)

    def close(self) -> None:
        """End every rank and zygote of this node. Nothing outlives the agent."""
        self._housekeeping.cancel()
        self._orphaned.over()
        self._door.close()
        if self._pool is not None:
            self._pool.close()
        for execution in self._executions.values():
            leftovers.kill_leftovers(execution.run_id, set(execution.group.pids))
        self._groups.close()
        self._keeper.close()
        self._sampling.close()


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
