"""The first failure is the cause: every way in which a rank fails, whatever the other rank does meanwhile.

A real agent with real ranks. The culprit, rank 0, fails once rank 1 is where it should be; the agent's report of the
run's end says which failure is the cause, and how the other rank ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from agent_process import AgentProcess
from process_table import is_alive
from waiting import eventually

from sgpu_magic.views.stacks import verdict
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.rank_events import Failure
from sgpu_magic.wire.run import CellSource

RANK_0, RANK_1 = 0, 1

IMPORTS = "import ctypes, os, signal, sys, threading, time, torch, torch.distributed as dist\n"
# texts of gloo, NCCL, sockets and torch's store, as user code may raise them
KNOWN_TEXTS = (
    "upload failed: Connection reset by peer",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:52911",
    "dataset server: Broken pipe",
    "NCCL communicator was aborted on rank 1.",
    "Gloo connectFullMesh failed with timed out connecting",
    "remote process exited or there was a network error",
    "process group was aborted",
    "No such device or address",
)


@dataclass(frozen=True)
class Way:
    """How rank 0 fails.

    Args:
        code: What it executes.
        type_name: Of the exception that the run ends with; "" for a death.
        says: Part of the message.
        kind: Of the failure.
    """

    code: str
    type_name: str = ""
    says: str = ""
    kind: FailureKind = FailureKind.USER_CODE


def dies(code: str, says: str) -> Way:
    return Way(code, "", says, FailureKind.WORKER_DIED)


WAYS = {
    "raises": Way("raise ValueError('NaN in batch 3')", "ValueError", "NaN in batch 3"),
    "RuntimeError": Way("raise RuntimeError('of its own')", "RuntimeError", "of its own"),
    "SystemExit": Way("sys.exit(3)", "SystemExit", "3"),
    "MemoryError": Way("raise MemoryError('no room')", "MemoryError", "no room"),
    "KeyboardInterrupt": Way("raise KeyboardInterrupt('by hand')", "KeyboardInterrupt", "by hand"),
    "SIGINT to itself": Way("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", "KeyboardInterrupt"),
    "_exit": dies("os._exit(3)", "exited with code 3"),
    "_exit 0": dies("os._exit(0)", "exited with code 0"),
    "SIGKILL": dies("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
    "SIGSEGV": dies("ctypes.string_at(0)", "was killed by SIGSEGV"),
    "SIGABRT": dies("os.abort()", "was killed by SIGABRT"),
    "in a future": Way(
        "import concurrent.futures as cf\ncf.ThreadPoolExecutor().submit(int, 'x').result()",
        "ValueError",
        "invalid literal",
    ),
    "after leaving the group": Way(
        "dist.destroy_process_group()\nraise OverflowError('deep down')", "OverflowError", "deep down"
    ),
    # torch checks the arguments in the collective, before anything is sent
    "fails in a collective": Way(
        "dist.all_gather([torch.ones(2)], torch.ones(2))", "RuntimeError", "invalid output tensor list"
    ),
    "DistError of its own": Way("raise dist.DistNetworkError('mine')", "torch.distributed.DistNetworkError", "mine"),
    **{f"text {at}": Way(f"raise RuntimeError({text!r})", "RuntimeError", text) for at, text in enumerate(KNOWN_TEXTS)},
    "text of a socket": Way(
        "raise ConnectionResetError(104, 'Connection reset by peer')", "ConnectionResetError", "reset"
    ),
}

# what rank 1 does meanwhile, and how its end is reported: interrupted, released, or not at all
PEERS = {
    "computes": "while True: sum(range(1000))",
    "sleeps": "time.sleep(60)",
    "waits in a collective": "dist.all_reduce(torch.ones(1))",
    "waits for a Work": "work = dist.all_reduce(torch.ones(1), async_op=True)\nwork.wait()",
    "waits to receive": "work = dist.irecv(torch.ones(1), 0)\nwork.wait()",
    "waits in a backward pass": (
        "x = torch.ones(1, requires_grad=True)\n"
        "class Wait(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x): return x * 1\n"
        "    @staticmethod\n    def backward(ctx, g):\n        dist.all_reduce(g)\n        return g\n"
        "Wait.apply(x).sum().backward()"
    ),
    "wraps what it gets": (
        "try: dist.all_reduce(torch.ones(1))\nexcept RuntimeError as error: raise ValueError('wrapped') from error"
    ),
    "fails while it handles what it gets": "try: dist.all_reduce(torch.ones(1))\nexcept RuntimeError: sys.exit(7)",
    "raises what it gets again": "try: dist.all_reduce(torch.ones(1))\nexcept RuntimeError as error: raise error",
    "fails when it is interrupted": "try: time.sleep(60)\nfinally: int('while it ends')",
    "holds the interpreter": "ctypes.PyDLL(None).sleep(1)",
    "has ended": "pass",
}


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    made = AgentProcess()
    yield made
    made.close()
    eventually(lambda: not is_alive(made.process.pid), what="the agent's end")


def body(way: str, peer: str) -> str:
    """A cell in which both ranks come to their part together."""

    def indented(code: str) -> str:
        return "".join(f"    {line}\n" for line in code.splitlines())

    return (
        f"{IMPORTS}dist.barrier()\n"
        f"if rank == 0:\n    time.sleep(0.05)\n{indented(way)}"
        f"else:\n{indented(peer)}"
    )  # fmt: skip


def end(agent: AgentProcess, code: str, ranks: int = 2) -> RunEnded:
    run_id = agent.launch(code, ranks=ranks)
    ended = agent.wait_for(run_id, RunEnded)
    agent.wait_until_gone(run_id)
    assert ended.state is RunState.FAILED, ended
    return ended


def check(agent: AgentProcess, way: Way, peer: str) -> None:
    ended = end(agent, body(way.code, peer))
    cause = ended.failure
    assert cause is not None
    assert cause.rank == RANK_0, (cause, ended.others)
    assert cause.kind is way.kind, cause
    assert cause.type_name == (way.type_name and f"{'' if '.' in way.type_name else 'builtins.'}{way.type_name}")
    assert way.says in cause.message
    assert all(other.is_consequence or other.after_stop for other in ended.others), ended.others


@pytest.mark.parametrize(
    ("way", "peer"),
    [
        ("text 0", "computes"),
        ("text 1", "waits in a collective"),
        ("SIGKILL", "waits for a Work"),
        ("_exit", "wraps what it gets"),
        ("KeyboardInterrupt", "sleeps"),
        ("after leaving the group", "fails while it handles what it gets"),
        ("DistError of its own", "fails when it is interrupted"),
        *(pytest.param(way, peer, marks=pytest.mark.slow) for way in WAYS for peer in PEERS),
    ],
)
def test_the_first_failure_is_the_cause(agent: AgentProcess, way: str, peer: str):
    check(agent, WAYS[way], PEERS[peer])


def test_a_collective_that_fails_by_itself_is_the_cause(agent: AgentProcess):
    # the other rank computes and is not at fault
    cell = body("import datetime as dt\ndist.monitored_barrier(timeout=dt.timedelta(seconds=0.2))", PEERS["computes"])
    cause = end(agent, cell).failure
    assert cause is not None
    assert (cause.rank, cause.type_name) == (RANK_0, "builtins.RuntimeError")


def test_of_two_failures_in_one_moment_the_earlier_is_the_cause(agent: AgentProcess):
    cell = (
        f"{IMPORTS}dist.barrier()\n"
        "if rank == 1:\n    time.sleep(0.02)\n"
        "raise RuntimeError(f'Connection reset by peer, said rank {rank}')"
    )
    ended = end(agent, cell)
    assert ended.failure is not None
    assert ended.failure.message == "Connection reset by peer, said rank 0"
    assert [_told(other) for other in ended.others] == [(RANK_1, "Connection reset by peer, said rank 1")]


def test_the_hang_is_named_that_ended_the_ranks_which_waited(agent: AgentProcess):
    # has the effect of NCCL's watchdog on the waiting ranks, without NCCL
    text = (
        "[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, "
        "NumelOut=1, Timeout(ms)=600000) ran for 600012 milliseconds before timing out."
    )
    cell = (
        f"{IMPORTS}dist.barrier()\n"
        "if rank == 1:\n    time.sleep(60)\n"
        f"os.write(2, {text!r}.replace('{{rank}}', str(rank)).encode() + b'\\n')\n"
        "time.sleep(0.3 + 0.02 * rank)\nos.abort()"
    )
    ended = end(agent, cell, ranks=3)
    cause = ended.failure
    assert cause is not None
    assert cause.rank in (0, 2)
    assert cause.collective_timeout is not None
    assert "because all_reduce #7 was not complete within 600 s" in cause.message
    by_rank = {stack.rank: stack for stack in ended.stacks}
    assert sorted(by_rank) == [0, 1, 2]
    assert all(by_rank[rank].collective == cause.collective_timeout.collective for rank in (0, 2))
    # the line at which the hanging rank was before it was stopped
    assert [frame.line for frame in by_rank[RANK_1].frames if "ipython-input" in frame.file] == [4]
    assert verdict(ended.stacks, CellSource(body=cell)) == ["rank 1 has not reached all_reduce #7"]
    assert [other.rank for other in ended.others if other.after_stop] == [RANK_1]


def test_an_exception_in_a_thread_fails_no_run(agent: AgentProcess):
    cell = f"{IMPORTS}thread = threading.Thread(target=int, args=('x',))\nthread.start()\nthread.join()\nprint('on')"
    run_id = agent.launch(cell, ranks=2)
    assert agent.wait_for(run_id, RunEnded).state is RunState.SUCCEEDED
    agent.wait_until_gone(run_id)
    assert "invalid literal" in agent.printed(run_id)[RANK_0]


def _told(failure: Failure) -> tuple[int | None, str]:
    return failure.rank, failure.message


def test_a_killed_rank_leaves_no_file_in_shared_memory(agent: AgentProcess):
    cell = (
        "import os, signal\n"
        "for name in (f'nccl-Test{rank}a', f'torch_{os.getpid()}_1_0', f'of-the-user-{os.getpid()}'):\n"
        "    open('/dev/shm/' + name, 'wb').write(bytes(4096))\n"
        "print(os.getpid(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    run_id = agent.launch(cell, ranks=1)
    agent.wait_for(run_id, RunEnded)
    agent.wait_until_gone(run_id)
    pid = int(agent.printed(run_id)[RANK_0])
    of_user = Path(f"/dev/shm/of-the-user-{pid}")
    assert of_user.exists(), "a file of the user's own"
    of_user.unlink()
    assert not Path("/dev/shm/nccl-Test0a").exists()
    assert not Path(f"/dev/shm/torch_{pid}_1_0").exists()
