"""Ranks that die without an exception: the cause, their last line and last output; the others are released."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from culprits import Culprit
from kernels import Kernel, Reply
from time_limits import GRACE_S

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")

# the stack of rank 1 at its death has two functions of the cell
WAIT_IN_TWO = (
    "import os, time, torch.distributed as dist\n"
    "def outer(): inner()\n"
    "def inner():\n"
    "    print('step 1', flush=True); print('step 2', flush=True)\n"
    "    time.sleep(0.4)\n"
    "    {death}\n"
    "dist.barrier()\n"
    "if rank == 1: outer()\n"
    "dist.barrier()"
)


def after_begin(reply: Reply) -> float:
    """Seconds that the run itself took, as it says."""
    found = re.search(r"failed after ([\d.]+) (ms|s)", reply.evalue)
    assert found, reply.story
    return float(found[1]) / (1000 if found[2] == "ms" else 1)


def check_next(kernel: Kernel, ranks: int = 2) -> None:
    assert kernel.check(f"%%distributed -n {ranks}\nprint('next')").lines(ranks - 1) == ["next"]


# ---------------------------------------------------------------- each kind of death


@pytest.mark.parametrize(
    ("death", "says"),
    [
        ("os._exit(3)", r"exited with code 3 before its cell ended"),
        (
            "os.kill(os.getpid(), 9)",
            r"was killed by SIGKILL: another process or the system killed it \(it held [\d.]+ of \d+ GB\)",
        ),
        ("os.abort()", r"was killed by SIGABRT: C code aborted"),
        ("import ctypes; ctypes.string_at(0)", r"was killed by SIGSEGV: a crash in C code"),
        ("os.kill(os.getpid(), 7)", r"was killed by SIGBUS"),
    ],
    ids=["_exit", "KILL", "abort", "SEGV", "BUS"],
)
def test_death_is_told_whole(kernel: Kernel, death: str, says: str):
    count = kernel.check("pass").execution_count + 1
    reply = kernel.run("%%distributed -n 4\n" + WAIT_IN_TWO.format(death=death))
    assert reply.ename == "WorkerDied", reply.story
    assert after_begin(reply) < 0.4 + GRACE_S
    reported = reply.traceback
    assert re.search(rf"rank 1 of 4 \(process \d+\) {says}", reported), reported
    # C code crashes at its own line; a kill may be seen 50 ms before
    line = "[67]" if "kill" in death else "7"
    assert re.search(rf"its last Python line: Cell In\[{count}\], line {line}, in inner: ", reported), reported
    assert re.search(r"its last output: step 1\s+step 2", reported), reported
    assert re.search(r"ranks 0, 2, 3 were released from barrier \(line 10\)", reported), reported
    # faulthandler's own text is not shown as the rank's output
    assert reply.lines(1) == ["step 1", "step 2"]
    check_next(kernel, 4)


def test_stack_of_a_dead_rank_stands_in_its_failure(kernel: Kernel):
    body = WAIT_IN_TWO.format(death="os.kill(os.getpid(), 11)")
    kernel.check(
        "from sgpu_magic.errors import WorkerDied\n"
        "try:\n"
        f"    get_ipython().run_cell_magic('distributed', '-n 2', {body!r})\n"
        "except WorkerDied as error:\n"
        "    told = error.remote_traceback"
    )
    reported = kernel.value("told")
    # all frames of the cell in either order, and none below the cell
    for word in ("in inner", "in outer"):
        assert word in reported, reported
    for word in ("interactiveshell", "zygote", "sgpu_magic"):
        assert word not in reported


def test_overflow_of_the_c_stack(kernel: Kernel):
    # each level takes C stack: Python calls C, which calls Python
    reply = kernel.run(
        "%%distributed -n 2\n"
        "import ctypes, sys, torch.distributed as dist\n"
        "sys.setrecursionlimit(10_000_000)\n"
        "kind = ctypes.CFUNCTYPE(None)\n"
        "def down(): kind(down)()\n"
        "if rank == 1: down()\n"
        "dist.barrier()"
    )
    assert reply.ename == "WorkerDied", reply.story
    assert re.search(r"rank 1 of 2 \(process \d+\) was killed by SIGSEGV: .* or a stack overflow", reply.traceback)
    assert "line 5, in down: def down(): kind(down)()" in reply.traceback
    check_next(kernel)


def test_two_deaths_the_first_is_told_whole_and_the_other_in_a_line(kernel: Kernel):
    reply = kernel.run(
        "%%distributed -n 3\n"
        "import os, time, torch.distributed as dist\n"
        "dist.barrier()\n"
        "if rank == 2: os._exit(3)\n"
        "if rank == 1:\n"
        "    try: time.sleep(600)\n"
        "    finally: os._exit(4)\n"  # when it is stopped
        "dist.barrier()"
    )
    assert re.search(r"rank 2 of 3 \(process \d+\) exited with code 3", reply.evalue), reply.story
    others = [line for line in reply.traceback.splitlines() if "rank 1: exited with code 4" in line]
    assert len(others) == 1, reply.traceback
    assert "os._exit(4)" not in reply.traceback


def test_sys_exit_with_a_code_names_the_rank(kernel: Kernel):
    culprit = Culprit(kernel, "leaves")
    culprit.start(
        "-n 2",
        f"import sys, torch.distributed as dist\nif rank == 1:\n    {culprit.waits}\n    sys.exit(3)\ndist.barrier()",
    )
    reply = culprit.fails("rank 0 waits in barrier")
    assert "SystemExit" in reply.ename + reply.evalue
    assert "rank 1 of 2" in reply.traceback
    assert "rank 0 was released from barrier" in reply.shown
    check_next(kernel)


def test_crash_of_a_child_process_is_output_of_its_rank(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 2\n"
        "import ctypes, os\n"
        "if rank == 1:\n"
        "    pid = os.fork()\n"
        "    if pid == 0: ctypes.string_at(0)\n"
        "    print('child', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert "child -11" in reply.lines(1)
    assert any("Segmentation fault" in line for line in reply.lines(1)), reply.story


# ---------------------------------------------------------------- memory


@pytest.fixture
def small_memory_group() -> Iterator[Path]:
    """A memory group of 400 MB, without swap."""
    if not (MEMORY_GROUPS / "memory.limit_in_bytes").exists():
        pytest.skip("needs memory cgroups of version 1 at /sys/fs/cgroup/memory")
    group = MEMORY_GROUPS / f"sgpu-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("400M")
    except OSError as error:
        pytest.skip(f"may not make a memory group: {error}")
    try:
        (group / "memory.memsw.limit_in_bytes").write_text("400M")
    except OSError:
        if Path("/proc/swaps").read_text().count("\n") > 1:
            group.rmdir()
            pytest.skip("the machine has swap that can't be kept out of the group")
    yield group
    group.rmdir()


def test_the_out_of_memory_killer_is_named(kernel: Kernel, small_memory_group: Path):
    reply = kernel.run(
        "%%distributed -n 2\n"
        "import os, time, torch.distributed as dist\n"
        "kept = []\n"
        "if rank == 1:\n"
        f"    open('{small_memory_group}/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "    while True:\n"
        "        kept.append(b'x' * 10_000_000)\n"
        "dist.barrier()"
    )
    assert reply.ename == "WorkerDied", reply.story
    assert re.search(
        r"rank 1 of 2 \(process \d+\) was killed by SIGKILL: the system's out-of-memory killer ended it "
        r"\(it held 0\.\d of \d+ GB\)",
        reply.traceback,
    ), reply.traceback
    check_next(kernel)


# ---------------------------------------------------------------- what the others do meanwhile


OTHERS = {
    "all_reduce": "dist.all_reduce(torch.ones(1))",
    "barrier": "dist.barrier()",
    "sleep": "time.sleep(600)",
    "DataLoader": ("for _ in torch.utils.data.DataLoader(Slow(), num_workers=2): pass"),
    "subprocess": "import subprocess; subprocess.run(['sleep', '600'])",
}


@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS.keys())
def test_an_error_frees_ranks_that_do_something_else(kernel: Kernel, others: str):
    reply = kernel.run(
        "%%distributed -n 2\n"
        "import time, torch, torch.distributed as dist\n"
        "class Slow(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 100\n"
        "    def __getitem__(self, index): time.sleep(600)\n"
        "dist.barrier()\n"
        "if rank == 1:\n"
        "    time.sleep(0.4)\n"
        "    raise ValueError('NaN in batch 118')\n"
        f"{others}"
    )
    assert (reply.ename, reply.evalue) == ("ValueError", "NaN in batch 118"), reply.story
    assert reply.seconds < 0.4 + GRACE_S
    check_next(kernel)
