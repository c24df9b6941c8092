"""What becomes of a run whose rank fails on the GPU: out of memory, killed in a kernel, ended by the driver."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import real_gpus
from driver_errors import ENDLESS_KERNEL, FAILED_ASSERT, ILLEGAL_ADDRESS, WORKS
from kernels import Cell, Kernel, Reply, eventually
from time_limits import GRACE_S

pytestmark = pytest.mark.needs_gpu

# line 1 is the magic's
OUT_OF_MEMORY = """import torch
free, total = torch.cuda.mem_get_info()
def fill():
    first = torch.empty(int(0.6 * total), dtype=torch.uint8, device=device)
    second = torch.empty(int(0.6 * total), dtype=torch.uint8, device=device)
fill()"""


def works(kernel: Kernel, options: str = "-n 1") -> None:
    assert kernel.check(f"%%distributed {options}\n{WORKS}", 120).lines(0) == ["works 8"]


def failed_in_cuda(reply: Reply, says: str) -> None:
    """The failure is the driver's error, by torch's own type, with what it means and what helps."""
    assert reply.status == "error", reply.story
    assert reply.ename in ("AcceleratorError", "RuntimeError"), reply.story
    assert says in reply.shown
    assert "This error destroyed the CUDA context of rank 0: every further CUDA call in its process fails." in (
        reply.traceback
    )


# ---------------------------------------------------------------- out of memory


def test_out_of_memory_tells_what_held_it(kernel: Kernel):
    reply = kernel.run(f"%%distributed -n 1\n{OUT_OF_MEMORY}", 120)
    assert reply.ename == "OutOfMemoryError", reply.story
    assert "CUDA out of memory" in reply.evalue
    assert re.search(r"line 6, in fill", reply.shown), reply.shown
    assert "memory when it failed" in reply.text
    assert "first (in fill, line 6)" in reply.text
    assert "See `%sgpu_help memory`." in reply.traceback
    works(kernel)


def test_the_next_cell_of_a_session_has_room_again(session: Kernel):
    session.check("%%distributed\nimport torch\nkept = torch.arange(5, device=device)", 60)
    reply = session.run(f"%%distributed\n{OUT_OF_MEMORY}", 120)
    assert reply.ename == "OutOfMemoryError", reply.story
    assert "first (in fill, line 6)" in reply.text
    reply = session.check(
        "%%distributed\n"
        "again = torch.empty(int(0.6 * total), dtype=torch.uint8, device=device)\n"
        "print(again.nbytes > 0.5 * total, kept.tolist())\n"
        "del again",
        60,
    )
    assert reply.lines(0) == ["True [0, 1, 2, 3, 4]"]


# ---------------------------------------------------------------- killed, or stopped, in a kernel


def start_endless(kernel: Kernel, options: str = "-n 1") -> tuple[Cell, int]:
    """Start a cell whose rank waits for a kernel that does not end; return it and the rank's process."""
    cell = kernel.start(f"%%distributed {options}\n{ENDLESS_KERNEL}")
    cell.until_shown("pid ", 60)
    found = re.search(r"pid (\d+)", cell.reply.text)
    assert found
    return cell, int(found[1])


def test_a_rank_killed_in_a_kernel_frees_the_gpu(kernel: Kernel):
    cell, pid = start_endless(kernel)
    os.kill(pid, signal.SIGKILL)
    reply = cell.wait(30)
    assert reply.ename == "WorkerDied", reply.story
    assert f"rank 0 of 1 (process {pid}) was killed by SIGKILL" in reply.evalue
    assert "its last Python line: Cell In[" in reply.evalue
    eventually(real_gpus.is_free, 30, "the rank's memory is free", poll_s=0.2)
    works(kernel)


def test_an_interrupt_frees_the_cell_from_a_kernel(kernel: Kernel):
    cell, pid = start_endless(kernel)
    pressed = time.monotonic()
    kernel.interrupt()
    reply = cell.wait(30)
    assert time.monotonic() - pressed < GRACE_S
    assert reply.ename == "RunCancelled", reply.story
    eventually(lambda: pid not in kernel.home.processes(), 20, "the rank is gone")
    works(kernel)


def test_a_time_limit_ends_a_kernel_and_says_where_the_rank_was(kernel: Kernel):
    reply = kernel.run(f"%%distributed -n 1 --timeout 8s --grace 1s\n{ENDLESS_KERNEL}", 60)
    assert reply.ename == "RunTimeout", reply.story
    assert "torch.cuda.synchronize()" in reply.text + reply.evalue
    works(kernel)


def test_a_session_survives_a_rank_killed_in_a_kernel(session: Kernel):
    cell, pid = start_endless(session, "")
    os.kill(pid, signal.SIGKILL)
    assert cell.wait(30).ename == "WorkerDied", cell.reply.story
    reply = session.run("%%distributed\n1")
    assert reply.ename == "SessionError", reply.story
    assert "%sgpu_restart --rank 0" in reply.evalue
    session.check("%sgpu_restart --rank 0", 90)
    works(session, "")


def test_a_session_is_free_after_an_interrupt_in_a_kernel(session: Kernel):
    cell, _ = start_endless(session, "")
    pressed = time.monotonic()
    session.interrupt()
    reply = cell.wait(30)
    assert time.monotonic() - pressed < GRACE_S
    assert reply.ename == "RunCancelled", reply.story
    session.check("%sgpu_restart --rank 0", 90)
    works(session, "")


def test_nothing_is_held_after_the_kernel_of_the_notebook_was_killed(cuda_kernel: Kernel):
    _, pid = start_endless(cuda_kernel)
    cuda_kernel.kill()
    eventually(lambda: pid not in cuda_kernel.home.processes(), 20, "the rank is gone")
    eventually(real_gpus.is_free, 30, "its memory is free", poll_s=0.2)


# ---------------------------------------------------------------- driver errors


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (ILLEGAL_ADDRESS, "CUDA error: an illegal memory access was encountered"),
        (FAILED_ASSERT, "CUDA error: device-side assert triggered"),
    ],
    ids=["illegal address", "assert"],
)
def test_an_error_of_the_driver_is_told_as_such(kernel: Kernel, body: str, says: str):
    reply = kernel.run(f"%%distributed -n 1\n{body}", 60)
    failed_in_cuda(reply, says)
    assert "Fix the code and run it again: the next run gets new processes." in reply.traceback
    assert "`--env CUDA_LAUNCH_BLOCKING=1` the line is exact" in reply.traceback
    works(kernel)


def test_with_launch_blocking_the_line_is_exact(kernel: Kernel):
    late = kernel.run(f"%%distributed -n 1\n{FAILED_ASSERT}", 60)
    failed_in_cuda(late, "device-side assert triggered")
    exact = kernel.run(f"%%distributed -n 1 --env CUDA_LAUNCH_BLOCKING=1\n{FAILED_ASSERT}", 60)
    failed_in_cuda(exact, "device-side assert triggered")
    assert re.search(r"-> 5 wrong = values\[index\]", exact.shown), exact.shown


@pytest.mark.parametrize("body", [ILLEGAL_ADDRESS, FAILED_ASSERT], ids=["illegal address", "assert"])
def test_a_session_goes_on_after_a_restart_of_the_rank(session: Kernel, body: str):
    session.check("%%distributed\nimport torch\nstep = 7\nlost = torch.ones(3, device=device)", 60)
    failed_in_cuda(session.run(f"%%distributed\n{body}", 60), "CUDA error: ")
    # the context is lost for every later cell, and each of them reports it
    again = session.run(f"%%distributed\n{WORKS}", 60)
    failed_in_cuda(again, "CUDA error: ")
    assert "`%sgpu_restart --rank 0` starts a new process in its place" in again.traceback
    # variables that need no GPU can still be saved
    assert session.check("%%distributed\nprint(step)").lines(0) == ["7"]
    session.check("%sgpu_restart --rank 0", 90)
    works(session, "")


def test_a_rank_is_on_its_gpu_whatever_the_notebook_has_set_for_itself(kernel: Kernel):
    kernel.check("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''")
    try:
        works(kernel)
    finally:
        kernel.check("del os.environ['CUDA_VISIBLE_DEVICES']")


def test_launch_blocking_in_a_session(kernel: Kernel):
    kernel.check("s = %sgpu_connect -n 1 --env CUDA_LAUNCH_BLOCKING=1\ns.wait(60)", 90)
    try:
        exact = kernel.run(f"%%distributed\n{FAILED_ASSERT}", 60)
        failed_in_cuda(exact, "device-side assert triggered")
        assert re.search(r"-> 5 wrong = values\[index\]", exact.shown), exact.shown
    finally:
        kernel.check("%sgpu_disconnect\ndel s")


def test_the_error_can_be_caught_by_its_type(kernel: Kernel):
    reply = kernel.check(
        "try:\n"
        f"    get_ipython().run_cell_magic('distributed', '-n 1 --ui none', {FAILED_ASSERT!r})\n"
        "except RuntimeError as error:\n"
        "    print('caught', error.rank, 'device-side assert' in str(error))",
        60,
    )
    assert "caught 0 True" in reply.streams
