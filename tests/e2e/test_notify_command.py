"""The setting `notify`: its command is run once for each run, by the kernel, or by the pool for a detached run."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from headless_notebooks import notebook
from kernels import Home, Kernel
from lazy_modules import nbclient
from waiting import eventually

CALLS = Path(tempfile.mkdtemp()) / "calls"
APPEND = (
    "import os, sys\n"
    "facts = [os.environ['SGPU_ENDED_' + name] for name in ('NAME', 'STATE', 'REASON')]\n"
    "print(*facts, sep='|', file=open(sys.argv[1], 'a'))"
)
HOME_VARIABLES = {
    "SGPU_NOTIFY": shlex.join([sys.executable, "-c", APPEND, str(CALLS)]),
    "SGPU_NOTIFY_AFTER_S": "0",
}


@pytest.fixture(autouse=True)
def nothing_is_told_yet() -> None:
    CALLS.unlink(missing_ok=True)


def lines() -> list[str]:
    return sorted(CALLS.read_text().splitlines()) if CALLS.is_file() else []


def test_each_run_is_told_once(environment: Home):
    made = notebook(
        "%load_ext sgpu_magic",
        "%%distributed -n 2 --name good\nrank",
        "%%distributed -n 1 --name behind --detach\nprint('behind')",
        "%%distributed -n 2 --name bad\nif rank == 1: raise ValueError('bad batch')",
    )
    client = nbclient.NotebookClient(
        made, timeout=60, allow_errors=True, resources={"metadata": {"path": str(environment.work)}}
    )
    client.execute()
    # the kernel has ended, and the detached run ends without it
    eventually(lambda: len(lines()) >= 3, 60, lambda: f"told: {lines()}")
    assert lines() == ["bad|failed|rank 1: ValueError: bad batch", "behind|succeeded|", "good|succeeded|"]
    error = made.cells[3].outputs[-1]
    assert (error.output_type, error.ename) == ("error", "ValueError")


def test_a_detached_run_that_its_pool_took_along_is_told_by_the_next_pool(kernel: Kernel):
    kernel.check(
        "%%distributed -n 1 --name gone --detach\nimport time\nprint('begun', flush=True)\nwhile True: time.sleep(1)"
    )
    eventually(lambda: kernel.home.run_named("gone"), 30, "the run's directory")
    run_id = kernel.home.run_named("gone")
    eventually(lambda: "begun" in kernel.home.log(run_id, 0), 30, "the run's output")
    for pid in (kernel.home.pool_pid(), *kernel.home.agent_pids()):
        os.kill(pid, signal.SIGKILL)
    kernel.check("%%distributed -n 1 --name next\npass")
    told = "gone|failed|the pool service and the agent of its ranks ended unexpectedly"
    eventually(lambda: told in lines(), 30, lambda: f"told: {lines()}")
