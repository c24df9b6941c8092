"""Where ranks are that wait for each other: asked for, told by the view itself, and at a time limit."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from kernels import Home, Kernel, eventually

HOME_VARIABLES = {"SGPU_STALL_S": "1"}

# line 1 is the magic's
ONE_IS_MISSING = (
    "import time, torch\n"  # 2
    "import torch.distributed as dist\n"  # 3
    "def load_batch(path):\n"  # 4
    "    time.sleep(600)\n"  # 5
    "t = torch.ones(1)\n"  # 6
    "dist.all_reduce(t)\n"  # 7
    "print('up', flush=True)\n"  # 8
    "if rank == 1:\n"  # 9
    "    load_batch('x')\n"  # 10
    "dist.all_reduce(t)\n"  # 11
)


def plain_lines(text: str) -> list[str]:
    """The lines without their columns' gaps and without the cell's number."""
    return [re.sub(r"In\[\d+\]", "In[N]", " ".join(line.split())) for line in text.splitlines()]


def test_stacks_of_a_run_are_grouped_by_what_the_ranks_do(kernel: Kernel, new_kernel: Callable[..., Kernel]):
    other = new_kernel()
    cell = kernel.start(f"%%distributed -n 4\n{ONE_IS_MISSING}")
    for rank in range(4):
        cell.until_shown(f"[{rank}] up")
    run = kernel.home.runs[-1]
    for line in (f"%sgpu_stacks {run}", "%sgpu_stacks"):
        reply = other.check(line)
        lines = plain_lines(reply.text)
        assert re.fullmatch(rf"run {run[:4]} \(at \d\d:\d\d:\d\d\)", lines[0])
        assert "ranks 0, 2, 3 wait in all_reduce #2 Cell In[N], line 11 dist.all_reduce(t)" in lines
        assert "rank 1 is in load_batch Cell In[N], line 5 time.sleep(600)" in lines
        assert "rank 1 has not reached all_reduce #2" in lines
        # the whole stacks, from the cell's first line on
        at = lines.index("rank 1 is in load_batch")
        assert lines[at + 1 : at + 5] == [
            "Cell In[N], line 10",
            "load_batch('x')",
            "Cell In[N], line 5, in load_batch",
            "time.sleep(600)",
        ]
        assert "rank.py" not in reply.text
        assert "not reached all_reduce #2" in reply.html
    done = subprocess.run(
        [sys.executable, "-m", "sgpu_magic.cli", "stacks", run[:5]],
        env=kernel.home.environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "rank 1 has not reached all_reduce #2" in done.stdout
    kernel.interrupt()
    assert cell.wait(10).status == "error"


def test_the_view_says_by_itself_that_ranks_wait_and_takes_it_back(kernel: Kernel, home: Home):
    cell = kernel.start(
        "%%distributed -n 2\n"
        "import os, time, torch\n"
        "import torch.distributed as dist\n"
        "t = torch.ones(1)\n"
        "dist.all_reduce(t)\n"
        "print('up', flush=True)\n"
        "if rank == 1:\n"
        "    while not os.path.exists('go-on'): time.sleep(0.2)\n"
        "dist.all_reduce(t)\n"
        "print('through')\n"
        "while not os.path.exists('end'): time.sleep(0.02)\n"
    )
    cell.until_shown("no progress for")
    shown = plain_lines(cell.reply.text)
    assert any(text.startswith("rank 0 waits in all_reduce #2") for text in shown), cell.reply.story
    assert "rank 1 has not reached all_reduce #2 · the Stacks button shows everything" in shown
    (home.work / "go-on").touch()
    cell.until(lambda: "no progress" not in cell.reply.text, 10, "it is taken back")
    (home.work / "end").touch()
    reply = cell.wait()
    assert reply.status == "ok"
    assert "there was no progress for" in reply.text
    assert reply.lines(0) == ["up", "through"]


def test_an_interrupted_run_keeps_which_rank_had_not_come(kernel: Kernel):
    cell = kernel.start(f"%%distributed -n 2\n{ONE_IS_MISSING}")

    def waits() -> bool:
        views = [output.view for output in cell.reply.outputs if output.view is not None]
        cards = [card for view in views for card in view.snapshot.get("ranks", ())]
        return any(card["last"] == "waits in all_reduce" for card in cards)

    cell.until(waits, 30, "rank 0 says that it waits")
    kernel.interrupt()
    text = " ".join(cell.wait(20).text.split())
    assert re.search(
        r"when it was cancelled \(at [\d:]+\): rank 1 has not reached all_reduce #2; rank 0 waits in", text
    )
    assert "rank 1 is in load_batch" in text


@pytest.mark.slow
def test_a_time_limit_shows_where_the_ranks_were(kernel: Kernel):
    reply = kernel.run(f"%%distributed -n 2 --timeout 2s\n{ONE_IS_MISSING}")
    assert reply.ename == "RunTimeout"
    assert "rank 1 has not reached all_reduce #2" in reply.evalue
    text = " ".join(reply.text.split())
    assert "timed out" in text
    assert "rank 0 waits in all_reduce #2" in text
    assert "rank 1 is in load_batch" in text
    caught = kernel.run(
        "try:\n"
        f"    get_ipython().run_cell_magic('distributed', '-n 2 --ui none --timeout 2s', {ONE_IS_MISSING!r})\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error.remote_traceback)"
    )
    assert "RunTimeout" in caught.streams
    assert "in load_batch" in caught.streams


def test_a_death_says_where_the_rank_was(kernel: Kernel):
    reply = kernel.run(
        "%%distributed -n 2\n"
        "import os, signal, time\n"
        "def build(cache):\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "print('step 7', flush=True)\n"
        "if rank == 1: build({})\n"
        "time.sleep(600)"
    )
    assert reply.ename == "WorkerDied"
    assert "SIGSEGV" in reply.evalue
    assert "its last Python line: Cell In[" in reply.evalue
    assert "line 4, in build: os.kill(os.getpid(), signal.SIGSEGV)" in reply.evalue
    assert "its last output: step 7" in reply.evalue
    assert reply.evalue.count("its last") == 2
    assert reply.text.count("its last Python line") == 1
    caught = kernel.check(
        f"try: get_ipython().run_line_magic('sgpu_attach', '{kernel.home.runs[-1]} --ui none')\n"
        "except Exception as error: print(error.remote_traceback)"
    )
    assert plain_lines(caught.streams) == [
        "Cell In[N], line 6",
        "if rank == 1: build({})",
        "Cell In[N], line 4, in build",
        "os.kill(os.getpid(), signal.SIGSEGV)",
    ]


def test_runs_without_ranks_have_no_stacks(kernel: Kernel):
    assert kernel.run("%sgpu_stacks ffffffff").ename == "RunUnknown"
    kernel.check("%%distributed -n 1\npass")
    # its ranks take a moment to leave
    eventually(lambda: kernel.run("%sgpu_stacks").ename == "RunUnknown", 5, "no run is active")
