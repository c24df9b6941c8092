"""A full disk stops what is written down, and never the training."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from kernels import Home, Kernel

pytestmark = pytest.mark.slow

DISK_MB = 4


@pytest.fixture
def full_home(new_home: Callable[..., Home]) -> Iterator[Home]:
    """A home whose runs lie on a disk of 4 MB."""
    if sys.platform != "linux" or shutil.which("mount") is None:
        pytest.skip("needs mount(8)")
    home = new_home()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=0700", "sgpu-test", str(home.state)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        home.close()
        pytest.skip(f"may not mount: {mounted.stderr.strip()}")
    try:
        yield home
    finally:
        # the pool's logs lie there until its end
        subprocess.run(["umount", "-l", str(home.state)], check=True)


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
        # said while the run goes on, with what is printed after it
        cell.until_shown("No space left on device", 20)
        for rank in (0, 1):
            cell.until_shown(f"[{rank}] all printed", 20)
        assert "the run goes on" in cell.reply.text
        (kernel.home.work / "go on").touch()
        reply = cell.wait(30)
        assert reply.status == "ok", reply.story
        assert "succeeded" in reply.text
        assert [reply.lines(rank)[-1] for rank in (0, 1)] == ["last line", "last line"]
        assert kernel.value("total.item()") == 600.0
        notes = [line for line in reply.text.splitlines() if "the log of rank" in line]
        assert len(notes) in (1, 2), reply.text
        assert "ends here: No space left on device; the run goes on" in notes[0]
    finally:
        kernel.close()
