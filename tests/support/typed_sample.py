# pyright: strict, reportUnusedExpression=false
"""A typed program that uses the public API. `test_functions.py` checks it with pyright; it is never run."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from concurrent.futures import as_completed, wait
from datetime import timedelta
from pathlib import Path
from typing import assert_type

import sgpu_magic
from sgpu_magic import Run, connect, distributed
from sgpu_magic.errors import RunFailed, SgpuError
from sgpu_magic.functions.decorator import DistributedFunction
from sgpu_magic.functions.sweep import Failed, Sweep, SweepResults
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.events import Event


class Gpu(enum.Enum):
    H100 = "h100"


@distributed
def plain(lr: float) -> str:
    return str(lr)


@distributed(gpus=4, gpu_type="a10", timeout="30m")
def train(lr: float, *, steps: int = 10) -> dict[str, float]:
    return {"loss": lr * steps}


@distributed(num_gpus=8, gpu_type=Gpu.H100, remote=True, timeout=timedelta(hours=2), run_async=True)
def later(path: Path) -> int:
    return len(path.parts)


@distributed(gpus=2, wait=0, grace="60s", retries=2, retry_on="any", env={"A": "b"}, name="n", exclude=["x"])
def options() -> None: ...


# ---------------------------------------------------------------- calls

takes_distributed: DistributedFunction[[float], str, list[str]] = plain
assert_type(plain(0.1), str)
assert_type(plain.distributed(0.1), list[str])
assert_type(train(0.1, steps=3), dict[str, float])
assert_type(train.distributed(0.1, steps=3), list[dict[str, float]])
assert_type(train.options(gpus=2, ui="none").distributed(lr=0.1), list[dict[str, float]])
assert_type(options.distributed(), list[None])
assert_type(later.distributed(Path()), Run[int])
assert_type(later(Path()), int)

plain.distributed()  # pyright: ignore[reportCallIssue]
plain.distributed("fast")  # pyright: ignore[reportArgumentType]
train.distributed(0.1, step=3)  # pyright: ignore[reportCallIssue]
train.options(gpu=2)  # pyright: ignore[reportCallIssue]
distributed(gpus="two")  # pyright: ignore[reportCallIssue, reportArgumentType]

# ---------------------------------------------------------------- runs

run = train.distributed.submit(0.1, steps=3)
assert_type(run, Run[dict[str, float]])
assert_type(run.result(timeout=10), list[dict[str, float]])
assert_type(run.result()[0]["loss"], float)
assert_type(run.exception(timeout=1.5), BaseException | None)
assert_type(run.state, RunState)
assert_type(run.cancel(), bool)
assert_type(run.logs(rank=1), str)
assert_type(run.logs(), str)
assert_type(run.run_id, str)
assert_type(run.directory, Path)
assert_type(run.events(), Iterator[Event])
assert_type(run.show(), None)
assert_type(run.detach(), None)
picked_up: Run[dict[str, float]] = Run.from_id("7f3a")
train.distributed.submit("fast")  # pyright: ignore[reportArgumentType]

done, not_done = wait([run, picked_up], timeout=1)
for finished in as_completed([run, picked_up]):
    assert_type(finished.result(), list[dict[str, float]])


async def waits() -> list[dict[str, float]]:
    assert_type(await run, list[dict[str, float]])
    return await train.distributed.submit(0.2)


# ---------------------------------------------------------------- sweeps


def trial(lr: float) -> tuple[float, str]:
    return lr, "ok"


sweep = sgpu_magic.map(trial, [0.1, 0.01], gpus_per_task=1)
assert_type(sweep, Sweep[float, tuple[float, str]])
assert_type(sweep[0], tuple[float, str])
assert_type(sweep[:1], list[tuple[float, str]])
assert_type(sweep.results, list[tuple[float, str]])
assert_type(sweep.pairs, list[tuple[float, tuple[float, str]]])
assert_type(sweep.failures, list[Failed[float]])
assert_type(sweep.runs[0], Run[tuple[float, str]] | None)
for accuracy, note in sweep:
    assert_type(accuracy, float)
    assert_type(note, str)
stream = sgpu_magic.map(trial, (lr / 10 for lr in range(5)), in_order=False, at_once=2, timeout=60)
assert_type(stream, SweepResults[tuple[float, str]])
assert_type(next(stream), tuple[float, str])
assert_type(sgpu_magic.map(plain, [0.1]), Sweep[float, str])
sgpu_magic.map(trial, ["fast"])  # pyright: ignore[reportArgumentType]

# ---------------------------------------------------------------- sessions and errors

with connect(4, "a10", name="work") as session:
    session.push("cfg", lr=0.1)
    session.run("model = build(cfg)")
    train.options(session=session).distributed(0.1)

try:
    train.distributed(0.1)
except RunFailed as error:
    assert_type(error.rank, int | None)
    assert_type(error.remote_traceback, str)
except SgpuError as error:
    assert_type(error.message, str)
