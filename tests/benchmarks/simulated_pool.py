"""A pool service whose nodes are simulated in its own process: all else is as it is, its clients too.

    python -m tests.benchmarks.simulated_pool <gpus>

serves the pool of the settings that its environment names. It obeys lines on its standard input: `emit 1000` lets the
runs that have devices print so many lines in a second, and 5 of them end; `halt` stops that, and prints how many
lines there were. What makes the lines runs in the process that is measured: its share is counted against the pool.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence

from sgpu_magic import config
from sgpu_magic.config import Settings
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.lifecycle import PoolPresence
from sgpu_magic.pool.service import PoolService
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.devices import Device, Inventory
from sgpu_magic.wire.events import RanksStarted, RunEnded
from sgpu_magic.wire.node import AgentReady, EndRun, Launch, RanksGone, RunEvent, ToAgent
from sgpu_magic.wire.pool_status import PROTOCOL_VERSION
from sgpu_magic.wire.rank_events import OutputWritten
from tests.benchmarks.simulation import cluster

LINE = "step 1200  loss 0.4213  lr 3.0e-4  tokens/s 51200  memory 61.2 GB\n"
ENDS_PER_S = 5.0
_TICK_S = 0.02
_POLL_S = 0.05


class _Part:
    """One node's part of a run, and how far it has come."""

    def __init__(self, launch: Launch) -> None:
        self.run_id = launch.spec.run_id
        self.first_rank = launch.part.first_rank if launch.part is not None else 0
        self.number = launch.number
        self.written = 0


class SimulatedNode:
    """A `NodeChannel` to nothing: ranks start when they are ordered to, and print when they are told to."""

    def __init__(self, node: str, engine: SimulatedNodes) -> None:
        self.node = node
        self._engine = engine
        self._parts: dict[str, _Part] = {}

    def send(self, message: ToAgent, frames: Sequence[bytes] = ()) -> None:
        match message:
            case Launch():
                part = self._parts[message.spec.run_id] = _Part(message)
                self._engine.soon(self._started, part)
            case EndRun(run_id=run_id, state=state) if run_id in self._parts:
                self._engine.soon(self.end, run_id, state)
            case _:
                pass

    def close(self) -> None:
        """Nothing is open."""

    def print_line(self, run_id: str) -> None:
        part = self._parts[run_id]
        start = part.written
        part.written += len(LINE)
        self._say(part, OutputWritten(rank=part.first_rank, stream="stdout", text=LINE, start=start, end=part.written))

    def end(self, run_id: str, state: RunState) -> None:
        part = self._parts.pop(run_id, None)
        if part is not None:
            self._say(part, RunEnded(state=state))
            self._engine.on_node_message(self.node, RanksGone(run_id=run_id))

    def _started(self, part: _Part) -> None:
        self._engine.begun.setdefault(part.run_id, []).append(self)
        self._say(part, RanksStarted(pids=(), warm="simulated"))

    def _say(self, part: _Part, body: OutputWritten | RanksStarted | RunEnded) -> None:
        part.number += 1
        self._engine.on_node_message(
            self.node, RunEvent(run_id=part.run_id, number=part.number, at=time.time(), body=body)
        )


class SimulatedNodes(Engine):
    """The real engine of many nodes, with simulated ones.

    Attributes:
        begun: By run that has devices, its nodes.
        sent: Lines that were printed.
    """

    far = False

    def __init__(self, settings: Settings, gpus: int) -> None:
        super().__init__(settings, "simulated")
        self.begun: dict[str, list[SimulatedNode]] = {}
        self.sent = 0
        self._rate = 0.0
        self._since = 0.0
        self._printed = 0
        self._ends_done = 0
        self._timer: asyncio.TimerHandle | None = None
        self._looking = False
        everything = cluster(gpus)
        devices: dict[str, list[Device]] = {}
        for device in everything.devices:
            devices.setdefault(device.node, []).append(device)
        for node in everything.nodes:
            own = Inventory(host=node.host, devices=tuple(devices[node.node]), cpu_slots=64, cores=64)
            ready = AgentReady(pid=1, protocol_version=PROTOCOL_VERSION, inventory=own)
            self.on_node_connected(SimulatedNode(node.node, self), ready, node.address)

    def take_inventory(self) -> None:
        """All nodes are looked at at once, as Ray's engine does."""
        if not self._looking:
            self._looking = True
            self._loop.call_later(_POLL_S, self._looked)

    def _looked(self) -> None:
        self._looking = False
        self.inventory_changed()

    def soon(self, call: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon(call, *arguments)

    def obey(self, line: str) -> None:
        """`emit RATE` or `halt`."""
        order, _, rate = line.strip().partition(" ")
        if order == "emit":
            self._rate, self._since, self._printed, self._ends_done = float(rate), time.monotonic(), 0, 0
            self._tick()
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None
            sys.stdout.write(f"sent {self.sent}\n")
            sys.stdout.flush()

    def _tick(self) -> None:
        elapsed = time.monotonic() - self._since
        while self._ends_done < elapsed * ENDS_PER_S and self.begun:
            self._ends_done += 1
            run_id, nodes = next(iter(self.begun.items()))
            del self.begun[run_id]
            for node in nodes:
                node.end(run_id, RunState.SUCCEEDED)
        runs = list(self.begun.items())
        while self._printed < elapsed * self._rate and runs:
            run_id, nodes = runs[self._printed % len(runs)]
            nodes[self._printed % len(nodes)].print_line(run_id)
            self._printed += 1
            self.sent += 1
        self._timer = self._loop.call_later(_TICK_S, self._tick)


async def _serve(gpus: int) -> None:
    settings = config.load_settings()
    for path in (settings.runtime_path, settings.state_path, settings.runs_path):
        config.private_dir(path)
    presence = PoolPresence(settings.runtime_path, settings.state_path)
    engine = SimulatedNodes(settings, gpus)
    service = PoolService(settings, presence, engine)
    presence.announce()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, lambda: engine.obey(sys.stdin.readline()))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    try:
        await service.finished
    finally:
        loop.remove_reader(sys.stdin)
        service.close()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
