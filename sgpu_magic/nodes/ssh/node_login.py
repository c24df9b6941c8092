"""The login to one node, made again when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import NamedTuple, Protocol

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.errors import KeyRefused, PoolError
from sgpu_magic.nodes.ssh.link import AgentEnded, Carried, DevicesLocked, FromNode, NodeLink, NodeOrder, from_node
from sgpu_magic.ssh.login import FarProgram, Login
from sgpu_magic.ssh.machines import Machine
from sgpu_magic.wire import codec
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.node import FromAgent, ToAgent

_PROGRAM = FarProgram("sgpu_magic.nodes.ssh.node_end")
# ssh ends when the machine has not answered for three times as long
_ALIVE_S = 3
_SSH_OPTIONS = f"-o ServerAliveInterval={_ALIVE_S} -o ServerAliveCountMax=3 -o TCPKeepAlive=yes"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
# a machine that refuses the key may ban those who come too often
_REFUSED_PAUSE_S = 120.0
# the agent's own time to end its ranks comes on top
_END_S = 12.0
_FLUSH_S = 1.0
# what ssh writes to its standard error must not fill the pipe
_DRAIN_S = 10.0
_AGENT_ENDED = "its agent ended unexpectedly"


class NodeListener(Protocol):
    """The engine, as its logins see it. Called in the loop's thread."""

    def on_agent_message(self, node: NodeLogin, message: FromAgent, frames: Sequence[bytes]) -> None: ...
    def on_devices_locked(self, node: NodeLogin, answer: DevicesLocked) -> None: ...

    def login_failed(self, node: NodeLogin, why: str) -> None:
        """No login could be made, or no agent be started there; it is tried again. `why` is in sentences."""
        ...

    def link_lost(self, node: NodeLogin, why: str) -> None:
        """The link has ended; the agent goes on, unless `why`, a clause, says that it has ended."""
        ...


class NodePlace(NamedTuple):
    """Where a node is.

    Args:
        pool: The pool's name, for the node's directories.
        machine: Where to log in; its name is the node's id.
        command: The command that does, in place of ssh; None for ssh.
    """

    pool: str
    machine: Machine
    command: Sequence[str] | None


class NodeLogin:
    """The login to one node, from the first one to the end of the pool. Use it from the loop's thread only.

    Args:
        place: Where it is.
        settings: The pool's settings.
        threads: Runs what blocks.
        listener: The engine.

    Attributes:
        node: The node's id.
        link: The current link; None while there is none.
        address: The address at which the first machine reaches this one, once known; "" on the first machine.
        first_address: The address at which this one reaches the first machine, likewise.
    """

    def __init__(self, place: NodePlace, settings: Settings, threads: Executor, listener: NodeListener) -> None:
        machine = place.machine
        self.node = machine.name
        self._pool, self._command = place.pool, place.command
        self._machine = msgspec.structs.replace(machine, ssh_command=f"{machine.ssh_command} {_SSH_OPTIONS}")
        self._settings = settings
        self._threads = threads
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._over = False
        self._login: Login | None = None
        self.link: AgentChannel | None = None
        self.address = self.first_address = ""
        self._task = self._loop.create_task(self._keep())
        self._task.add_done_callback(self._on_end)

    def send(self, message: Record) -> None:
        """Send a message for the node's end of the link."""
        if self.link is not None:
            self.link.send_to_node(message)

    def stop(self) -> None:
        """Make no further login."""
        self._over = True
        self._task.cancel()

    def wait(self, grace_s: float) -> None:
        """Wait until the node's agent has ended, as it was told, and end the login. Blocks; for another thread.

        Args:
            grace_s: Seconds that its ranks may take to end.
        """
        if self._login is not None:
            self._login.close(_END_S + grace_s)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            text = f"No further login to {self.node} is made"
            self._loop.call_exception_handler({"message": text, "exception": error})

    async def _keep(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._over:
            try:
                self._login = login = await self._loop.run_in_executor(self._threads, self._log_in)
            except (PoolError, OSError) as error:
                self._listener.login_failed(self, str(error))
                await asyncio.sleep(_REFUSED_PAUSE_S if isinstance(error, KeyRefused) else pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            found = login.result.split()
            self.first_address, self.address = found if len(found) == 2 else ("", "")
            self.link = link = AgentChannel(self, login, self._listener)
            link.send_to_node(self._order())
            while not link.ended.done():
                await asyncio.wait([link.ended], timeout=_DRAIN_S)
                login.drain_errors()
            self.link = None
            link.close()
            await self._loop.run_in_executor(self._threads, login.close)
            self._login = None
            self._listener.link_lost(self, link.ended.result())
            pause_s = _FIRST_PAUSE_S if link.has_worked else min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    def _order(self) -> NodeOrder:
        settings, is_first = msgspec.json.encode(self._settings), self._command is not None
        return NodeOrder(settings=settings, pool=self._pool, node=self.node, is_first=is_first)

    def _log_in(self) -> Login:
        return Login(self._machine, _PROGRAM, lambda word, text: None, lambda: self._over, command=self._command)


class AgentChannel:
    """The link to a node's agent over one login (a `NodeChannel`).

    Args:
        login: The login to the node.
        streams: Its streams.
        listener: The engine.

    Attributes:
        node: The node's id.
        ended: Done when the link has ended: with why the agent has, a clause, or "" if only the link has.
        has_worked: Whether the agent has sent something.
    """

    def __init__(self, login: NodeLogin, streams: Login, listener: NodeListener) -> None:
        self.node = login.node
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.has_worked = False
        self._login = login
        self._listener = listener
        self._link = NodeLink[FromNode](
            streams.reading, streams.writing, streams.stream, from_node, self._on_message, lambda: self._end("")
        )

    def send(self, message: ToAgent, frames: Sequence[bytes] = ()) -> None:
        self._link.send(Carried(), [codec.encode(message), *frames])

    def send_to_node(self, message: Record) -> None:
        """Send a message for the node's end of the link."""
        self._link.send(message)

    def close(self) -> None:
        self._link.send_all(_FLUSH_S)
        self._link.close()
        self._end("")

    def _end(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(why)

    def _on_message(self, message: FromNode, parts: Sequence[bytes]) -> None:
        match message:
            case Carried():
                self.has_worked = True
                self._listener.on_agent_message(self._login, codec.from_agent.decode(parts[0]), parts[1:])
            case DevicesLocked():
                self._listener.on_devices_locked(self._login, message)
            case AgentEnded(why=why):
                self._end(why or _AGENT_ENDED)
