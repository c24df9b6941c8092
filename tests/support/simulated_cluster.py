"""Inventories of many nodes, and a scheduler that hands out their devices, without real machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler_requests import Instruction, Scheduler

from sgpu_magic.pool.scheduling.run import ScheduledRun
from sgpu_magic.pool.scheduling.stimuli import (
    CancelRequested,
    LaunchRun,
    RanksReaped,
    RefuseRun,
    RunMoved,
    RunSubmitted,
    Stimulus,
    TimePassed,
)
from sgpu_magic.wire.base import RunKind, RunState
from sgpu_magic.wire.devices import Device, Inventory, Lease, Node, Placement
from sgpu_magic.wire.run import CellSource, Owner, RunSpec

GB = 10**9


def cluster(
    nodes: Mapping[str, tuple[str, int] | tuple[str, int, int]],
    *,
    slots: int = 4,
    elastic: Sequence[tuple[str, int]] = (),
    coming: str = "",
) -> Inventory:
    """Return an inventory.

    Args:
        nodes: By node name, the type of its devices, their number, and their memory in GB where it matters.
        slots: CPU slots of each node.
        elastic: Nodes that an autoscaler may add.
        coming: Nodes that it is adding.
    """
    devices = [
        Device(
            uuid=f"GPU-{name}-{index}",
            type=one[0],
            index=index,
            memory_bytes=(one[2] if len(one) == 3 else 80) * GB,
            node=name,
        )
        for name, one in nodes.items()
        for index in range(one[1])
    ]
    return Inventory(
        host="team",
        devices=tuple(devices),
        cpu_slots=slots * len(nodes),
        nodes=tuple(
            Node(node=name, host=f"host-{name}", address=f"10.0.0.{number}", cpu_slots=slots, cpu_slots_free=slots)
            for number, name in enumerate(nodes, 1)
        ),
        elastic=tuple(elastic),
        coming=coming,
    )


def spec(
    run_id: str,
    ranks: int = 1,
    kind: str = "h100",
    *,
    user: str = "alice",
    nodes: int = 0,
    strategy: str = "pack",
    memory: int = 0,
    wait_s: float | None = None,
    session: bool = False,
) -> RunSpec:
    return RunSpec(
        run_id=run_id,
        name="cell",
        cell=CellSource(body="1"),
        placement=Placement(
            ranks=ranks, device_type=kind, nodes=nodes, strategy=strategy, min_memory_bytes=memory * GB
        ),
        outputs=(),
        owner=Owner(pid=1, host="laptop", user=user),
        timeout_s=86400.0,
        wait_s=wait_s,
        kind=RunKind.SESSION if session else RunKind.CELL,
    )


class Driven:
    """A scheduler driven with arriving and ending runs, each of which advances the clock by a second.

    Args:
        scheduler: The scheduler.

    Attributes:
        launched: Runs in the order in which they got a lease.
        leases: Leases by run.
        refused: Reasons of rejected runs, by run.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.launched: list[str] = []
        self.leases: dict[str, Lease] = {}
        self.refused: dict[str, RefuseRun] = {}

    def feed(self, stimulus: Stimulus) -> Sequence[Instruction]:
        out = self.scheduler.handle(stimulus, self.now)
        for one in out:
            if isinstance(one, LaunchRun):
                self.launched.append(one.run_id)
                self.leases[one.run_id] = one.lease
            elif isinstance(one, RefuseRun):
                self.refused[one.run_id] = one
        return out

    def submit(self, *specs: RunSpec) -> None:
        for one in specs:
            self.now += 1.0
            self.feed(RunSubmitted(ScheduledRun(one)))

    def begin(self, run_id: str) -> None:
        for state in (RunState.STARTING, RunState.RUNNING):
            self.feed(RunMoved(run_id, state))

    def end(self, *run_ids: str) -> None:
        for run_id in run_ids:
            self.now += 1.0
            self.leases.pop(run_id, None)
            self.feed(RanksReaped(run_id, RunState.SUCCEEDED))

    def cancel(self, run_id: str) -> None:
        self.now += 1.0
        self.feed(CancelRequested(run_id, "cancelled"))

    def wait(self, seconds: float) -> Sequence[Instruction]:
        self.now += seconds
        return self.feed(TimePassed())

    def run(self, run_id: str) -> ScheduledRun:
        found = self.scheduler.run(run_id)
        assert found is not None
        return found

    def reason(self, run_id: str) -> str:
        """Return the reason that a waiting run is given."""
        return self.scheduler.worded_statuses()[run_id][1]

    def parts(self, run_id: str) -> list[tuple[str, int]]:
        """Return (node, ranks) of each part of a run's lease."""
        return [(share.node, share.ranks) for share in self.leases[run_id].shares]
