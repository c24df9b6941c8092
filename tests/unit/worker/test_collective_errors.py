"""Exceptions of collectives are recognized by their origin: C code that torch.distributed called."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from msgspec.structs import replace

from sgpu_magic.wire.rank_events import Collective
from sgpu_magic.worker.cell.collective_errors import find_collective_error, is_raised_by_c
from sgpu_magic.worker.process import position

LOST = "Connection reset by peer"
# NCCL's messages; gloo raises a plain RuntimeError
NCCL_WORDS = [
    "NCCL communicator was aborted on rank 3.",
    "NCCL error in: ProcessGroupNCCL.cpp:3353, remote process exited or there was a network error, NCCL version 2.21.5",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
    "ncclInternalError: Internal check failed.\nLast error:\nProxy Call to rank 3 failed (Connect)",
    "ncclUnhandledCudaError: Call to CUDA function failed.",
    "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0], but store->get('0') got error",
    "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def raised(loop: asyncio.AbstractEventLoop, error: BaseException, code: str, module: str) -> BaseException:
    """Execute a module's code, in which `fail()` raises the error from C code, and return the exception."""
    future: asyncio.Future[Any] = loop.create_future()
    future.set_exception(error)
    # asyncio logs an exception that nobody asked for, whenever the future is collected
    future.exception()
    namespace: dict[str, Any] = {"__name__": module, "fail": future.result, "error": error}
    try:
        exec(compile(code, module, "exec"), namespace)
    except BaseException as found:
        return found
    raise AssertionError("it raised nothing")


def found_in(error: BaseException) -> BaseException | None:
    return find_collective_error(error, is_released=False)


C10D = "torch.distributed.distributed_c10d"


def in_collective(loop: asyncio.AbstractEventLoop, error: BaseException) -> BaseException:
    return raised(loop, error, "fail()", C10D)


@pytest.mark.parametrize("text", NCCL_WORDS)
def test_what_nccl_raises_comes_from_a_collective(loop: asyncio.AbstractEventLoop, text: str):
    error = in_collective(loop, dist.DistBackendError(text))
    assert found_in(error) is error
    # for a wait on a result, the innermost frame is the user's own
    assert found_in(raised(loop, dist.DistBackendError(text), "fail()", "__main__")) is not None
    # the same text in a user's exception
    assert found_in(raised(loop, RuntimeError(text), "raise error", "__main__")) is None
    assert found_in(raised(loop, dist.DistBackendError(text), "raise error", "__main__")) is None


def test_what_gloo_raises_comes_from_a_collective(loop: asyncio.AbstractEventLoop):
    error = in_collective(loop, RuntimeError(LOST))
    assert found_in(error) is error
    assert is_raised_by_c(error)


@pytest.mark.parametrize(
    ("code", "module"),
    [
        ("raise error", "__main__"),
        # torch's own argument check, in Python
        ("raise error", C10D),
        # C code of other libraries
        ("fail()", "__main__"),
        ("fail()", "torch.nn.modules.linear"),
        ("fail()", "torch.distributed_look_alike"),
    ],
)
def test_other_runtime_errors_do_not(loop: asyncio.AbstractEventLoop, code: str, module: str):
    assert found_in(raised(loop, RuntimeError(LOST), code, module)) is None


@pytest.mark.parametrize("kind", [ValueError, TypeError, MemoryError, NotImplementedError, KeyboardInterrupt])
def test_arguments_that_a_collective_refuses_do_not(loop: asyncio.AbstractEventLoop, kind: type[BaseException]):
    assert found_in(in_collective(loop, kind(LOST))) is None


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    fail()\nexcept RuntimeError as caught:\n    raise ValueError('wrapped') from caught",
        "try:\n    fail()\nexcept RuntimeError:\n    raise SystemExit(3)",
        "try:\n    fail()\nexcept RuntimeError:\n    raise ValueError('hidden') from None",
        "try:\n    fail()\nfinally:\n    {}['nothing']",
        "try:\n    fail()\nexcept RuntimeError as caught:\n    again = caught\nraise again",
        "try:\n    fail()\nexcept RuntimeError:\n    raise",
        "try:\n    fail()\nexcept RuntimeError as caught:\n    raise ExceptionGroup('all', [caught])",
    ],
)
def test_what_is_raised_for_one_does_too(loop: asyncio.AbstractEventLoop, code: str):
    lost = in_collective(loop, RuntimeError(LOST))
    assert found_in(raised(loop, lost, code, "__main__")) is not None


def test_one_that_was_handled_before_does_not(loop: asyncio.AbstractEventLoop):
    lost = in_collective(loop, RuntimeError(LOST))
    code = "try:\n    fail()\nexcept RuntimeError:\n    pass\nraise ValueError('later')"
    assert found_in(raised(loop, lost, code, "__main__")) is None


def test_a_group_with_an_own_exception_does_not(loop: asyncio.AbstractEventLoop):
    group = ExceptionGroup("mixed", [in_collective(loop, RuntimeError(LOST)), ValueError("own")])
    assert found_in(raised(loop, group, "raise error", "__main__")) is None


def test_chains_without_end_are_followed_to_a_limit():
    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    assert found_in(first) is None
    deep = ValueError("end")
    for _ in range(10_000):
        above = ValueError("above")
        above.__context__, deep = deep, above
    assert found_in(deep) is None


def test_an_error_of_autograd_counts_once_the_rank_is_released(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
):
    """A model in DDP: its collective has failed, and torch's recorder has it as over."""
    over = Collective(name="all_reduce", seq=3, pending=False)
    error = raised(loop, RuntimeError(LOST), "fail()", "torch.autograd.graph")
    for newest, before, after in ((replace(over, pending=True), True, True), (over, False, True), (None, False, False)):
        monkeypatch.setattr(position, "current_collective", lambda newest=newest: (newest, 0.0))
        assert (find_collective_error(error, is_released=False) is error) is before
        assert (find_collective_error(error, is_released=True) is error) is after
