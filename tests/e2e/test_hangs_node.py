"""Ranks that wait for each other: said by itself, at the time-out, and by nobody when the run moves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest
from kernels import Home, Kernel, eventually
from time_limits import GRACE_S

from sgpu_magic.agent.watch.stack_taking import find_py_spy
from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.events import EventBody, RunEnded
from sgpu_magic.wire.rank_events import RankStack, Resumed, Stalled

HOME_VARIABLES = {"SGPU_STALL_S": "1"}

# ranks 0, 2 and 3 come to the fourth all_reduce, rank 1 is in `load`
ONE_IS_LATE = (
    "import time, torch, torch.distributed as dist\n"
    "def load():\n"
    "    {late}\n"
    "for step in range(4):\n"
    "    if step == 3 and rank == 1: load()\n"
    "    dist.all_reduce(torch.ones(1))\n"
)


def bodies(home: Home, kind: type[EventBody]) -> list[EventBody]:
    """Events of this kind of the newest run."""
    newest = home.run_dir(list(home.ledger())[-1])
    return [event.body for event, _ in EventFile(newest).new_events() if isinstance(event.body, kind)]


def py_spy_may_look() -> bool:
    """Whether py-spy is here and this machine lets it look into other processes."""
    if not find_py_spy():
        return False
    with subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        command = [find_py_spy(), "dump", "--json", "--nonblocking", "--pid", str(process.pid)]
        looked = subprocess.run(command, capture_output=True, check=False)
        process.kill()
    return looked.returncode == 0


def stacks_at_the_end(home: Home) -> Sequence[RankStack]:
    (ended,) = bodies(home, RunEnded)
    assert isinstance(ended, RunEnded)
    return ended.stacks


# ---------------------------------------------------------------- said by itself


def test_ranks_that_wait_are_told_of(kernel: Kernel):
    late = "while not os.path.exists('told'): time.sleep(0.01)\n    raise OSError('no such file')"
    cell = kernel.start("%%distributed -n 4 --name late\nimport os\n" + ONE_IS_LATE.format(late=late))
    waiting = r"no progress for \d+(\.\d+)? s \(at [\d:]+\) ranks 0, 2, 3 wait in all_reduce #4 Cell In\[\d+\], line 9 "
    cell.until(lambda: re.search(waiting, " ".join(cell.reply.text.split())), 20, "it is not told")
    (stalled,) = bodies(kernel.home, Stalled)
    assert isinstance(stalled, Stalled)
    # at the loop's line, or in a function that it calls
    assert [(frame.function, frame.line) for frame in stalled.stacks[1].frames][-2:] == [("load", 5), ("<module>", 8)]
    (kernel.home.work / "told").touch()
    reply = cell.wait()
    assert (reply.ename, reply.evalue) == ("OSError", "no such file"), reply.story


@pytest.mark.slow
def test_ranks_that_wait_in_different_collectives(kernel: Kernel):
    reply = kernel.run(
        "%%distributed -n 3\n"
        "import time, torch, torch.distributed as dist\n"
        "second = dist.new_group([0, 1, 2])\n"
        "if rank == 0: dist.all_reduce(torch.ones(1))\n"
        "elif rank == 1: dist.barrier(second)\n"
        "time.sleep(2.5)\n"
        "raise OSError('gone')"
    )
    told = " ".join(reply.text.split())
    assert re.search(r"rank 0 waits in all_reduce #1", told), told
    assert re.search(r"rank 1 waits in barrier #1", told), told


@pytest.mark.slow
def test_a_run_that_goes_on_by_itself_is_not_stalled_any_more(kernel: Kernel):
    kernel.check(
        "%%distributed -n 4\n" + ONE_IS_LATE.format(late="time.sleep(2.5)") + "print('through', flush=True)\n"
        "time.sleep(0.2)"
    )
    assert len(bodies(kernel.home, Stalled)) == 1
    assert len(bodies(kernel.home, Resumed)) == 1


@pytest.mark.parametrize(
    "late",
    [
        pytest.param(
            "end = time.monotonic() + 3\n    while time.monotonic() < end: pass", id="computes", marks=pytest.mark.slow
        ),
        pytest.param(
            "import subprocess, sys; subprocess.run([sys.executable, '-c', "
            "'import time; end = time.monotonic() + 3\\nwhile time.monotonic() < end: pass'])",
            id="child computes",
        ),
        pytest.param(
            "for _ in range(12): time.sleep(0.25); print('.', flush=True)", id="prints", marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_that_moves_is_not_stalled(kernel: Kernel, late: str):
    kernel.check("%%distributed -n 2\n" + ONE_IS_LATE.format(late=late))
    assert bodies(kernel.home, Stalled) == []


@pytest.mark.slow
def test_looks_at_a_silent_run_do_not_cut_waits_in_c_short(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 2\n" + ONE_IS_LATE.format(late="import ctypes; print('left', ctypes.CDLL(None).sleep(3))")
    )
    assert reply.lines(1) == ["left 0"]
    (stalled,) = bodies(kernel.home, Stalled)
    assert isinstance(stalled, Stalled)
    assert [(frame.function, frame.line) for frame in stalled.stacks[1].frames] == [("load", 4), ("<module>", 6)]


@pytest.mark.slow
def test_a_silent_run_without_collectives_is_not_stalled(kernel: Kernel):
    kernel.check("%%distributed -n 2\nimport time; time.sleep(2.5)")
    assert bodies(kernel.home, Stalled) == []


# ---------------------------------------------------------------- the time-out


def test_time_out_tells_where_every_rank_is(kernel: Kernel):
    reply = kernel.run("%%distributed -n 4 --timeout 0.6s\n" + ONE_IS_LATE.format(late="time.sleep(600)"))
    assert reply.ename == "RunTimeout"
    assert reply.seconds < 0.6 + GRACE_S
    stacks = stacks_at_the_end(kernel.home)
    assert [stack.rank for stack in stacks] == [0, 1, 2, 3]
    for stack in stacks:
        assert stack.problem is None
        assert stack.frames[-1].file.startswith("<ipython-input-")
        assert not [frame for frame in stack.frames if "IPython" in frame.file or "sgpu_magic" in frame.file]
        assert stack.collective is not None
    late = stacks[1]
    assert [(frame.function, frame.line) for frame in late.frames] == [("load", 4), ("<module>", 6)]
    assert [(s.collective.name, s.collective.seq, s.collective.pending) for s in stacks if s.collective] == [
        ("all_reduce", 4, True),
        ("all_reduce", 3, False),
        ("all_reduce", 4, True),
        ("all_reduce", 4, True),
    ]


def test_rank_that_holds_the_interpreter_in_c_answers(kernel: Kernel):
    kernel.run(
        "%%distributed -n 2 --timeout 0.8s\n"
        "import ctypes\n"
        "def stuck():\n"
        "    ctypes.PyDLL(None).sleep(3)\n"  # does not give the interpreter away
        "if rank == 1: stuck()\n"
        "else:\n"
        "    import time; time.sleep(600)"
    )
    stack = stacks_at_the_end(kernel.home)[1]
    assert stack.frames[0].function == "stuck"
    assert stack.frames[0].line == 4
    # only its helper thread could read the flight recorder
    assert stack.collective is None


@pytest.mark.slow
def test_stopped_rank_is_looked_into_from_outside(kernel: Kernel):
    cell = kernel.start(
        "%%distributed -n 2 --timeout 1.2s\n"
        "import os, time\n"
        "def load():\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(600)\n"
        "load()"
    )
    cell.until(lambda: cell.reply.lines(1))
    pid = int(cell.reply.lines(1)[0])
    os.kill(pid, signal.SIGSTOP)
    reply = cell.wait(10)
    assert reply.ename == "RunTimeout"
    assert reply.seconds < 1.2 + GRACE_S
    stack = stacks_at_the_end(kernel.home)[1]
    if py_spy_may_look():
        assert [(frame.function, frame.line) for frame in stack.frames] == [("load", 5), ("<module>", 6)]
    else:
        assert stack.problem == "its process is stopped (SIGSTOP or a debugger)"


def test_user_code_that_takes_every_signal_away_is_not_killed_by_the_question(kernel: Kernel):
    kernel.run(
        "%%distributed -n 2 --timeout 0.8s\n"
        "import signal, time\n"
        "for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1): signal.signal(number, signal.SIG_DFL)\n"
        "time.sleep(600)"
    )
    (ended,) = bodies(kernel.home, RunEnded)
    assert isinstance(ended, RunEnded)
    assert ended.state is RunState.TIMED_OUT
    assert [bool(stack.frames or stack.problem) for stack in ended.stacks] == [True, True]


# ---------------------------------------------------------------- the flight recorder


@pytest.mark.slow
def test_flight_recorder_that_the_user_has_switched_off(kernel: Kernel):
    kernel.check("import os; os.environ['TORCH_FR_BUFFER_SIZE'] = '0'")
    try:
        # a new environment needs a new zygote, and the timeout counts from the start
        kernel.check("%%distributed -n 2\npass")
        reply = kernel.run("%%distributed -n 2 --timeout 1s\n" + ONE_IS_LATE.format(late="time.sleep(600)"))
        assert reply.ename == "RunTimeout"
        assert [stack.collective for stack in stacks_at_the_end(kernel.home)] == [None, None]
        # the stack still shows it
        assert re.search(r"rank 0 +waits in all_reduce", reply.text), reply.text
    finally:
        kernel.check("del os.environ['TORCH_FR_BUFFER_SIZE']")
    eventually(lambda: kernel.check("%%distributed -n 2\npass"))
