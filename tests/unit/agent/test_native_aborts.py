"""Torch's output before it aborts a rank: real messages of several versions, and output that only looks similar."""

from __future__ import annotations

import signal

import pytest

from sgpu_magic.agent.failures import find_root_cause
from sgpu_magic.agent.native_aborts import Cause, find_native_abort
from sgpu_magic.agent.rank_deaths import describe_death
from sgpu_magic.wire.base import FailureKind
from sgpu_magic.wire.rank_events import Collective, CollectiveTimeout, Failure

WORK = "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000)"
RAN = "ran for 600012 milliseconds before timing out."
FRAMES = "\n".join(f"frame #{n}: c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(std::optional<...>)" for n in range(30))
ALL_REDUCE = Collective(name="all_reduce", seq=7, pending=True, queued=True)

TIMEOUTS = {
    "2.1": (f"[E ProcessGroupNCCL.cpp:474] [Rank 2] Watchdog caught collective operation timeout: {WORK} {RAN}", ""),
    "2.3": (
        "[rank2]:[E ProcessGroupNCCL.cpp:563] [PG 1 (tensor) Rank 2] Watchdog caught collective operation timeout: "
        f"{WORK} {RAN}",
        "tensor",
    ),
    "2.6": (
        "[rank2]:[E1128 18:51:27.23 ProcessGroupNCCL.cpp:629] [Rank 2] Watchdog caught collective operation timeout: "
        f"{WORK} {RAN}",
        "",
    ),
    "2.9": (
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 2] Process group watchdog thread terminated with exception: "
        f"[Rank 2] Watchdog caught collective operation timeout: {WORK} {RAN}\n{FRAMES}",
        "",
    ),
    "a group of 2.9": (
        f"[PG ID 3 PG GUID 3(undefined) Rank 2] Watchdog caught collective operation timeout: {WORK} {RAN}",
        "3",
    ),
}
LOST = [
    "NCCL communicator was aborted on rank 3.",
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3353, remote process exited or there was "
    "a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\nLast "
    "error:\nsocketProgress: Connection closed by remote peer node1<45678>",
    "[PG ID 0 PG GUID 0 Rank 1] Process group watchdog thread terminated with exception: NCCL error",
    "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but "
    "store->get('0') got error: Connection reset by peer",
]


def aborted(rank: int, output: str, at: float = 1.0, status: int = -signal.SIGABRT) -> Failure:
    failure = Failure(kind=FailureKind.WORKER_DIED, message="", rank=rank, at=at, exit_status=status, pid=4000 + rank)
    return describe_death(failure, 3, last_output=output)


@pytest.mark.parametrize("version", TIMEOUTS)
def test_a_collective_that_timed_out_is_named(version: str):
    text, group = TIMEOUTS[version]
    found = find_native_abort(f"step 6\n{text}\n")
    assert found is not None
    assert found.cause is Cause.TIMED_OUT
    assert found.timeout == CollectiveTimeout(
        collective=Collective(name="all_reduce", seq=7, pending=True, queued=True, group=group), seconds=600.0
    )


@pytest.mark.parametrize("text", LOST)
def test_the_loss_of_a_peer_is_recognized(text: str):
    found = find_native_abort(f"{text}\n{FRAMES}")
    assert found is not None
    assert (found.cause, found.timeout) == (Cause.PEER_LOST, None)


@pytest.mark.parametrize(
    "output",
    [
        "free(): invalid pointer",
        "[PG ID 5 PG GUID 0 Rank 0] Process group watchdog thread terminated with exception: CUDA error: an illegal "
        "memory access was encountered",
        "[Rank 0] NCCL watchdog thread terminated with exception: CUDA error: device-side assert triggered",
        "[PG ID 5 PG GUID 23 Rank 1] Process group watchdog thread terminated with exception: HIP error: out of memory",
    ],
)
def test_other_aborts_are_the_ranks_own(output: str):
    assert find_native_abort(f"{output}\n{FRAMES}") is None
    failure = aborted(0, output)
    assert not failure.is_consequence
    assert failure.death is not None
    assert output[:200] in "".join(failure.death.last_output)


def test_only_of_an_abort_is_the_output_read():
    # the watchdog's text in a log does not explain another death
    killed = aborted(0, TIMEOUTS["2.9"][0], status=-signal.SIGKILL)
    assert not killed.is_consequence
    assert killed.collective_timeout is None


def test_the_abort_of_a_rank_that_waited_is_a_consequence_and_says_for_what():
    waited = aborted(0, TIMEOUTS["2.9"][0], at=1.0)
    assert waited.is_consequence
    assert waited.death is not None
    assert waited.death.what == (
        "was killed by SIGABRT: torch aborted it, because all_reduce #7 was not complete within 600 s"
    )
    # C++ frames are omitted
    (line,) = waited.death.last_output
    assert line.startswith("what():  [PG ID 0 ")
    own = Failure(kind=FailureKind.USER_CODE, message="NaN", rank=1, at=2.0)
    assert find_root_cause([waited, own]) == (own, (waited,))
