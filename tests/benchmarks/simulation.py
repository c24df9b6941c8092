"""A pool of ten thousand simulated GPUs: its nodes, its users and what they submit; nothing of it needs a machine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from sgpu_magic.pool.format_queue import format_wait
from sgpu_magic.pool.queue_updates import QueueUpdates
from sgpu_magic.pool.scheduling.run import ScheduledRun
from sgpu_magic.pool.scheduling.scheduler import Scheduler
from sgpu_magic.pool.scheduling.stimuli import Instruction, LaunchRun, RanksReaped, RunMoved, RunSubmitted, Stimulus
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.devices import Device, Inventory, Node, Placement
from sgpu_magic.wire.run import CellSource, Owner, RunSpec

GPUS_PER_NODE = 8
_TYPES = ("h100", "a100", "l4", "a10")
# numbers of ranks, weighted roughly as in practice
_RANKS = (1, 1, 2, 4, 8, 8, 16, 32, 64, 64)


def cluster(gpus: int) -> Inventory:
    """Return an inventory of so many GPUs of four types, eight on a node."""
    nodes: list[Node] = []
    devices: list[Device] = []
    for number in range(gpus // GPUS_PER_NODE):
        name = f"n{number:04d}"
        kind = _TYPES[number % len(_TYPES)]
        address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
        nodes.append(Node(node=name, host=name, address=address, cores=64, cpu_slots=64, cpu_slots_free=64))
        devices += [
            Device(uuid=f"GPU-{name}-{index}", type=kind, index=index, memory_bytes=80 << 30, node=name)
            for index in range(GPUS_PER_NODE)
        ]
    return Inventory(
        host="cluster", devices=tuple(devices), nodes=tuple(nodes), cpu_slots=64 * len(nodes), cores=64 * len(nodes)
    )


def specs(count: int, users: int, seed: int = 0) -> Iterator[RunSpec]:
    """Yield so many runs of so many users."""
    dice = random.Random(seed)
    for number in range(count):
        ranks = dice.choice(_RANKS)
        strategy = dice.choice(("pack", "pack", "pack", "spread", "strict_pack" if ranks <= GPUS_PER_NODE else "pack"))
        nodes = dice.choice((0, 0, 0, 2)) if ranks % 2 == 0 and strategy != "strict_pack" else 0
        yield RunSpec(
            run_id=f"{seed:04x}{number:08x}",
            name=f"cell {number}",
            cell=CellSource(body="train()"),
            placement=Placement(ranks=ranks, device_type=dice.choice(_TYPES), strategy=strategy, nodes=nodes),
            outputs=(),
            owner=Owner(pid=1, host="laptop", user=f"user{dice.randrange(users):03d}"),
            timeout_s=86400.0,
            submitted_at=0.0,
        )


class Traffic:
    """Runs that come, begin, end, and make room for others; the clock is its own.

    Args:
        scheduler: What is driven.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.updates = QueueUpdates(scheduler)
        self.now = 0.0
        self.running: list[str] = []

    def feed(self, stimulus: Stimulus) -> Sequence[Instruction]:
        """Bring one stimulus before the scheduler, and ask it when it is next to be asked, as the service does."""
        out = self.scheduler.handle(stimulus, self.now)
        for status in self.updates.due(self.now).values():
            format_wait(status.reason)
        self.scheduler.next_deadline()
        self.running += [one.run_id for one in out if isinstance(one, LaunchRun)]
        return out

    def submit(self, spec: RunSpec) -> Sequence[Instruction]:
        self.now += 0.01
        return self.feed(RunSubmitted(ScheduledRun(spec)))

    def begin(self, run_id: str) -> None:
        """The run's ranks start, and work."""
        for state in (RunState.STARTING, RunState.RUNNING):
            self.now += 0.01
            self.feed(RunMoved(run_id, state))

    def end(self, run_id: str) -> Sequence[Instruction]:
        self.now += 0.01
        self.running.remove(run_id)
        return self.feed(RanksReaped(run_id, RunState.SUCCEEDED))
