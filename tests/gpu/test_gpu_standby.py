"""Groups that stand by: those for runs hold no memory of a GPU, those of a session have their context made."""

from __future__ import annotations

import os
import signal

import pytest
import real_gpus
from kernels import Home, Kernel, eventually

pytestmark = pytest.mark.needs_gpu

FIRST_KERNEL = "import torch\nx = torch.ones(1, device=device) + 1\nprint(x.item())"


def standby(home: Home) -> list[int]:
    return eventually(home.standby_pids, 15, "a group stands by")


def test_an_idle_standby_group_holds_no_gpu_memory(kernel: Kernel, home: Home):
    kernel.check(f"%%distributed -n 1\n{FIRST_KERNEL}", 60)
    waiting = standby(home)
    eventually(real_gpus.is_free, 20, "only what was in use before", poll_s=0.2)
    assert not set(waiting) & real_gpus.smi_processes().keys()
    assert home.standby_pids() == waiting


def test_the_next_run_is_the_group_that_stood_by(kernel: Kernel, home: Home):
    kernel.check(f"%%distributed -n 1\n{FIRST_KERNEL}", 60)
    waiting = standby(home)
    kernel.check("%%distributed -n 1 --out pid\nimport os\npid = os.getpid()\n" + FIRST_KERNEL, 60)
    assert [kernel.value("pid")] == waiting


def test_a_sessions_standby_group_has_its_context(session: Kernel, home: Home):
    session.check(f"%%distributed --out mine\nimport os\nmine = os.getpid()\n{FIRST_KERNEL}", 60)
    mine = session.value("mine")
    if mine not in real_gpus.smi_processes():
        pytest.skip("the driver lists no process of this machine")

    session.check(f"%%distributed --fresh\n{FIRST_KERNEL}", 60)

    def ready() -> set[int]:
        # it has taken its place in the notebook's directory, as a rank does
        return (set(home.rank_pids()) & real_gpus.smi_processes().keys()) - {mine}

    waiting = eventually(ready, 20, "the group that stands by has a context", poll_s=0.2)
    session.check(f"%%distributed --fresh --out pid\nimport os\npid = os.getpid()\n{FIRST_KERNEL}", 60)
    assert {session.value("pid")} == waiting


def test_a_standby_group_that_is_killed_is_replaced(kernel: Kernel, home: Home):
    kernel.check(f"%%distributed -n 1\n{FIRST_KERNEL}", 60)
    (pid,) = standby(home)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: pid not in home.processes(), 10, "it is gone")
    assert kernel.check(f"%%distributed -n 1\n{FIRST_KERNEL}", 60).lines(0) == ["2.0"]
