"""Two pools on one machine never use the same GPU at the same time, whatever is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
import real_gpus
from driver_errors import WORKS
from kernels import Cell, Home, Kernel, eventually

from sgpu_magic.wire.devices import Device

pytestmark = pytest.mark.needs_gpu

HOLD = "import os, time, torch\nx = torch.ones(1 << 20, device=device)\nprint('held', flush=True)\n"
UNTIL_GO = "while not os.path.exists('go'): time.sleep(0.02)"
FOR_EVER = "while True: time.sleep(1)"


@pytest.fixture(params=["same locks", "other locks"])
def second(request: pytest.FixtureRequest, home: Home, new_home: Callable[..., Home]) -> Iterator[Kernel]:
    """A kernel in another user's pool. Without common lock files only the driver tells of the first pool's runs."""
    other = new_home({"SGPU_LOCK_DIR": home.environ["SGPU_LOCK_DIR"]} if request.param == "same locks" else {})
    made = Kernel(other)
    yield made
    made.close()


def hold(kernel: Kernel, count: int, until: str) -> Cell:
    """Start a run on every GPU; return its cell once each rank uses its own."""
    cell = kernel.start(f"%%distributed -n {count}\n{HOLD}{until}")
    for rank in range(count):
        cell.until_shown(f"[{rank}] held", 90)
    return cell


def refused(kernel: Kernel) -> bool:
    reply = kernel.run("%%distributed -n 1 --wait 0\n1", 60)
    if reply.status == "ok":
        return False
    assert reply.ename == "CapacityError", reply.story
    assert "in use outside the pool" in reply.evalue
    return True


def gets(kernel: Kernel, count: int) -> bool:
    return kernel.run(f"%%distributed -n {count} --wait 0 --ui none\n{WORKS}", 60).status == "ok"


def skip_unseen(kernel: Kernel, home: Home) -> None:
    """Skip where nothing could tell the second pool of the first one's runs."""
    shares_locks = kernel.home.environ["SGPU_LOCK_DIR"] == home.environ["SGPU_LOCK_DIR"]
    if not shares_locks and not set(home.rank_pids()) & real_gpus.smi_processes().keys():
        pytest.skip("the driver lists no process of this machine: the lock files are all that there is")


def test_a_gpu_of_one_pools_run_is_not_leased_by_the_other(
    kernel: Kernel, second: Kernel, home: Home, gpus: tuple[Device, ...]
):
    second.check("%sgpu_status")
    cell = hold(kernel, len(gpus), UNTIL_GO)
    try:
        skip_unseen(second, home)
        eventually(lambda: "in use outside the pool" in second.check("%sgpu_status").text, 15, "the pool's view")
        assert refused(second)
        waiting = second.start(f"%%distributed -n {len(gpus)}\nprint('began')")
        waiting.until_shown("in use outside the pool", 15)
        assert "began" not in waiting.reply.text
    finally:
        (home.work / "go").touch()
        assert cell.wait(60).status == "ok"
        (home.work / "go").unlink()
    assert waiting.wait(60).lines(0) == ["began"], waiting.reply.story


def test_the_run_of_a_killed_pool_keeps_its_gpus(kernel: Kernel, second: Kernel, home: Home, gpus: tuple[Device, ...]):
    second.check("%sgpu_status")
    cell = hold(kernel, len(gpus), UNTIL_GO)
    try:
        skip_unseen(second, home)
        eventually(lambda: refused(second), 15, "the other pool's view")
        pool = home.pool_pid()
        assert pool is not None
        os.kill(pool, signal.SIGKILL)
        for _ in range(3):
            # before, while and after another service takes the run over
            assert refused(second)
        cell.until(lambda: home.pool_pid() not in (None, pool), 20, "the next pool")
        assert refused(second)
    finally:
        (home.work / "go").touch()
        reply = cell.wait(60)
        (home.work / "go").unlink()
    assert reply.status == "ok", reply.story
    eventually(lambda: gets(second, len(gpus)), 30, "the GPUs")


def test_nothing_holds_a_gpu_when_pool_and_agent_are_killed(
    kernel: Kernel, second: Kernel, home: Home, gpus: tuple[Device, ...]
):
    cell = hold(kernel, len(gpus), FOR_EVER)
    pool = home.pool_pid()
    assert pool is not None
    for pid in (pool, *home.agent_pids()):
        os.kill(pid, signal.SIGKILL)
    assert cell.wait(60).ename == "NodeLost", cell.reply.story
    eventually(real_gpus.is_free, 30, "their memory is free", poll_s=0.2)
    for each in (second, kernel):
        eventually(lambda each=each: gets(each, len(gpus)), 30, "the GPUs")


def test_two_users_take_turns(kernel: Kernel, second: Kernel, gpus: tuple[Device, ...]):
    for each in (kernel, second, kernel):
        assert each.check(f"%%distributed -n {len(gpus)}\n{WORKS}", 90).lines(0) == ["works 8"]
