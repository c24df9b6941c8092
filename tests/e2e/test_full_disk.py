"""A full disk stops what is written down, and never the training."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from kernels import Home, Kernel, eventually
from pool_client import PoolClient
from small_disks import SmallDisk, small_disk

from sgpu_magic.cli import doctor
from sgpu_magic.cli.finding import Level
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError
from sgpu_magic.wire.base import RunState

pytestmark = pytest.mark.slow

TRAINS = (
    "%%distributed -n 2 --out total --detach --session none\n"
    "import os, time, torch, torch.distributed as dist\n"
    "total = torch.zeros(1)\n"
    "open('trains', 'w').close()\n"
    "while not os.path.exists('go on'):\n"
    "    total += dist.get_world_size()\n"
    "    time.sleep(0.05)\n"
    "print('last line')\n"
)


@pytest.fixture
def full_home(new_home: Callable[..., Home]) -> Iterator[Home]:
    """A home whose runs lie on a disk of 4 MB."""
    home = new_home()
    with small_disk(home.state, "tmpfs", megabytes=4):
        yield home


def fill(disk: SmallDisk) -> str:
    disk.fill()
    return " and "


def use_up_inodes(disk: SmallDisk) -> str:
    disk.use_up_inodes()
    return " and 0 inodes free"


def make_read_only(disk: SmallDisk) -> str:
    disk.freeze(True)
    return " is read-only"


def make_room(disk: SmallDisk) -> None:
    disk.freeze(False)
    disk.make_room()


@dataclass
class Training:
    """A session, and a run that trains until its file `go on` is there; all runs lie on the disk."""

    kernel: Kernel
    disk: SmallDisk
    filesystem: str


@pytest.fixture
def training(new_home: Callable[..., Home], request: pytest.FixtureRequest) -> Iterator[Training]:
    home = new_home()
    with small_disk(home.state, request.param, inodes=600) as disk:
        kernel = Kernel(home)
        try:
            kernel.check("%sgpu_connect -n 2 --name work")
            kernel.check(TRAINS)
            eventually((home.work / "trains").exists, 30, "it does not train")
            yield Training(kernel, disk, request.param)
        finally:
            kernel.close()


@pytest.mark.needs_root
@pytest.mark.parametrize(
    ("training", "spoil"),
    [
        ("ext4", fill),
        pytest.param("ext4", use_up_inodes, marks=pytest.mark.slow),
        pytest.param("tmpfs", use_up_inodes, marks=pytest.mark.slow),
        pytest.param("ext4", make_read_only, marks=pytest.mark.slow),
    ],
    indirect=["training"],
)
def test_a_disk_that_takes_nothing_costs_others_nothing(training: Training, spoil: Callable[[SmallDisk], str]):
    kernel, home = training.kernel, training.kernel.home
    pool = home.pool_pid()
    says = spoil(training.disk)
    for body in ("%%distributed -n 2 --fresh\nprint('never')", "%%distributed --session work\nprint('never')"):
        reply = kernel.run(body)
        assert (reply.status, reply.ename) == ("error", "PoolError"), reply.story
        for word in ("can't record the run", str(home.state), training.filesystem, says, "SGPU_STATE_DIR"):
            assert word in reply.evalue, reply.story
    (found,) = doctor.state_directory(Settings(state_dir=str(home.state)))
    assert (found.level, found.name, "no run can be recorded" in found.text) == (Level.PROBLEM, "disk", True)
    assert says in found.text
    (home.work / "go on").touch()
    reply = kernel.check("%sgpu_attach")
    assert [reply.lines(rank)[-1] for rank in (0, 1)] == ["last line", "last line"]
    assert kernel.value("total.item() > 0") is True
    make_room(training.disk)
    reply = kernel.run("%%distributed --session work\nprint('after')")
    assert reply.status == "ok", reply.story
    assert home.pool_pid() == pool
    states = lambda: sorted(row.state for row in home.ledger().values())  # noqa: E731
    eventually(lambda: states() == ["running", "succeeded", "succeeded"], 5, lambda: str(states()))
    assert "Traceback" not in (home.state / "pool.log").read_text()


@pytest.mark.slow
@pytest.mark.needs_root
def test_a_pool_that_can_not_start_for_its_disk_says_so(new_home: Callable[..., Home]):
    home = new_home()
    with small_disk(home.state) as disk:
        disk.freeze(True)
        client = PoolClient(home)
        try:
            with pytest.raises(PoolError) as error:
                client.begin("1")
            for word in ("can't record the run", str(home.state), "is read-only", "SGPU_STATE_DIR"):
                assert word in error.value.message
            doctor = subprocess.run(
                [sys.executable, "-m", "sgpu_magic.cli", "doctor"],
                env=home.environ, capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            line = next(line for line in doctor.stdout.splitlines() if "no run can be recorded" in line)
            assert (doctor.returncode != 0, "is read-only" in line, "disk" in line) == (True, True, True), doctor.stdout
            disk.freeze(False)
            assert client.begin("1").ended().state is RunState.SUCCEEDED
        finally:
            client.close()
            disk.freeze(False)


@pytest.mark.slow
def test_a_pool_whose_runtime_directory_is_removed_is_found_again(new_home: Callable[..., Home]):
    home = new_home()
    client = PoolClient(home)
    run = client.begin("import os, time\nwhile not os.path.exists('go on'): time.sleep(0.01)", ranks=1)
    pool = home.pool_pid()
    shutil.rmtree(home.runtime)
    other = PoolClient(home)
    try:
        status = other.pool.status()
        assert status is not None
        assert (status.pid, home.pool_pid()) == (pool, pool)
        other.pool.cancel(run.run_id, "test")
        assert run.ended().state is RunState.CANCELLED
    finally:
        other.close()
        client.close()


@pytest.mark.slow
@pytest.mark.needs_root
def test_training_goes_on_and_returns_when_the_disk_is_full(full_home: Home):
    kernel = Kernel(full_home)
    try:
        cell = kernel.start(
            "%%distributed -n 2 --out total\n"
            "import time, torch, torch.distributed as dist\n"
            "total = torch.zeros(1)\n"
            "for step in range(300):\n"
            "    print('x' * 20_000)\n"
            "    total += dist.get_world_size()\n"
            "    dist.all_reduce(torch.ones(1))\n"
            "print('all printed', flush=True)\n"
            "import os\n"
            "while not os.path.exists('go on'): time.sleep(0.02)\n"
            "print('last line')\n"
        )
        # reported while the run goes on, with the output that follows
        cell.until_shown("No space left on device", 20)
        for rank in (0, 1):
            cell.until_shown(f"[{rank}] all printed", 20)
        assert "the run continues" in cell.reply.text
        (kernel.home.work / "go on").touch()
        reply = cell.wait(30)
        assert reply.status == "ok", reply.story
        assert "succeeded" in reply.text
        assert [reply.lines(rank)[-1] for rank in (0, 1)] == ["last line", "last line"]
        assert kernel.value("total.item()") == 600.0
        notes = [line for line in reply.text.splitlines() if "the log of rank" in line]
        assert len(notes) in (1, 2), reply.text
        assert "ends here: No space left on device; the run continues" in notes[0]
    finally:
        kernel.close()
