"""Rank stacks: stack files, faulthandler's text, the flight recorder, and the decision that a run has stalled."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import eventually

from sgpu_magic.agent.memory_watch import MemoryWatch, peak_memory
from sgpu_magic.agent.ranks.rank_process import NotebookFrames, StackFile, parse
from sgpu_magic.agent.ranks.run_processes import CpuWatch, ProcessTable
from sgpu_magic.agent.ranks.stop import catches
from sgpu_magic.agent.watch.run_watch import RankLook, StallDetector
from sgpu_magic.agent.watch.stack_taking import find_py_spy, parse_py_spy
from sgpu_magic.system.processes import memory_limit
from sgpu_magic.wire.codec import AREA_BYTES, STACK_SIGNAL
from sgpu_magic.wire.rank_events import Collective, RankStack, Resumed, StackFrame, Stalled
from sgpu_magic.wire.run import CellSource
from sgpu_magic.worker.process.position import newest_collective

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# ---------------------------------------------------------------- faulthandler's text

CRASH_3_11 = """Fatal Python error: Segmentation fault

Thread 0x00007f0aa1ffb640 (most recent call first):
  File "/lib/threading.py", line 331 in wait
  File "/lib/threading.py", line 995 in _bootstrap

Current thread 0x00007f0ab4b8a740 (most recent call first):
  File "/lib/ctypes/__init__.py", line 519 in string_at
  File "<ipython-input-7-abc>", line 3 in load
  File "<ipython-input-7-abc>", line 5 in <module>
  File "/lib/IPython/core/interactiveshell.py", line 3577 in run_code

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""
ON_REQUEST_3_14 = """Thread 0x00007f0aa1ffb640 [pin memory] (most recent call first):
  File "/lib/threading.py", line 331 in wait

Thread 0x00007f0ab4b8a740 [python] (most recent call first):
  File "<ipython-input-7-abc>", line 3 in load
"""
WANTED = (
    StackFrame("/lib/ctypes/__init__.py", 519, "string_at"),
    StackFrame("<ipython-input-7-abc>", 3, "load"),
    StackFrame("<ipython-input-7-abc>", 5, "<module>"),
    StackFrame("/lib/IPython/core/interactiveshell.py", 3577, "run_code"),
)


def test_the_crashed_thread_counts():
    assert parse(CRASH_3_11) == WANTED
    assert parse(CRASH_3_11, 0x7F0AA1FFB640) == WANTED


def test_the_main_thread_counts_where_no_python_crashed():
    text = CRASH_3_11.replace("Current thread", "Thread")
    assert parse(text, 0x7F0AA1FFB640)[0].line == 331
    # without a known ident, the main thread is the one listed last
    assert parse(text) == WANTED


def test_names_of_threads_are_not_in_the_way():
    assert parse(ON_REQUEST_3_14) == (WANTED[1],)


def test_the_newest_of_several_answers_counts():
    text = (
        'Stack (most recent call first):\n  File "a.py", line 1 in f\n'
        'Stack (most recent call first):\n  File "a b.py", line 22 in <module>\n'
    )
    assert parse(text) == (StackFrame("a b.py", 22, "<module>"),)


@pytest.mark.parametrize("text", ["", "Fatal Python error: Aborted\n", "  no frame\n", '  File "cut'])
def test_text_without_frames(text: str):
    assert parse(text) == ()


# ---------------------------------------------------------------- the notebook's frames

CELL = CellSource(
    body="def load():\n    read()\nload()",
    magic_line="%%distributed",
    execution_count=7,
    linecache=(("/tmp/ipykernel_1/2.py", "def read():\n    open(path)", 3),),
)
TORCH = "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def test_what_is_below_the_cell_is_left_out():
    assert NotebookFrames(CELL).upwards(WANTED) == WANTED[:3]


def test_a_rank_outside_of_its_cell_shows_nothing_of_ours():
    frames = (StackFrame("/lib/threading.py", 9, "wait"), StackFrame("/x/sgpu_magic/worker/process/rank.py", 3, "run"))
    assert NotebookFrames(CELL).upwards(frames) == frames[:1]


def test_lines_read_as_in_a_traceback():
    notebook = NotebookFrames(CELL)
    assert notebook.describe(WANTED[1]) == "Cell In[7], line 3, in load: read()"
    assert notebook.describe(WANTED[2]) == "Cell In[7], line 5"
    assert notebook.describe(StackFrame("/tmp/ipykernel_1/2.py", 2, "read")) == (
        "Cell In[3], line 2, in read: open(path)"
    )
    assert notebook.describe(WANTED[0]) == "/lib/ctypes/__init__.py, line 519, in string_at"
    from_a_script = NotebookFrames(CellSource(body="x = 1"))
    assert from_a_script.describe(StackFrame("<ipython-input-1-a>", 1, "<module>")) == "the cell, line 1: x = 1"


def test_the_function_of_torch_that_the_cell_called():
    frames = (
        StackFrame(TORCH, 10, "_all_reduce"),
        StackFrame(TORCH, 20, "all_reduce"),
        StackFrame("/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", 83, "wrapper"),
        WANTED[2],
    )
    assert NotebookFrames(CELL).collective(frames) == "all_reduce"
    # torch frames outside the cell, such as a launcher's, do not count
    assert NotebookFrames(CELL).collective((WANTED[1], *frames[:2])) == ""


# ---------------------------------------------------------------- the stack file of a real process

RANK = """
import os, sys, time
from sgpu_magic.worker.process import position
sampler = position.install_stack_file(int(sys.argv[1]))
def inner():
    sampler.sample()
    print("sampled", flush=True)
    {end}
def outer():
    inner()
outer()
"""


@contextlib.contextmanager
def rank_like(end: str) -> Iterator[tuple[subprocess.Popen[str], StackFile]]:
    stack_file = StackFile(Path("/tmp"))
    command = [sys.executable, "-c", RANK.format(end=end), str(stack_file.fd)]
    with subprocess.Popen(
        command, pass_fds=(stack_file.fd,), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "sampled\n"
            yield process, stack_file
        finally:
            process.kill()
            stack_file.close()


def functions(frames: tuple[StackFrame, ...]) -> list[tuple[str, int]]:
    return [(frame.function, frame.line) for frame in frames]


def test_a_killed_process_leaves_its_last_stack():
    with rank_like("time.sleep(60)") as (process, stack_file):
        process.kill()
        process.wait(10)
        assert functions(stack_file.last_frames()) == [("inner", 6), ("outer", 10), ("<module>", 11)]


def test_os_exit_leaves_its_own_line():
    with rank_like("os._exit(3)") as (process, stack_file):
        assert process.wait(10) == 3
        assert functions(stack_file.last_frames()) == [("inner", 8), ("outer", 10), ("<module>", 11)]


def test_a_crash_leaves_its_own_line_and_says_nothing_on_stderr():
    with rank_like("os.abort()") as (process, stack_file):
        assert process.wait(10) == -signal.SIGABRT
        assert functions(stack_file.last_frames()) == [("inner", 8), ("outer", 10), ("<module>", 11)]
        assert process.stderr is not None
        assert process.stderr.read() == ""


@linux_only
def test_a_process_that_holds_the_interpreter_answers():
    # an expression that takes years and never releases the GIL
    with rank_like("__import__('re').match(r'(a+)+$', 'a' * 60 + 'b')") as (process, stack_file):
        assert catches(process.pid, STACK_SIGNAL) is True

        def asked() -> list[tuple[str, int]]:
            # each answer replaces the previous one
            stack_file.forget()
            process.send_signal(STACK_SIGNAL)
            eventually(lambda: stack_file.faulthandler_text().count("\n") >= 4, 5, stack_file.faulthandler_text)
            return functions(parse(stack_file.faulthandler_text()))[-3:]

        there = [("inner", 8), ("outer", 10), ("<module>", 11)]
        eventually(lambda: asked() == there, 10, "it does not come to its line")
        for _ in range(3):
            assert asked() == there
        assert os.fstat(stack_file.fd).st_size < AREA_BYTES + 1000
        assert process.poll() is None


@linux_only
def test_who_has_no_handler_is_known():
    with subprocess.Popen(["sleep", "60"]) as process:
        assert catches(process.pid, STACK_SIGNAL) is False
        process.kill()
    assert catches(process.pid, STACK_SIGNAL) is False


def test_a_fork_of_a_rank_tells_its_crash_on_stderr():
    child = "pid = os.fork() or os.abort(); os.waitpid(pid, 0); os._exit(0)"
    with rank_like(child) as (process, stack_file):
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert "Fatal Python error: Aborted" in process.stderr.read()
        assert stack_file.faulthandler_text() == ""


@linux_only
@pytest.mark.skipif(not find_py_spy(), reason="needs py-spy")
def test_py_spys_stack_of_a_stopped_process():
    with rank_like("time.sleep(60)") as (process, _):
        command = [find_py_spy(), "dump", "--json", "--nonblocking", "--pid", str(process.pid)]

        def stopped_stack() -> list[tuple[str, int]]:
            process.send_signal(signal.SIGSTOP)
            found = subprocess.run(command, capture_output=True, check=False)
            process.send_signal(signal.SIGCONT)
            if found.returncode:
                pytest.skip(f"py-spy may not look into processes here: {found.stderr.decode()}")
            return functions(parse_py_spy(found.stdout, process.pid))

        # the process may be stopped just before it sleeps
        eventually(lambda: stopped_stack() == [("inner", 8), ("outer", 10), ("<module>", 11)], 10, stopped_stack)
        assert parse_py_spy(b"{}", process.pid) == ()


# ---------------------------------------------------------------- the flight recorder


def entry(name: str, number: int, **others: object) -> dict[str, object]:
    base: dict[str, object] = {
        "profiling_name": name,
        "collective_seq_id": number,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "retired": True,
        "state": "scheduled",
        "time_created_ns": number * 10**9,
    }
    return base | others


def reported(*entries: dict[str, object], rehearsed: int = 0) -> tuple[Collective | None, float]:
    return newest_collective(json.dumps({"version": "2.10", "entries": entries, "pg_config": {}}), rehearsed)


def test_the_collective_that_is_not_done_is_the_current_one():
    found = reported(entry("gloo:all_reduce", 1), entry("gloo:barrier", 2, retired=False))
    assert found == (Collective(name="barrier", seq=2, pending=True), 2.0)


def test_nccl_waits_in_the_first_of_those_that_are_queued():
    queued = [entry("nccl:all_reduce", number, retired=False) for number in (5, 6, 7)]
    done = entry("nccl:all_reduce", 4, retired=False, state="completed")
    assert reported(done, *queued)[0] == Collective(name="all_reduce", seq=5, pending=True, queued=True)


def test_the_last_one_is_told_when_all_are_done():
    assert reported(entry("gloo:all_reduce", 1), entry("gloo:all_gather", 2))[0] == (
        Collective(name="all_gather", seq=2, pending=False)
    )


def test_collectives_of_before_the_run_do_not_count():
    assert reported(entry("gloo:all_reduce", 1), rehearsed=1) == (None, 0.0)
    found = reported(entry("gloo:all_reduce", 1), entry("gloo:all_reduce", 2), rehearsed=1)[0]
    assert found == Collective(name="all_reduce", seq=1, pending=False)


def test_groups_by_name_and_messages_by_their_own_number():
    named = entry("gloo:broadcast", 1, pg_id=1, process_group=["1", "tensor parallel"])
    assert reported(named, rehearsed=1)[0] == Collective(
        name="broadcast", seq=1, pending=False, group="tensor parallel"
    )
    unnamed = entry("gloo:broadcast", 1, pg_id=1, process_group=["1", "undefined"])
    assert reported(unnamed)[0] == Collective(name="broadcast", seq=1, pending=False, group="1")
    message = entry("nccl:recv 0<-1", 9, is_p2p=True, p2p_seq_id=4)
    assert reported(message)[0] == Collective(name="recv", seq=4, pending=False, queued=True)


def test_an_empty_recorder_tells_nothing():
    assert reported() == (None, 0.0)
    assert newest_collective(b"{}") == (None, 0.0)


# ---------------------------------------------------------------- stalled


def waits(rank: int, number: int = 41, entered_s: float | None = 100.0, idle_s: float = 0.0) -> RankLook:
    collective = Collective(name="all_reduce", seq=number, pending=True)
    return RankLook(RankStack(rank=rank, collective=collective), "all_reduce", 15, entered_s, idle_s)


def works(rank: int, idle_s: float = 100.0) -> RankLook:
    return RankLook(RankStack(rank=rank), at_line=4, idle_s=idle_s)


def test_a_run_has_stalled_when_some_wait_and_nobody_works():
    detector = StallDetector(30)
    found = detector.detect(100, 31.0, [waits(0), works(1), waits(2, entered_s=30.5)])
    assert isinstance(found, Stalled)
    assert found.seconds == 30.5
    assert [stack.rank for stack in found.stacks] == [0, 1, 2]
    assert detector.stalled
    # reported once
    assert detector.detect(110, 41.0, [waits(0), works(1), waits(2)]) is None


@pytest.mark.parametrize(
    "looks",
    [
        [waits(0), works(1, idle_s=3.0)],
        [works(0), works(1)],
        [waits(0, entered_s=2.0), works(1)],
    ],
    ids=["one works", "nobody waits", "has just come"],
)
def test_a_run_that_moves_has_not(looks: list[RankLook]):
    assert StallDetector(30).detect(100, 50.0, looks) is None


def test_output_is_progress():
    assert StallDetector(30).detect(100, 5.0, [waits(0), works(1)]) is None


def test_without_a_flight_recorder_the_place_must_stay_the_same():
    detector = StallDetector(30)
    assert detector.detect(100, 200.0, [waits(0, 0, None), works(1)]) is None
    assert detector.detect(120, 220.0, [waits(0, 1, None), works(1)]) is None
    assert detector.detect(140, 240.0, [waits(0, 1, None), works(1)]) is None
    assert isinstance(detector.detect(150, 250.0, [waits(0, 1, None), works(1)]), Stalled)


def test_a_wait_whose_beginning_is_unknown_counts_while_the_rank_uses_nothing():
    """`recv` and `new_group` are reported at the second look, not `stall_s` after the first."""
    detector = StallDetector(30)
    assert detector.detect(100, 31.0, [waits(0, 0, None, idle_s=30.5), works(1)]) is None
    assert isinstance(detector.detect(102, 33.0, [waits(0, 0, None, idle_s=32.5), works(1)]), Stalled)
    detector = StallDetector(30)
    assert detector.detect(100, 27.0, [waits(0, 0, None, idle_s=26.0), works(1)]) is None
    assert detector.detect(103, 30.0, [waits(0, 0, None, idle_s=29.0), works(1)]) is None


def test_a_rank_on_its_way_out_of_a_collective_does_not_wait():
    """It is still in the function, the recorder has the collective as done, and it was idle until then."""
    detector = StallDetector(30)
    assert detector.detect(100, 28.0, [waits(0, entered_s=28.0), works(1, idle_s=0.0)]) is None
    assert detector.detect(103, 31.0, [waits(0, entered_s=None, idle_s=31.0)]) is None


def test_a_changed_picture_is_told_again_and_movement_too():
    detector = StallDetector(30)
    assert isinstance(detector.detect(100, 50.0, [waits(0), works(1)]), Stalled)
    assert isinstance(detector.detect(110, 60.0, [waits(0), waits(1)]), Stalled)
    assert detector.detect(120, 70.0, [waits(0), works(1, idle_s=0.0)]) == Resumed()
    assert not detector.stalled
    assert detector.detect(121, 71.0, [waits(0), works(1, idle_s=0.0)]) is None
    assert isinstance(detector.detect(160, 110.0, [waits(0), works(1)]), Stalled)
    assert detector.record_progress() == Resumed()
    assert detector.record_progress() is None


def test_idle_time_counts_from_the_last_use():
    watch = CpuWatch()
    assert watch.sample(10, {1: 5.0, 2: 5.0}) == {1: 0.0, 2: 0.0}
    assert watch.sample(12, {1: 5.05, 2: 6.0}) == {1: 2.0, 2: 0.0}
    # the total falls when a child has ended
    assert watch.sample(14, {1: 5.05, 2: 5.5, 3: 0.0}) == {1: 4.0, 2: 0.0, 3: 0.0}
    assert watch.sample(16, {1: 5.1, 2: 5.5}) == {1: 6.0, 2: 2.0}


def test_looks_in_quick_succession_see_a_process_that_shares_its_core():
    watch = CpuWatch()
    # a fifth of a core: each interval adds no more than one tick of the system's clock
    idle = [watch.sample(0.05 * step, {1: 0.01 * step, 2: 0.002 * step}) for step in range(41)]
    assert max(seen[1] for seen in idle) < 0.3
    assert idle[-1][2] == pytest.approx(2.0)


@linux_only
def test_cpu_time_of_a_process_is_also_its_childrens():
    burn = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    table = ProcessTable()
    with subprocess.Popen([sys.executable, "-c", burn], start_new_session=True) as process:
        try:
            eventually(lambda: table.trees([process.pid])[process.pid].cpu_s > 0.3, 20)
            own = Path(f"/proc/{process.pid}/stat").read_bytes().rpartition(b")")[2].split()
            assert (int(own[11]) + int(own[12])) / os.sysconf("SC_CLK_TCK") < 0.3
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert table.trees([process.pid]) == {}


# ---------------------------------------------------------------- out of memory


@linux_only
def test_a_kill_with_memory_to_spare_was_somebodys():
    assert memory_limit() > 0
    watch = MemoryWatch()
    watch.begin()
    assert not watch.killed_since()
    assert watch.verdict(0, []) == "another process or the system killed it"
    assert watch.verdict(200_000_000, [os.getpid()]).startswith(
        "another process or the system killed it (it held 0.2 of "
    )


@linux_only
def test_a_kill_with_memory_nearly_full_was_most_likely_for_that():
    watch = MemoryWatch(24_000_000_000)
    assert watch.verdict(21_800_000_000, []) == "most likely out of memory (it held 21.8 of 24 GB)"
    # the other ranks' memory counts too
    own = peak_memory(os.getpid())
    watch = MemoryWatch(int(own * 1.5))
    assert watch.verdict(own // 2, [os.getpid()]).startswith("most likely out of memory")
