"""Requests to the scheduler and its answers, in short forms for its tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from sgpu_magic import errors
from sgpu_magic.pool import format_end, format_queue
from sgpu_magic.pool.queue_updates import QueueUpdates
from sgpu_magic.pool.scheduling import scheduler
from sgpu_magic.pool.scheduling.run import ScheduledRun
from sgpu_magic.pool.scheduling.stimuli import (
    EndUnstartedRun,
    LaunchRun,
    MoveRun,
    PublishWarning,
    RefuseRun,
    RunMoved,
    RunSubmitted,
    Stimulus,
    StopRun,
)
from sgpu_magic.pool.scheduling.stimuli import Instruction as PureInstruction
from sgpu_magic.pool.scheduling.wait_reason import QueueStatus
from sgpu_magic.wire.base import RunKind, RunState
from sgpu_magic.wire.devices import Device, Inventory, Lease, Placement
from sgpu_magic.wire.run import CellSource, Owner, RunSpec

SESSION = "5e550000"


class QueueMoved(NamedTuple):
    """A waiting run's status, as its followers see it."""

    run_id: str
    position: int
    reason: str


class Warned(NamedTuple):
    """A warning, as the run's followers see it."""

    run_id: str
    text: str


Instruction = PureInstruction | QueueMoved | Warned


class Scheduler(scheduler.Scheduler):
    """The scheduler with its queue updates, and with words in place of facts: what users see of it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.updates = QueueUpdates(self)
        # the last status of each waiting run
        self.published: dict[str, QueueMoved] = {}

    def handle(self, stimulus: Stimulus, now: float) -> list[Instruction]:
        out = [_worded(one) for one in super().handle(stimulus, now)]
        moved = {run_id: _moved(run_id, status) for run_id, status in self.updates.due(now).items()}
        waiting = {run.run_id for run in self.waiting}
        self.published = {run_id: last for run_id, last in (self.published | moved).items() if run_id in waiting}
        return [*out, *moved.values()]

    def next_deadline(self) -> float | None:
        times = (super().next_deadline(), self.updates.next_deadline())
        return min((at for at in times if at is not None), default=None)

    def worded_statuses(self) -> dict[str, tuple[int, str]]:
        return {run_id: _moved(run_id, status)[1:] for run_id, status in self.statuses().items()}

    def worded_remaining(self) -> dict[str, str]:
        return {run_id: format_queue.format_remaining(ranks) for run_id, ranks in self.remaining_ranks().items()}


def _moved(run_id: str, status: QueueStatus) -> QueueMoved:
    return QueueMoved(run_id, status.position, format_queue.format_wait(status.reason))


def _worded(one: PureInstruction) -> Instruction:
    match one:
        case MoveRun(reason=reason):
            return replace(one, reason=str(format_end.format_end(reason)) or None)
        case StopRun(reason=reason) | RefuseRun(reason=reason) | EndUnstartedRun(reason=reason):
            return replace(one, reason=str(format_end.format_end(reason)))
        case PublishWarning(run_id=run_id, warning=warning):
            return Warned(run_id, format_end.format_warning(warning))
        case _:
            return one


def gpus(count: int, kind: str = "a10", *, simulated: bool = False, outside: Sequence[int] = ()) -> tuple[Device, ...]:
    return tuple(
        Device(
            uuid=f"{'SIM' if simulated else 'GPU'}-{kind}-{index}",
            type=kind,
            index=index,
            simulated=simulated,
            outside_use="python (pid 9) holds 12 GB" if index in outside else "",
        )
        for index in range(count)
    )


def node(*devices: Device, slots: int = 16, cores: int = 2, problem: str | None = None) -> Inventory:
    return Inventory(host="here", devices=devices, cpu_slots=slots, cores=cores, problem=problem)


def spec(
    run_id: str,
    ranks: int = 1,
    kind: str = "a10",
    *,
    wait_s: float | None = None,
    timeout_s: float = 7200.0,
    allow_busy: bool = False,
    stand_in: bool = False,
) -> RunSpec:
    return RunSpec(
        run_id=run_id,
        name="cell",
        cell=CellSource(body="1"),
        placement=Placement(ranks=ranks, device_type=kind, allow_busy=allow_busy, stand_in=stand_in),
        outputs=(),
        owner=Owner(pid=1, host="here", user="me"),
        timeout_s=timeout_s,
        wait_s=wait_s,
    )


def submit(scheduler: Scheduler, wanted: RunSpec, now: float = 0.0) -> list[Instruction]:
    return scheduler.handle(RunSubmitted(ScheduledRun(wanted)), now)


def launched(instructions: Sequence[Instruction]) -> dict[str, Lease]:
    return {one.run_id: one.lease for one in instructions if isinstance(one, LaunchRun)}


def refusal(instructions: Sequence[Instruction]) -> RefuseRun:
    """Return the only instruction, a refusal."""
    (one,) = instructions
    assert isinstance(one, RefuseRun)
    assert issubclass(getattr(errors, one.error), errors.SgpuError)
    return one


def running(scheduler: Scheduler, run_id: str, now: float = 0.0) -> None:
    for state in (RunState.STARTING, RunState.RUNNING):
        assert scheduler.handle(RunMoved(run_id, state), now) == [MoveRun(run_id, state)]


def changed(wanted: RunSpec, **fields: Any) -> RunSpec:
    return RunSpec(**{name: getattr(wanted, name) for name in wanted.__struct_fields__} | fields)


def session(ranks: int = 2, run_id: str = SESSION, **fields: Any) -> RunSpec:
    return changed(spec(run_id, ranks), kind=RunKind.SESSION, name="work", **fields)


def cell(run_id: str, ranks: int = 2, of: str = SESSION, **fields: Any) -> RunSpec:
    return changed(spec(run_id, ranks), **({"name": "train", "session": of} | fields))
