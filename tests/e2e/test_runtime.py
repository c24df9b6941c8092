"""What `sgpu_magic.runtime` tells code on a rank."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from kernels import Kernel, Reply

PRINT_IT = "%%distributed -n 1\nfrom sgpu_magic import runtime\nprint(runtime.checkpoint_dir())"


def check_run(kernel: Kernel, code: str) -> tuple[Reply, Path]:
    """Run a cell that has to succeed; return its reply and its run's directory."""
    before = set(kernel.home.runs)
    reply = kernel.check(code)
    (run_id,) = set(kernel.home.runs) - before
    return reply, kernel.home.run_dir(run_id)


def test_checkpoint_dir_is_the_runs_own_for_all_ranks(kernel: Kernel):
    reply, directory = check_run(
        kernel,
        "%%distributed -n 2 --out place:all\n"
        "import os\n"
        "from sgpu_magic import runtime\n"
        "os.umask(0)\n"
        "os.chdir('/')\n"
        "place = runtime.checkpoint_dir()\n"
        "(place / f'rank-{rank}.pt').write_text('weights')\n"
        "print(type(place).__name__, runtime.get_restart_count())\n",
    )
    checkpoints = directory / "checkpoints"
    assert kernel.value("[str(path) for path in place]") == [str(checkpoints)] * 2
    assert stat.S_IMODE(checkpoints.stat().st_mode) == 0o700
    assert sorted(path.name for path in checkpoints.iterdir()) == ["rank-0.pt", "rank-1.pt"]
    assert reply.lines(0) == ["PosixPath 0"]


def test_run_that_does_not_ask_has_no_checkpoint_directory(kernel: Kernel):
    _, directory = check_run(kernel, "%%distributed -n 2\npass")
    assert not (directory / "checkpoints").exists()


def test_each_run_has_another(kernel: Kernel):
    cell = "%%distributed -n 1 --out old\nfrom sgpu_magic import runtime\nold = [*runtime.checkpoint_dir().iterdir()]\n"
    kernel.check(cell + "(runtime.checkpoint_dir() / 'step-1.pt').touch()")
    kernel.check(cell)
    assert kernel.value("old") == []


def test_every_attempt_finds_what_the_one_before_left(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 2 --retries 2\n"
        "import os\n"
        "from sgpu_magic import runtime\n"
        "step = runtime.checkpoint_dir() / f'rank-{rank}.txt'\n"
        "done = len(step.read_text()) if step.exists() else 0\n"
        "with step.open('a') as file: file.write('.')\n"
        "import torch.distributed as dist; dist.barrier()\n"
        "if runtime.get_restart_count() < 2 and rank == 1: os._exit(3)\n"
        "dist.barrier()\n"
        "print(runtime.get_restart_count(), 'restarts,', done, 'steps done before')\n"
    )
    assert reply.lines(0)[-1] == "2 restarts, 2 steps done before", reply.story
    assert reply.lines(1)[-1] == "2 restarts, 2 steps done before", reply.story


@pytest.mark.slow
def test_air_has_the_checkpoints_of_its_run(kernel: Kernel):
    _, directory = check_run(kernel, PRINT_IT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone", "_air.py"],
        cwd=directory,
        env=kernel.home.environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == [str(directory / "checkpoints")], done.stderr


def test_where_no_run_is_it_says_so(kernel: Kernel):
    reply = kernel.run("from sgpu_magic import runtime\nruntime.checkpoint_dir()")
    assert reply.ename == "UsageError"
    assert "this process is not in a run" in reply.traceback
    assert "%%distributed" in reply.traceback
    assert kernel.value("runtime.get_restart_count()") == 0
    kernel.check(f"import os; os.environ['SGPU_CHECKPOINT_DIR'] = {str(kernel.home.work / 'mine')!r}")
    try:
        assert kernel.value("str(runtime.checkpoint_dir())") == str(kernel.home.work / "mine")
        # a run's own value takes precedence over the notebook's
        reply, directory = check_run(kernel, PRINT_IT)
        assert reply.lines(0) == [str(directory / "checkpoints")]
    finally:
        kernel.check("del os.environ['SGPU_CHECKPOINT_DIR']")


@pytest.mark.parametrize("name", ["checkpoint_dir", "get_restart_count"])
def test_it_is_public(name: str):
    from sgpu_magic import runtime

    assert name in runtime.__all__
