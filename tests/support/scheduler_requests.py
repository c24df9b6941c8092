"""Requests to the scheduler and its answers, in short forms for its tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from sgpu_magic import errors
from sgpu_magic.pool.scheduling.run import ScheduledRun
from sgpu_magic.pool.scheduling.scheduler import Scheduler
from sgpu_magic.pool.scheduling.stimuli import Instruction, LaunchRun, MoveRun, RefuseRun, RunMoved, RunSubmitted
from sgpu_magic.wire.base import RunKind, RunState
from sgpu_magic.wire.devices import Device, Inventory, Lease, Placement
from sgpu_magic.wire.run import CellSource, Owner, RunSpec

SESSION = "5e550000"


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


def node(*devices: Device, slots: int = 16, cores: int = 2, problem: str = "") -> Inventory:
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
    """Return the only instruction, a refusal, with its options spelled as on a command line."""
    (one,) = instructions
    assert isinstance(one, RefuseRun)
    assert issubclass(getattr(errors, one.error), errors.SgpuError)
    return replace(one, message=str(one.message))


def running(scheduler: Scheduler, run_id: str, now: float = 0.0) -> None:
    for state in (RunState.STARTING, RunState.RUNNING):
        assert scheduler.handle(RunMoved(run_id, state), now) == [MoveRun(run_id, state)]


def changed(wanted: RunSpec, **fields: Any) -> RunSpec:
    return RunSpec(**{name: getattr(wanted, name) for name in wanted.__struct_fields__} | fields)


def session(ranks: int = 2, run_id: str = SESSION, **fields: Any) -> RunSpec:
    return changed(spec(run_id, ranks), kind=RunKind.SESSION, name="work", **fields)


def cell(run_id: str, ranks: int = 2, of: str = SESSION, **fields: Any) -> RunSpec:
    return changed(spec(run_id, ranks), **({"name": "train", "session": of} | fields))
