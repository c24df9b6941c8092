"""Collectives that end without an error when they are aborted, as NCCL's do: what the user sees, and what is kept."""

from __future__ import annotations

from pathlib import Path

import nccl_manners
from kernels import Kernel, eventually

BREAK_OFF = (
    "import time\n"
    "if rank == 1:\n    time.sleep(0.5)\n    raise ValueError('a bad batch')\n"
    "loss = torch.ones(1)\nbehave(blocks=True, tears_down=in_session)\ndist.all_reduce(loss)\n"
)


def test_a_checkpoint_is_not_overwritten_with_what_an_aborted_collective_left(kernel: Kernel, tmp_path: Path):
    checkpoint = tmp_path / "best"
    checkpoint.write_text("0.5")
    save = f"while True: open({str(checkpoint)!r}, 'w').write(str(loss.item()))"
    reply = kernel.run(f"%%distributed -n 2\n{nccl_manners.SOURCE}in_session = False\n{BREAK_OFF}{save}")
    assert (reply.ename, reply.evalue) == ("ValueError", "a bad batch")
    assert checkpoint.read_text() == "0.5"


def test_a_session_keeps_the_ranks_that_an_abort_would_tear_down(kernel: Kernel):
    kernel.check("%sgpu_connect -n 2")
    try:
        kernel.check(f"%%distributed\n{nccl_manners.SOURCE}model, in_session = f'trained on {{rank}}', True")
        reply = kernel.run(f"%%distributed\n{BREAK_OFF}")
        assert (reply.ename, reply.evalue) == ("ValueError", "a bad batch")
        assert kernel.check("%%rank 0\nprint(model)").lines(0) == ["trained on 0"]
    finally:
        kernel.check("%sgpu_disconnect")


def test_a_collective_that_holds_the_interpreters_lock_is_stopped(kernel: Kernel):
    """Nothing in the rank can react, so its stack is read from outside, and the interrupt ends it."""
    cell = kernel.start(
        f"%%distributed -n 2\n{nccl_manners.SOURCE}print('up', flush=True)\nbehave(holds=True)\ndist.barrier()"
    )
    cell.until_shown("[0] up")
    pids = kernel.home.rank_pids()
    kernel.interrupt()
    reply = cell.wait(10)
    assert reply.status == "error"
    assert "cancelled" in reply.text + reply.evalue
    eventually(lambda: not set(pids) & set(kernel.home.processes()), 10, "the ranks are gone")
