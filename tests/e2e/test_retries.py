"""`--retries`: the group is started again after a worker's death, after the cell's own error only when asked."""

from __future__ import annotations

import os
import signal

import pytest
from kernels import Home, Kernel, eventually

DIES_ONCE = (
    "import os, signal\n"
    "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    "print('attempt', attempt, flush=True)\n"
    "if attempt < {deaths} and rank == 1:\n"
    "    os.kill(os.getpid(), signal.SIGKILL)\n"
    "import torch, torch.distributed as dist\n"
    "t = torch.ones(1)\n"
    "dist.all_reduce(t)\n"
    "sum_ = float(t)\n"
)


def test_a_group_whose_rank_died_is_started_again(kernel: Kernel):
    kernel.check("import numpy as np\ndata = np.ones(300_000)")
    reply = kernel.check(
        f"%%distributed -n 2 --retries 2 --out sum_,total\n{DIES_ONCE.format(deaths=1)}total = float(data.sum())"
    )
    assert reply.lines(0)[-1:] == ["attempt 1"], reply.story
    assert "attempt 1 of 3 failed after" in reply.text
    assert "rank 1 was killed by SIGKILL; started again" in reply.text
    assert "attempt 2 of 3" in reply.text
    assert "succeeded" in reply.text
    assert [kernel.value("sum_"), kernel.value("total")] == [2, 300_000]


def test_the_last_attempts_failure_is_the_runs(kernel: Kernel):
    reply = kernel.run(f"%%distributed -n 2 --retries 1\n{DIES_ONCE.format(deaths=9)}")
    assert reply.ename == "WorkerDied"
    assert "SIGKILL" in reply.evalue
    assert reply.text.count("started again") == 1
    assert "attempt 2 of 2" in reply.text


def test_without_retries_nothing_is_started_again(kernel: Kernel):
    reply = kernel.run(f"%%distributed -n 2\n{DIES_ONCE.format(deaths=1)}")
    assert reply.ename == "WorkerDied"
    assert "started again" not in reply.text


def test_an_error_of_the_cell_is_not_tried_again(kernel: Kernel):
    reply = kernel.run("%%distributed -n 2 --retries 3\nprint('once')\nif rank == 1: raise ValueError('mine')")
    assert reply.ename == "ValueError"
    assert reply.lines(0) == ["once"]
    assert "started again" not in reply.text


def test_unless_it_is_asked_for(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 2 --retries 3 --retry-on any\n"
        "import os\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "if attempt < 2 and rank == 0: raise ValueError(f'attempt {attempt}')\n"
        "print('good', attempt)"
    )
    assert reply.lines(0) == ["good 2"]
    assert "attempt 1 of 4 failed" in reply.text
    assert "rank 0: ValueError: attempt 1; started again" in reply.text


def test_an_interrupt_ends_all_attempts(kernel: Kernel):
    cell = kernel.start("%%distributed -n 2 --retries 5\nimport time\nprint('up', flush=True)\ntime.sleep(600)")
    cell.until_shown("[1] up")
    (victim, *_) = kernel.home.rank_pids()
    os.kill(victim, signal.SIGKILL)
    cell.until_shown("attempt 2 of 6")
    kernel.interrupt()
    assert cell.wait(10).ename == "RunCancelled"
    eventually(lambda: not kernel.home.rank_pids(), 8, "the ranks are gone")


def test_options_that_mean_nothing(kernel: Kernel):
    for options, word in (
        ("--retries 101", "0 to 100"),
        ("--retries -1", "--retries"),
        ("--retries many", "is not a number of retries"),
        ("--retry-on any", "add --retries N"),
        ("--retries 1 --retry-on sunday", "--retry-on has no value `sunday`"),
        ("--grace soon", "write a number with its unit"),
    ):
        reply = kernel.run(f"%%distributed -n 2 {options}\npass")
        assert reply.ename == "UsageError", options
        assert word in reply.evalue, options
    options = kernel.complete("%%distributed --ret")
    assert {"--retries", "--retry-on"} <= set(options)
    assert set(kernel.complete("%%distributed --retry-on ")) == {"failure", "any"}
    assert {"--grace", "--detach"} <= set(kernel.complete("%%distributed --"))


@pytest.mark.parametrize("size", [3, pytest.param(300_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "which",
    [
        pytest.param("pool", marks=pytest.mark.slow),
        pytest.param("agent", marks=pytest.mark.slow),
        pytest.param("pool, then the agent", marks=pytest.mark.slow),
    ],
)
def test_a_group_is_started_again_when_what_held_it_was_killed(kernel: Kernel, home: Home, which: str, size: int):
    """The variables come from wherever they still are: the agent's memory, the notebook's, the run's directory."""
    kernel.check(f"import numpy as np\ndata = np.ones({size})")
    name = f"go-{size}-{which[:4]}-{len(which)}"
    cell = kernel.start(
        "%%distributed -n 2 --retries 2 --out total\n"
        "import os, time\n"
        "print('begun', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        f"while not os.path.exists({name!r}): time.sleep(0.02)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and rank == 1: os._exit(7)\n"
        "total = float(data.sum())"
    )
    cell.until_shown("[1] begun 0", 20)
    if "pool" in which:
        first = home.pool_pid()
        assert first is not None
        os.kill(first, signal.SIGKILL)
        cell.until_shown("has taken over the run", 20)
    if "agent" in which:
        (agent,) = home.agent_pids()
        os.kill(agent, signal.SIGKILL)
        cell.until_shown("[1] begun 1", 20)
    (home.work / name).touch()
    reply = cell.wait(30)
    assert reply.status == "ok", reply.story
    assert reply.lines(0)[-1] == "begun 1"
    assert "attempt 2 of 3" in reply.text
    assert kernel.value("total") == size
