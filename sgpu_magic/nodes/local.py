"""The local engine: this machine as the only node, its agent process, and device locks shared with other pools."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import msgspec

from sgpu_magic import extensions
from sgpu_magic.agent.ranks import run_processes
from sgpu_magic.config import Settings
from sgpu_magic.nodes.device_locks import DeviceLocks, DevicesLocked
from sgpu_magic.nodes.distributed_run import HERE
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.nodes.engine_reports import EngineListener
from sgpu_magic.nodes.lock_obstacle import Obstacle
from sgpu_magic.system import child_process, processes
from sgpu_magic.system.message_stream import MessageStream
from sgpu_magic.wire import codec
from sgpu_magic.wire.attachments import Environment
from sgpu_magic.wire.base import Record, RunLimit, RunState
from sgpu_magic.wire.client import Warm
from sgpu_magic.wire.devices import Device, Inventory, Lease
from sgpu_magic.wire.events import RanksStarted
from sgpu_magic.wire.node import (
    AgentReady,
    BuildEnvironment,
    EndAgent,
    EndRun,
    FromAgent,
    Launch,
    OfferLine,
    RunEvent,
    ToAgent,
    WarmZygote,
)
from sgpu_magic.wire.option_text import Text
from sgpu_magic.wire.pool_status import PROTOCOL_VERSION, agent_socket_file, session_socket_file
from sgpu_magic.wire.run import Interpreter

# pauses between attempts to start an agent when the system can't start a process
_AGAIN_S = (1.0, 2.0, 5.0, 10.0)
# the engine gives up after this many agents in a row that exit within this time without having started a run
_SHORT_LIFE_S = 5.0
_SHORT_LIVES = 3
_CONNECT_S = 1.0
# a client that stops the pool waits longer (`client.this_machine`)
_END_S = 5.0
# an agent that outlived its service sends its `AgentReady` within milliseconds, or seconds where drivers are slow;
# clients wait longer for the pool's replies
_ANSWER_TIMEOUT_S = 8.0
_POLL_S = 0.005


class LocalEngine(Engine):
    """Takes over the agent that a killed service left behind, with its runs; replaces an agent that dies.

    Args:
        settings: The pool's settings.
        agent: The agent. It is started or found before this engine, so that its zygote imports torch meanwhile.
        warm: The interpreter that a new agent prewarms, None for none.
    """

    far = False
    come_and_go = False

    def __init__(self, settings: Settings, agent: LocalAgent, warm: Warm | None = None) -> None:
        super().__init__(settings, "local")
        self._locks = DeviceLocks(settings.lock_path)
        self._warm = warm
        self._awaited = {HERE}
        self._agent = agent
        self._agent_since = time.monotonic()
        self._agent_has_worked = False
        self._short_lives = 0
        self._tries = 0
        self._again: asyncio.TimerHandle | None = None
        # imported now: an agent that dies may leave this machine without the memory or descriptors for it
        self._ray_directories = extensions.ray_directories()

    def start(self, listener: EngineListener) -> None:
        super().start(listener)
        self._agent.listen(self._on_message, self._agent_lost)
        if self._agent.is_adopted:
            asyncio.get_running_loop().call_later(_ANSWER_TIMEOUT_S, self._replace_if_silent, self._agent)

    def _replace_if_silent(self, agent: LocalAgent) -> None:
        """End an adopted agent that has not sent `AgentReady`: it is stopped or hangs. Its end starts the next one."""
        if agent is self._agent and HERE not in self._channels:
            processes.write_log(
                f"the agent of an earlier pool service (process {agent.pid}) did not answer within "
                f"{_ANSWER_TIMEOUT_S:.0f} s; it is ended and replaced\n"
            )
            agent.kill()

    @property
    def agent_pid(self) -> int | None:
        return self._agent.pid or None

    def prepare(self, run_id: str, interpreter: Interpreter, environment: Environment) -> None:
        if self.builds(interpreter, environment):
            self._agent.send(BuildEnvironment(run_id=run_id, interpreter=interpreter, environment=environment))

    def end_run(self, run_id: str, state: RunState, reason: Text, limit: RunLimit | None = None) -> None:
        if run_id not in self._runs:
            # the run is still queued, but its environment may be under construction
            self._agent.send(EndRun(run_id=run_id, state=state, reason=reason, limit=limit))
        super().end_run(run_id, state, reason, limit)

    def offer_line(self, session: str, token: bytes) -> str:
        if (run := self._runs.get(session)) is None or run.has_ended:
            return ""
        self._agent.send(OfferLine(session=session, token=token))
        return str(session_socket_file(self._settings.runtime_path))

    def close(self) -> None:
        self._channels.clear()
        if self._again is not None:
            self._again.cancel()
        super().close()
        graces = [run.launch.spec.grace_s for run in self._runs.values() if not run.has_ended]
        own_s = self._settings.grace_s
        self._agent.close(max((own_s if grace_s is None else grace_s for grace_s in graces), default=0.0))
        self._locks.close()

    # ------------------------------------------------------------ devices

    def start_run(self, launch: Launch, frames: Sequence[bytes]) -> None:
        # devices locked already belong to an earlier run that is being wound up; this run inherits the locks
        uuids = [uuid for uuid in launch.lease.uuids if uuid not in self._locks.held]
        try:
            self._locks.acquire(uuids)
        except DevicesLocked as error:
            self.refuse_lease(launch.spec.run_id, tuple(error.obstacles), error.message)
        else:
            self.start_parts(launch, frames)

    def lease_free(self, run_id: str, lease: Lease) -> None:
        in_use = {uuid for other in self._leases.values() for uuid in other.uuids}
        self._locks.release([uuid for uuid in lease.uuids if uuid not in in_use])

    def inventory(self) -> Inventory | None:
        """The agent's inventory, with devices marked whose locks another pool holds or can't be used."""
        inventory = self._inventories.get(HERE)
        return None if inventory is None else marked_inventory(inventory, self._locks)

    def _send(self, node: str, order: ToAgent, frames: Sequence[bytes]) -> None:
        if isinstance(order, Launch) and not order.spec.session:
            # send the locks of the run's devices along
            locks = self._locks.descriptors(order.lease.uuids)
            self._agent.send(msgspec.structs.replace(order, locks=len(locks)), frames, locks)
        else:
            super()._send(node, order, frames)

    # ------------------------------------------------------------ the agent

    def _on_message(self, message: FromAgent, frames: Sequence[bytes]) -> None:
        match message:
            case AgentReady(protocol_version=version) if version != PROTOCOL_VERSION:
                # the agent was left by a service of another version: its runs can't be adopted
                self._agent.close()
                self._replace_agent()
                self._listener.nodes_lost("the agent on this machine had another version of sgpu-magic")
            case AgentReady(runs=runs):
                for held in runs:
                    locks = self._agent.take_descriptors(held.locks)
                    if locks and not held.have_ranks_exited:
                        self._locks.take_over(held.launch.lease.uuids, locks)
                self.on_node_connected(self._agent, message)
            case RunEvent(body=RanksStarted()):
                self._agent_has_worked = True
                self.on_node_message(HERE, message, frames)
            case _:
                self.on_node_message(HERE, message, frames)

    def _agent_lost(self) -> None:
        self._agent.clean_up_after(self._on_agent_exit)

    def _on_agent_exit(self) -> None:
        lost = [run for run in self._runs.values() if not run.has_ended]
        for run in lost:
            if not run.launch.spec.in_session:
                # ranks of an agent that an earlier service started are not descendants of this process
                run_processes.kill_marked(run.run_id)
                self._ray_directories.remove(run.run_id, self._settings)
            run.joint.part_lost(0)
            run.has_ended = True
            self._ended.append(run)
            self._part_silent(run, 0)
        self._channels.pop(HERE, None)
        worked = self._agent_has_worked or time.monotonic() - self._agent_since >= _SHORT_LIFE_S
        self._short_lives = 0 if worked else self._short_lives + 1
        why = "the agent on this machine ended unexpectedly"
        if self._short_lives >= _SHORT_LIVES:
            self._listener.broken(f"{why} {_SHORT_LIVES} times in a row, right after it was started")
            return
        self._replace_agent()
        # the listener may restart some runs on the leases that they have
        self._listener.nodes_lost(why)
        for run in lost:
            if self._runs.get(run.run_id, run) is run:
                self.give_back(run.run_id)

    def _replace_agent(self) -> None:
        """Start another agent; if the system can't start one, report that and try again."""
        self._again = None
        try:
            self._agent = LocalAgent(self._settings, self._warm, find_earlier=False)
        except OSError as error:
            reason = child_process.start_error(error)
            why = f"the agent, which starts the ranks on this machine, can't be started ({reason})"
            self._listener.degraded(why)
            pause_s = _AGAIN_S[min(self._tries, len(_AGAIN_S) - 1)]
            self._tries += 1
            self._again = self._loop.call_later(pause_s, self._replace_agent)
            return
        self._tries = 0
        self._listener.degraded("")
        self._agent_since = time.monotonic()
        self._agent_has_worked = False
        self._agent.listen(self._on_message, self._agent_lost)


def marked_inventory(inventory: Inventory, locks: DeviceLocks) -> Inventory:
    """Return an inventory of this machine with devices marked whose locks others hold or can't be used."""
    real = [device.uuid for device in inventory.devices if not device.simulated]
    obstacles = locks.obstacles(real) if real else {}
    if not obstacles:
        return inventory
    devices = tuple(
        _marked(device, obstacles[device.uuid]) if device.uuid in obstacles else device for device in inventory.devices
    )
    return msgspec.structs.replace(inventory, devices=devices)


def _marked(device: Device, obstacle: Obstacle) -> Device:
    if obstacle.problem:
        return msgspec.structs.replace(device, unavailable=obstacle.problem)
    return msgspec.structs.replace(device, outside_use=f"leased by {obstacle.holder}")


class LocalAgent:
    """This machine's agent process and the stream to it (a `NodeChannel`).

    Args:
        settings: The pool's settings.
        warm: The interpreter that a new agent prewarms, None for none.
        find_earlier: Look for an agent that outlived a killed service first.
    """

    node = HERE

    def __init__(self, settings: Settings, warm: Warm | None = None, *, find_earlier: bool = True) -> None:
        self._settings = settings
        found = _find(settings) if find_earlier else None
        self._stream: MessageStream[FromAgent] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        if found is None:
            # settings are not passed as arguments: an address in them may contain a password
            command, order = [sys.executable, "-m", "sgpu_magic.agent"], msgspec.json.encode(settings)
            self._socket, self._child = child_process.start(command, order=order)
            self.pid = self._child.pid
            if warm is not None:
                self._socket.sendall(codec.frame(WarmZygote(interpreter=warm.interpreter, ranks=warm.ranks)))
        else:
            self._socket, self.pid = found

    def listen(self, on_message: Callable[[FromAgent, Sequence[bytes]], None], lost: Callable[[], None]) -> None:
        """Start to deliver messages. Needs a running loop.

        Args:
            on_message: Called with each message of the agent and its raw frames.
            lost: Called when the agent's socket is closed.
        """
        self._stream = MessageStream[FromAgent](self._socket, codec.from_agent, on_message, lost)

    @property
    def is_adopted(self) -> bool:
        """Whether an earlier pool service has started it."""
        return self._child is None

    def kill(self) -> None:
        """Kill the agent and everything below it."""
        if self.pid:
            processes.kill_tree(self.pid)

    def send(self, message: Record, frames: Sequence[bytes] = (), descriptors: Sequence[int] = ()) -> None:
        if self._stream is not None:
            self._stream.send(message, frames, descriptors)

    def take_descriptors(self, count: int) -> list[int]:
        """Return the file descriptors sent with the message that is being handled."""
        return self._stream.take_descriptors(count) if self._stream is not None else []

    def close(self, grace_s: float = 0.0) -> None:
        """Tell the agent to end its ranks and itself, and wait for its exit.

        Args:
            grace_s: Seconds that its ranks may take to end.
        """
        watch = _watch(self.pid)
        if self._stream is not None:
            self._stream.send(EndAgent())
            self._stream.close()
        else:
            with contextlib.suppress(OSError):
                self._socket.sendall(codec.frame(EndAgent()))
        self._socket.close()
        if self._child is None:
            _wait(watch, self.pid, _END_S + grace_s)
        else:
            child_process.wait_or_kill(self._child, _END_S + grace_s)
        if watch >= 0:
            os.close(watch)

    def clean_up_after(self, done: Callable[[], None]) -> None:
        """Kill and reap what an agent left below this process when it died; then call `done`."""
        if self._child is None:
            done()
            return
        self._child.kill()
        self._reap(self._child, asyncio.get_running_loop().time() + _END_S, done)

    def _reap(self, child: subprocess.Popen[bytes], give_up_at: float, done: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        if child.poll() is None and loop.time() < give_up_at:
            loop.call_later(_POLL_S, self._reap, child, give_up_at, done)
            return

        def ended() -> None:
            # the agent's descendants are dead, and so are its runs
            extensions.ray_directories().sweep(self._settings, ())
            done()

        child_process.end_adopted(ended)


def _find(settings: Settings) -> tuple[socket.socket, int] | None:
    path = agent_socket_file(settings.runtime_path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_CONNECT_S)
    try:
        connection.connect(str(path))
    except OSError:
        # no process listens there any more
        connection.close()
        path.unlink(missing_ok=True)
        return None
    peer = processes.peer_of(connection)
    return connection, peer.pid if peer is not None else 0


def _watch(pid: int) -> int:
    """A descriptor that becomes readable when the process exits, -1 if there is none."""
    if pid and hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return -1


def _wait(watch: int, pid: int, timeout_s: float) -> None:
    """Wait for the exit of an agent that this process has not started; then kill it and its descendants."""
    if watch < 0:
        return
    ready, _, _ = select.select([watch], [], [], timeout_s)
    if not ready:
        processes.kill_tree(pid)
        select.select([watch], [], [], _CONNECT_S)
