"""A node's uplink with a real agent, and the pool's listener: what it awaits, and what continues meanwhile."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from agent_process import launch_order
from process_table import is_alive, process_table

from sgpu_magic.config import Settings
from sgpu_magic.nodes.ray import agent_listener, uplink
from sgpu_magic.nodes.ray.agent_listener import AgentListener, NodeLink
from sgpu_magic.nodes.ray.uplink import AgentOrder, Uplink
from sgpu_magic.system.secure_sockets import new_key_pair
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.node import Adopt, AgentReady, FromAgent, Launch, RunEvent
from sgpu_magic.wire.rank_events import OutputWritten

# a loop on a busy machine may be late; one that blocks on its agent is late by 15 s
MOST_WAIT_S = 3.0
# a third of the link's defaults: a test waits until the link is silent
BEAT_S, SILENT_S = 0.3, 1.2
UNTIL_OVER = """
import os, time
print('here', flush=True)
while not os.path.exists({over!r}): time.sleep(0.02)
print('whole')
"""


class Node:
    """A pool's listener and a node behind it, in one loop.

    Attributes:
        ready: The first words of the agent.
        events: Of its run.
        lost: What the listener has said of the node's end.
        longest_s: The longest time for which the loop did nothing else.
    """

    def __init__(self, context: Path) -> None:
        self.ready: list[AgentReady] = []
        self.lost: list[tuple[str, str, bool]] = []
        self.longest_s = 0.0
        self.events: list[RunEvent] = []
        self.context = context
        self._link: NodeLink | None = None
        self._pool, self._keys = new_key_pair(), new_key_pair()
        self.listener = self._listen("tcp://127.0.0.1:0")
        state, runtime, locks = (context / name for name in ("state", "run", "lock"))
        for folder in (state, runtime, locks):
            folder.mkdir(mode=0o700)
        settings = Settings(state_dir=str(state), runtime_dir=str(runtime), lock_dir=str(locks))
        order = AgentOrder(
            node="n1",
            prefix="p",
            namespace="n",
            address=self.listener.address,
            server_key=self._pool.public,
            public=self._keys.public,
            secret=self._keys.secret,
            settings=msgspec.json.encode(settings),
        )
        lock = os.open(context / "uplink.lock", os.O_RDWR | os.O_CREAT, 0o600)
        self.uplink = Uplink(order, lock)
        os.close(lock)

    @property
    def between(self) -> int:
        """The process between the uplink and the agent."""
        own = [process for process in process_table().values() if process.parent == os.getpid()]
        (pid,) = [process.pid for process in own if "agent_main.py" in process.command]
        return pid

    @property
    def printed(self) -> str:
        """The run's output so far."""
        return "".join(event.body.text for event in self.events if isinstance(event.body, OutputWritten))

    def launch(self, body: str) -> str:
        """Order a run of one rank and return its id."""
        order, payload = launch_order(self.context / "state", body, ranks=1)
        self.say(order, payload)
        return order.spec.run_id

    def adopt(self, run_id: str) -> None:
        """Take over a run, as the next pool service does; its events so far are known."""
        self.say(Adopt(run_id=run_id, number=len(self.events)))

    def say(self, order: Launch | Adopt, *frames: bytes) -> None:
        assert self._link is not None
        self._link.send(order, frames)

    def shut(self) -> None:
        """Stop listening at the pool."""
        if self._is_open:
            self._is_open = False
            self.listener.close()

    def listen_again(self) -> None:
        self.listener = self._listen(self.listener.address)

    def _listen(self, address: str) -> AgentListener:
        listener = AgentListener(address, self._pool, self._on_message, self._lost)
        self._is_open = True
        listener.admit({self._keys.public: "n1"})
        return listener

    def _on_message(self, link: NodeLink, message: FromAgent, frames: Sequence[bytes]) -> None:
        if isinstance(message, AgentReady):
            self._link = link
            self.ready.append(message)
        elif isinstance(message, RunEvent):
            self.events.append(message)

    def _lost(self, node: str, why: str, silent: bool) -> None:
        self.lost.append((node, why, silent))

    async def until(self, condition: Callable[[], object], within_s: float = 30.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {within_s:g} s"
            began = time.monotonic()
            await asyncio.sleep(0.02)
            self.longest_s = max(self.longest_s, time.monotonic() - began)

    async def silence(self) -> None:
        """Wait long enough that a silent side is considered lost."""
        began = time.monotonic()
        await self.until(lambda: time.monotonic() - began > SILENT_S + 2 * BEAT_S)


@pytest.fixture(autouse=True)
def quick_link(monkeypatch: pytest.MonkeyPatch) -> None:
    for end in (uplink, agent_listener):
        monkeypatch.setattr(end, "BEAT_S", BEAT_S)
        monkeypatch.setattr(end, "SILENT_S", SILENT_S)
    monkeypatch.setattr(agent_listener, "_TICK_S", BEAT_S / 2)
    monkeypatch.setattr(agent_listener, "_STARVED_S", BEAT_S)


@asynccontextmanager
async def node_that_is_up() -> AsyncGenerator[Node]:
    # a short path: socket paths are limited to 108 bytes
    context = Path(tempfile.mkdtemp(prefix="sgu"))
    node = Node(context)
    try:
        await node.until(lambda: node.ready)
        node.longest_s = 0.0
        yield node
        if not node.uplink.finished.done():
            node.uplink.end()
        await node.until(node.uplink.finished.done)
    finally:
        node.uplink.close()
        node.shut()
        shutil.rmtree(context)


def test_the_link_goes_on_while_the_end_of_its_agent_is_awaited():
    async def work() -> None:
        async with node_that_is_up() as node:
            between, agent = node.between, node.ready[0].pid
            os.kill(between, signal.SIGSTOP)
            try:
                # its socket is closed, but the uplink's child process has not ended
                os.kill(agent, signal.SIGKILL)
                await node.silence()
                assert node.lost == []
                assert not node.uplink.finished.done()
                assert node.longest_s < MOST_WAIT_S
            finally:
                os.kill(between, signal.SIGCONT)
            await node.until(lambda: node.lost)
            assert node.lost == [("n1", "its agent was killed by SIGKILL", False)]
            assert node.uplink.finished.result() == "its agent was killed by SIGKILL"

    asyncio.run(work())


@pytest.mark.slow
def test_an_agent_that_does_not_end_is_killed():
    async def work() -> None:
        async with node_that_is_up() as node:
            agent = node.ready[0].pid
            os.kill(agent, signal.SIGSTOP)
            node.uplink.end()
            began = time.monotonic()
            await node.until(node.uplink.finished.done)
            assert time.monotonic() - began > 14
            assert node.longest_s < MOST_WAIT_S
            os.kill(agent, signal.SIGKILL)

    asyncio.run(work())


@pytest.mark.slow
def test_an_agent_with_a_run_waits_where_the_pool_takes_nothing_and_tells_all_of_it_afterwards():
    async def work() -> None:
        async with node_that_is_up() as node:
            agent, over = node.ready[0].pid, node.context / "over"
            run_id = node.launch(UNTIL_OVER.format(over=str(over)))
            await node.until(lambda: "here" in node.printed)
            node.shut()
            over.touch()
            await node.silence()
            assert node.longest_s < MOST_WAIT_S
            assert not node.uplink.finished.done()
            assert is_alive(agent)
            node.listen_again()
            await node.until(lambda: len(node.ready) == 2)
            assert (node.ready[1].pid, [held.launch.spec.run_id for held in node.ready[1].runs]) == (agent, [run_id])
            node.adopt(run_id)
            await node.until(lambda: isinstance(node.events[-1].body, RunEnded))
            assert node.printed == "here\nwhole\n"
            assert [event.number for event in node.events] == list(range(1, len(node.events) + 1))
            assert node.lost == []

    asyncio.run(work())
