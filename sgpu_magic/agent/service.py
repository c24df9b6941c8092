"""The agent: executes the pool service's orders, keeps zygotes and a standby group warm, survives a killed service."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
from collections.abc import Sequence

from sgpu_magic import extensions
from sgpu_magic.agent import faults
from sgpu_magic.agent.agent_socket import AgentSocket
from sgpu_magic.agent.environments import Environments
from sgpu_magic.agent.launch import RunLauncher
from sgpu_magic.agent.ranks.run_processes import RunPorts
from sgpu_magic.agent.ranks.stop import catches
from sgpu_magic.agent.ranks.zygotes import raise_open_files_limit
from sgpu_magic.agent.reports import EventReports, FileRequests
from sgpu_magic.agent.run_registry import RunRegistry
from sgpu_magic.agent.runs.execution_kinds import FreshRun, SessionCell
from sgpu_magic.agent.runs.node_run import AgentServices, NodeRun
from sgpu_magic.agent.runs.preparing import LaunchInputs
from sgpu_magic.agent.runs.run_memory import BackgroundCopier
from sgpu_magic.agent.runs.send_files_to_pool import FilesToPool
from sgpu_magic.agent.runs.session import NodeSession
from sgpu_magic.agent.session_lines import SessionLines
from sgpu_magic.agent.standby_groups import StandbyGroups
from sgpu_magic.agent.survive import Introduction, Orphaned, Successor
from sgpu_magic.agent.watch.sampling import Sampling
from sgpu_magic.config import Settings
from sgpu_magic.system.message_stream import MessageStream
from sgpu_magic.system.processes import signal_name
from sgpu_magic.wire import codec
from sgpu_magic.wire.base import Record, RunState
from sgpu_magic.wire.codec import Order, UnreadableLaunch
from sgpu_magic.wire.files import BlobFetched, RunFileStored
from sgpu_magic.wire.node import (
    Adopt,
    Answered,
    BuildEnvironment,
    EndAgent,
    EndRun,
    EventsKept,
    Launch,
    OfferLine,
    Question,
    RelaySignal,
    RestartSessionRanks,
    SessionRanksRestarted,
    StacksTaken,
    TakeInventory,
    TakeStacks,
    WarmZygote,
)
from sgpu_magic.wire.pool_status import agent_socket_file, lock_file, session_socket_file
from sgpu_magic.wire.run import RankAnswer
from sgpu_magic.wire.streams import OpenStream, StreamClosed, StreamData, StreamEnded, StreamTaken

_HOUSEKEEPING_S = 5.0
# pauses after failed introductions
_INTRODUCED_AGAIN_S = (0.1, 2.0, 0.0)
# as torchrun; `systemctl stop` and Slurm, for example, often signal all processes of a node
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_RELAYED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
# time for ranks to exit in addition to their grace, and the polling interval
_STOP_S = 7.0
_STOP_POLL_S = 0.02


class Agent:
    """One node's agent.

    Args:
        sock: The connection to the pool service that started the agent. At end of file the ranks keep running and the
            agent waits for the next service, which connects to the agent's own socket.
        settings: The pool's settings.
        lifeline: On a node other than the pool's machine, the descriptor of a pipe; the agent ends at its end of file.
            -1 for none.
    """

    def __init__(self, sock: socket.socket, settings: Settings, lifeline: int = -1) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.finished = self._loop.create_future()
        self._groups = StandbyGroups(settings)
        self._copier = BackgroundCopier()
        self._sampling = Sampling()
        self._reports = EventReports(self._send)
        self._file_requests = FileRequests(self._send)
        self._inputs = LaunchInputs(settings, self._file_requests)
        self._far = FilesToPool(settings, self._file_requests, self._reports)
        # the pool starts this process with its own standard error
        log = settings.state_path / "pool.log" if lifeline < 0 else None
        self._runs = RunRegistry(
            self._groups, self._reports, lambda: self._pool is not None, self._ranks_gone, self._far, log
        )
        self._here = AgentServices(self._copier, settings, self._sampling, self._reports, self._runs, self._far)
        self._run_ports = RunPorts(self._runs.get, self._send)
        self._environments = Environments(settings, self._groups.zygotes.keys)
        self._launches = RunLauncher(self._runs, self._here, self._environments, self._inputs)
        self._lines = SessionLines(settings, self._runs, self._launches, self._reports, self._send)
        self._introduction = Introduction(settings, self._runs, self._send)
        self._successor = Successor(settings.state_path / "pool.log")
        self._orphaned = Orphaned(
            self._runs,
            # a service started on a machine other than the pool's would be a different pool; a served pool is started
            # by its operator
            self._successor if lifeline < 0 and not settings.listen else None,
            settings.adopt_timeout_s,
            lambda: self._stop("its pool service ended, and no other one took over the run"),
        )
        # on another machine the uplink connects, and the pool's lock is not on this machine
        lock = lock_file(settings.state_path) if lifeline < 0 else None
        self._socket = AgentSocket(agent_socket_file(settings.runtime_path), self._on_pool_connected, lock)
        # notebooks on other machines reach their sessions through the pool service
        self._session_socket = None
        if lifeline < 0:
            self._session_socket = AgentSocket(session_socket_file(settings.runtime_path), self._lines.accept)
        self._pool: MessageStream[Order] | None = None
        self._connect(sock)
        if lifeline >= 0:
            self._loop.add_reader(lifeline, self._on_parent_exit, lifeline)
        self._stopping = False
        self._stop_by = 0.0
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in _STOP_SIGNALS:
            self._loop.add_signal_handler(number, self._stop_for, number)
        for number in _RELAYED_SIGNALS:
            self._loop.add_signal_handler(number, self._relay, number)
        self._housekeeping = self._loop.call_later(_HOUSEKEEPING_S, self._tidy)

    async def _introduce(self) -> None:
        """Report this node's devices to the pool as soon as the driver has listed them."""
        for pause_s in _INTRODUCED_AGAIN_S:
            try:
                await self._introduction.ready()
                # the service now knows this agent
                self._lines.introduced()
                self._file_requests.on_service_connected()
                return
            except Exception as error:  # noqa: BLE001  the pool waits for the introduction
                faults.report(error)
            await asyncio.sleep(pause_s)
        self._finish()

    # ------------------------------------------------------------ connecting to and losing the pool

    def _connect(self, sock: socket.socket) -> None:
        self._pool = MessageStream[Order](sock, codec.to_agent, self._on_message, self._pool_lost, gathers=True)
        faults.in_background(self._introduce())

    def _on_pool_connected(self, sock: socket.socket) -> None:
        """Switch to a restarted service. Only one service holds the pool's lock, so the old one is dead."""
        if self._pool is not None:
            self._pool.close()
            self._on_pool_lost()
        self._orphaned.stop()
        self._connect(sock)

    def _pool_lost(self) -> None:
        self._on_pool_lost()
        if self._stopping:
            return
        if self._runs:
            self._orphaned.begin()
        else:
            self._finish()

    def _on_pool_lost(self) -> None:
        self._pool = None
        reactions = (
            self._run_ports.close,
            self._lines.service_lost,
            self._reports.service_lost,
            self._environments.release_queued,
        )
        for react in reactions:
            with faults.guarded(None):
                react()

    def _on_parent_exit(self, lifeline: int) -> None:
        self._loop.remove_reader(lifeline)
        if not self._stopping:
            self._stop(f"the process that had started the agent on {socket.gethostname()} ended")

    def _stop_for(self, number: int) -> None:
        self._stop(f"the agent on {socket.gethostname()} was stopped by {signal_name(number)}")

    def _stop(self, reason: str) -> None:
        """Stop every run by its stop path, with its grace; then end the agent. The second time, end it at once."""
        if self._stopping:
            self._stop_by = 0.0
            return
        self._stopping = True
        grace_s = 0.0
        for run in self._runs.all():
            if not run.has_exited:
                with faults.guarded(functools.partial(self._runs.faulted, run.run_id)):
                    grace_s = max(grace_s, run.grace_s)
                    # the cells of a session end with it
                    if not isinstance(run, SessionCell):
                        self._runs.end(run, RunState.CANCELLED, reason)
        self._stop_by = self._loop.time() + grace_s + _STOP_S
        self._await_ends()

    def _await_ends(self) -> None:
        if all(run.has_exited for run in self._runs.all()) or self._loop.time() > self._stop_by:
            self._finish()
        else:
            self._loop.call_later(_STOP_POLL_S, self._await_ends)

    def _relay(self, number: int) -> None:
        """Send a signal to the ranks that handle it; it would end the others."""
        for run in self._runs.all():
            if isinstance(run, FreshRun | NodeSession) and not run.has_exited:
                for process in run.group.ranks:
                    if process.alive and process.pid is not None and catches(process.pid, number):
                        process.signal(number)

    def _finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def _send(self, message: Record, frames: Sequence[bytes] = (), descriptors: Sequence[int] = ()) -> None:
        if self._pool is not None:
            self._pool.send(message, frames, descriptors)

    # ------------------------------------------------------------ from the pool

    def _on_message(self, message: Order, frames: Sequence[bytes]) -> None:
        with faults.guarded(self._charged(message)):
            self._execute(message, frames)

    def _charged(self, message: Order) -> faults.OnFault | None:
        """Return the handler for a fault: it ends the message's run, or answers the request."""
        match message:
            case Launch(spec=spec):
                run_id = spec.run_id
            case Question() | RestartSessionRanks() | OpenStream():
                return lambda error: self._reply(message, self._runs.fault_message(error))
            case _:
                run_id = getattr(message, "run_id", "")
        return functools.partial(self._runs.faulted, run_id) if run_id else None

    def _execute(self, message: Order, frames: Sequence[bytes]) -> None:
        match message:
            case Launch():
                self._reports.begin(message.spec.run_id, message.number)
                self._hold_locks(message.spec.run_id, message.locks)
                self._launches.launch(self._far.prepare_run(message), frames)
            case UnreadableLaunch():
                self._reports.begin(message.run_id, message.number)
                self._hold_locks(message.run_id, message.locks)
                self._runs.refuse(message)
            case WarmZygote():
                # with other settings, the notebook's Python does not exist on this node
                if self._settings.environments == "auto":
                    self._groups.warm(message.interpreter, 0 if self._runs.busy else message.ranks)
            case BuildEnvironment():
                self._environments.prepare(message.run_id, message.environment)
            case TakeInventory():
                faults.in_background(self._introduction.inventory_again())
            case EventsKept():
                self._reports.confirmed(message.run_id, message.number)
            case Adopt():
                self._reports.adopt(message.run_id, message.number)
                if (run := self._runs.get(message.run_id)) is not None:
                    run.on_order(message, frames)
            case OfferLine():
                self._lines.offer(message)
            case OpenStream():
                self._run_ports.opens(message)
            case StreamData() | StreamTaken() | StreamEnded() | StreamClosed():
                self._run_ports.on_message(message, frames)
            case BlobFetched() | RunFileStored():
                self._file_requests.answered(message, frames)
            case EndAgent():
                self._stop("the pool was stopped")
            case RelaySignal(number=number):
                self._relay(number)
            case Question() | RestartSessionRanks():
                self._ask_session(message)
            case _:
                run = self._runs.get(message.run_id)
                if run is not None:
                    self._execute_for(run, message, frames)
                elif isinstance(message, EndRun):
                    # the run ended in the queue
                    self._environments.release(message.run_id)

    def _execute_for(self, run: NodeRun, message: Order, frames: Sequence[bytes]) -> None:
        match message:
            case EndRun():
                self._runs.end(run, message.state, message.reason, message.limit)
            case TakeStacks(request=request, run_id=run_id):
                run.take_stacks(lambda stacks: self._send(StacksTaken(request=request, run_id=run_id, stacks=stacks)))
            case _:
                run.on_order(message, frames)

    def _ask_session(self, message: Question | RestartSessionRanks) -> None:
        session = self._runs.session(message.session)
        if session is None:
            self._reply(message, "there is no such session")
        elif isinstance(message, RestartSessionRanks):
            session.restart(message.ranks, functools.partial(self._reply, message))
        else:
            request = message.request
            session.ask(request, message.question, lambda answer: self._send(Answered(request=request, answer=answer)))

    def _reply(self, message: Question | RestartSessionRanks | OpenStream, problem: str | None) -> None:
        """Answer a request with why it failed, None for success."""
        match message:
            case Question(request=request):
                self._send(Answered(request=request, answer=RankAnswer(problem=problem)))
            case RestartSessionRanks(request=request, session=session):
                self._send(SessionRanksRestarted(request=request, session=session, problem=problem))
            case OpenStream(stream=stream):
                self._send(StreamClosed(stream=stream, problem=problem))

    def _ranks_gone(self, run_id: str) -> None:
        self._inputs.release(run_id)
        self._lines.session_gone(run_id)

    def _hold_locks(self, run_id: str, count: int) -> None:
        if count and self._pool is not None:
            self._runs.hold_locks(run_id, self._pool.take_descriptors(count))

    # ------------------------------------------------------------ housekeeping

    def _tidy(self) -> None:
        self._housekeeping = self._loop.call_later(_HOUSEKEEPING_S, self._tidy)
        preload = functools.partial(self._groups.preloaded.tend, is_busy=self._runs.busy)
        for tend in (self._groups.tend, preload, self._environments.tend, self._lines.report_now):
            with faults.guarded(None):
                tend()

    def _reap(self) -> None:
        """Reap zygotes and, as a subreaper, the orphans of dead zygotes."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            with faults.guarded(None):
                self._groups.zygotes.reaped(pid, os.waitstatus_to_exitcode(status))
            self._successor.reaped(pid)

    def close(self) -> None:
        """End every rank and zygote on this node. Nothing outlives the agent."""
        self._housekeeping.cancel()
        # the loop closes its wake-up socket before it removes signal handlers, and many children end now
        for number in (signal.SIGCHLD, *_STOP_SIGNALS, *_RELAYED_SIGNALS):
            self._loop.remove_signal_handler(number)
        # ignored only from here on, since everything that is left is ended at once
        for number in (*_STOP_SIGNALS, *_RELAYED_SIGNALS):
            signal.signal(number, signal.SIG_IGN)
        with faults.guarded(None):
            self._orphaned.stop()
            self._run_ports.close()
            self._socket.close()
            if self._session_socket is not None:
                self._session_socket.close()
            self._lines.close()
            if self._pool is not None:
                self._pool.close()
        for run in self._runs.all():
            if not isinstance(run, SessionCell):
                with faults.guarded(None):
                    extensions.ray_directories().remove(run.run_id, self._settings)
        zygotes, code = self._groups.zygotes, self._inputs.code
        for part in (zygotes, self._environments, self._copier, self._far, self._sampling, code):
            with faults.guarded(None):
                part.close()


async def run(sock: socket.socket, settings: Settings, lifeline: int = -1) -> None:
    """Run the agent until it is told to end, or no pool service and no run needs it any more."""
    raise_open_files_limit()
    (settings.state_path / "logs").mkdir(mode=0o700, parents=True, exist_ok=True)
    asyncio.get_running_loop().set_exception_handler(faults.handle_exception)
    agent = Agent(sock, settings, lifeline)
    try:
        await agent.finished
    finally:
        agent.close()
