"""A pool of several nodes on this machine: a service whose engine has an agent for each node, with its own address.

    python tests/support/many_agents.py [far] <address>[@<network namespace>] ...

runs such a service for the home that its environment names. `ManyAgents` starts it for a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Generator, Sequence
from pathlib import Path

import msgspec
from homes import Home
from msgspec.structs import replace
from waiting import eventually

from sgpu_magic import config
from sgpu_magic.config import Settings
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.nodes.local import LocalAgent
from sgpu_magic.pool.lifecycle import PoolPresence
from sgpu_magic.system import processes
from sgpu_magic.wire.devices import Inventory
from sgpu_magic.wire.files import RunFileStored
from sgpu_magic.wire.node import AgentReady, EndAgent, FromAgent, ToAgent

NODE_PIDS = "node-pids.json"
_REAP_S = 0.2
_HEARD_S = 0.02


class AgentHere(LocalAgent):
    """An agent on this machine whose link can be cut."""

    def cut(self) -> None:
        """Cut the link. The agent continues, and the next service finds it."""
        if self._stream is not None:
            self._stream.close()
        self._socket.close()


class AgentChannel:
    """A `NodeChannel` to an agent on this machine.

    Args:
        node: The node's name.
        agent: Its agent.
        slow: Nodes whose files do not cross the network: the pool never confirms a part of one.
    """

    def __init__(self, node: str, agent: AgentHere, slow: Collection[str]) -> None:
        self.node = node
        self.agent = agent
        self._slow = slow

    def send(self, message: ToAgent, frames: Sequence[bytes] = ()) -> None:
        if not isinstance(message, EndAgent) and not (self.node in self._slow and isinstance(message, RunFileStored)):
            self.agent.send(message, frames)

    def close(self) -> None:
        """`NodesHere.close` ends the agents."""


class NodesHere(Engine):
    """Nodes `node-0`, `node-1` ..., each an agent on this machine.

    Args:
        settings: The pool's settings.
        places: Each node's address, followed by `@` and its network namespace if it has one.
        far: The nodes do not see the pool's files.
    """

    come_back_s = 3.0

    def __init__(self, settings: Settings, places: Sequence[str], *, far: bool = False) -> None:
        super().__init__(settings, "cluster")
        self.far = far
        self._own_addresses: dict[str, str] = {}
        self._namespaces: dict[str, str] = {}
        for number, context in enumerate(places):
            self._own_addresses[f"node-{number}"], _, self._namespaces[f"node-{number}"] = context.partition("@")
        self._agents: dict[str, AgentHere] = {}
        self._came: set[str] = set()
        self._slow: set[str] = set()

    def begin(self) -> None:
        for node in self._own_addresses:
            self._start(node, look=True)
        self._tell_pids()
        self._reap()

    def inventory(self) -> Inventory | None:
        if self._came != set(self._agents):
            return None
        found = super().inventory()
        assert found is not None
        nodes = tuple(msgspec.structs.replace(node, host=node.node) for node in found.nodes)
        return msgspec.structs.replace(found, nodes=nodes)

    def close(self) -> None:
        super().close()
        for agent in self._agents.values():
            agent.close()

    def _start(self, node: str, *, look: bool) -> None:
        state = self._settings.state_path / "nodes" / node
        # a socket's path ends at 108 bytes
        runtime = self._settings.runtime_path / node[-1]
        for directory in (state, runtime, state / "runs"):
            config.private_dir(directory)
        # a listening pool is restarted by its operator: the agents start no pool service
        own = replace(self._settings, state_dir=str(state), runtime_dir=str(runtime), listen="tcp://127.0.0.1:0")
        with _inside(self._namespaces[node]):
            agent = self._agents[node] = AgentHere(own, find_earlier=look)
        channel = AgentChannel(node, agent, self._slow)

        def sent(message: FromAgent, frames: Sequence[bytes]) -> None:
            if isinstance(message, AgentReady):
                self._came.add(node)
                named = msgspec.structs.replace(message.inventory, host=node)
                self.on_node_connected(
                    channel, msgspec.structs.replace(message, inventory=named), self._own_addresses[node]
                )
            else:
                self.on_node_message(node, message, frames)

        def lost() -> None:
            del self._agents[node]
            self._came.discard(node)
            self.node_lost(node, "its agent has ended")
            self._tell_pids()

        agent.listen(sent, lost)

    def _reap(self) -> None:
        """Reap the orphans of dead agents; living agents are waited for by the code that started them."""
        known = {agent.pid for agent in self._agents.values()}
        for pid in processes.descendants(os.getpid()):
            if pid not in known:
                with contextlib.suppress(OSError):
                    os.waitpid(pid, os.WNOHANG)
        self._loop.call_later(_REAP_S, self._reap)

    def execute_order(self, line: str) -> None:
        """Execute an order: `cut`, `lose` or `bring` a node, or make its files `slow` or `quick`."""
        order, node = line.split()
        match order:
            case "slow":
                self._slow.add(node)
            case "quick":
                self._slow.discard(node)
            case "cut":
                self._agents.pop(node).cut()
            case "lose":
                self._agents.pop(node).cut()
                self._came.discard(node)
                self.node_lost(node, "the test gave it up")
            case _ if node in self._agents:
                # the agent is dead, but its end is not reported yet
                if not processes.is_alive(self._agents[node].pid):
                    self._loop.call_later(_HEARD_S, self.execute_order, line)
            case _:
                self._start(node, look=True)
                self._tell_pids()

    def _tell_pids(self) -> None:
        text = json.dumps({node: agent.pid for node, agent in self._agents.items()})
        draft = self._settings.state_path / f"{NODE_PIDS}.new"
        draft.write_text(text)
        os.replace(draft, self._settings.state_path / NODE_PIDS)


class ManyAgents:
    """The service of a home, in its own process.

    Args:
        home: Its home; a client there finds the running pool.
        nodes: Number of nodes, at 127.0.0.1, 127.0.0.2 ...
        far: The nodes do not see the pool's files: all files are transferred over their channels.
        places: As in `NodesHere`, instead of `nodes`.
    """

    def __init__(self, home: Home, nodes: int = 2, *, far: bool = False, places: Sequence[str] = ()) -> None:
        self.home = home
        self.nodes = len(places) or nodes
        self._places = places or [f"127.0.0.{number + 1}" for number in range(nodes)]
        self.far = far
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with open(self.home.state / "pool.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, __file__, *(["far"] if self.far else []), *self._places],
                env=self.home.environ | {"PYTHONPATH": str(Path(__file__).parent)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        eventually(
            lambda: process.poll() is not None or self.home.pool_pid() == process.pid,
            30,
            "the pool does not come up",
        )
        assert process.poll() is None, (self.home.state / "pool.log").read_text()
        return process

    def agent_pid(self, node: int) -> int:
        return json.loads((self.home.state / NODE_PIDS).read_bytes())[f"node-{node}"]

    def order(self, what: str, node: int) -> None:
        """`cut` a node's link, `lose` the node, or `bring` it (back), with its agent if that is alive.

        `slow`: its files do not cross the network until it is `quick` again and its agent, or another service,
        connects.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} node-{node}\n".encode())
        self.process.stdin.flush()

    def kill_agent(self, node: int) -> None:
        os.kill(self.agent_pid(node), signal.SIGKILL)

    def kill(self) -> None:
        """Send SIGKILL to the service; its agents stay."""
        self.process.kill()
        self._wait()

    def restart(self) -> None:
        """Start the service again."""
        self.process = self._start()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self._wait()

    def _wait(self) -> None:
        self.process.wait(15)
        if self.process.stdin is not None:
            self.process.stdin.close()


@contextlib.contextmanager
def _inside(namespace: str) -> Generator[None]:
    """Start processes of the block in this network namespace; the thread must do nothing else meanwhile."""
    if not namespace:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as own, open(f"/run/netns/{namespace}") as other:
        if libc.setns(other.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
        try:
            yield
        finally:
            libc.setns(own.fileno(), 0)


def _execute_orders(engine: NodesHere) -> None:
    """Execute orders from the test. They are short and arrive in one piece."""
    text = os.read(0, 4096).decode()
    for line in text.splitlines():
        engine.execute_order(line)
    if not text:
        asyncio.get_running_loop().remove_reader(0)


def main() -> None:
    processes.become_subreaper()
    settings = replace(config.load_settings(), pool="local")
    for path in (settings.runtime_path, settings.state_path, settings.runs_path):
        config.private_dir(path)
    presence = PoolPresence(settings.runtime_path, settings.state_path)

    async def serve() -> None:
        from sgpu_magic.pool.service import PoolService

        far = "far" in sys.argv
        engine = NodesHere(settings, sys.argv[2 if far else 1 :], far=far)
        engine.begin()
        asyncio.get_running_loop().add_reader(0, lambda: _execute_orders(engine))
        service = PoolService(settings, presence, engine)
        presence.announce()
        try:
            await service.finished
        finally:
            service.close()

    asyncio.run(serve())
    processes.end_children()


if __name__ == "__main__":
    main()
