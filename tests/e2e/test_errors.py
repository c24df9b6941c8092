"""Errors of ranks in the notebook: the culprit, its own type, the cell's own lines."""

from __future__ import annotations

import os
import re

import pytest
from culprits import Culprit
from hostile_exceptions import HOSTILE
from kernels import Kernel, Reply
from process_table import resident_bytes
from time_limits import GRACE_S

DISTRIBUTED = "get_ipython().run_cell_magic('distributed', '-n 2 --ui none', {body!r})"


def line_of(reply: Reply) -> int:
    """The line of the cell that the arrow of the shown traceback points to."""
    found = re.search(r"^-+> (\d+) ", reply.shown, re.MULTILINE)
    assert found, reply.shown
    return int(found[1])


# ---------------------------------------------------------------- the culprit


def test_the_traceback_has_the_magics_line_as_it_is_in_the_cell(kernel: Kernel):
    reply = kernel.run("%%distributed -n 1\n# %%distributed stays a comment\n1 / 0")
    lines = [" ".join(line.split()) for line in reply.shown.splitlines()]
    assert "1 %%distributed -n 1" in lines
    assert "2 # %%distributed stays a comment" in lines


def test_culprit_is_shown_not_the_victims_in_the_barrier(kernel: Kernel):
    culprit = Culprit(kernel, "nan")
    culprit.start(
        "-n 4",
        "import torch.distributed as dist\n"
        "if rank == 2:\n"
        f"    {culprit.waits}\n"
        "    raise ValueError('NaN in batch 118')\n"
        "dist.barrier()\n"
        "print('ne' + 'ver')",
    )
    reply = culprit.fails("ranks 0, 1, 3 wait in barrier")
    assert (reply.ename, reply.evalue) == ("ValueError", "NaN in batch 118")
    assert reply.seconds < GRACE_S
    assert "rank 2 of 4 on " in reply.traceback
    assert re.search(r"^ranks? [013, ]+ w(as|ere) released from barrier \(line 6\)", reply.shown, re.MULTILINE)
    assert "rank 2 of 4" in reply.text
    assert "never" not in reply.text
    # the victims' messages about lost connections and interrupts are not shown
    for word in ("KeyboardInterrupt", "Connection", "gloo"):
        assert word not in reply.text.replace("(cpu, gloo)", ""), reply.text
    assert kernel.check("%%distributed -n 4\nprint('next')").lines(3) == ["next"]


def test_last_victim_is_not_blamed_when_the_culprit_is_slow_to_tell(kernel: Kernel):
    # gloo tells the victims at once when the culprit dies; the culprit's traceback takes longer to draw
    reply = kernel.run(
        "%%distributed -n 2\n"
        "import torch, torch.distributed as dist\n"
        "def deep(n):\n"
        "    if n == 0: raise OverflowError('deep down')\n"
        "    return deep(n - 1)\n"
        "if rank == 1:\n"
        "    dist.destroy_process_group()\n"
        "    deep(30)\n"
        "dist.all_reduce(torch.ones(1))"
    )
    assert (reply.ename, reply.evalue) == ("OverflowError", "deep down")


def test_two_ranks_fail_the_first_is_shown_the_other_is_a_line(kernel: Kernel):
    (kernel.home.work / "told").unlink(missing_ok=True)
    reply = kernel.run(
        "%%distributed -n 2\n"
        "import os, time\n"
        "class Told(KeyError):\n"
        "    def __str__(self):\n"
        "        open('told', 'w').close()\n"
        "        return 'of rank 1'\n"
        "if rank == 1: raise Told\n"
        # its text is formatted after the time of the first failure is recorded
        "while not os.path.exists('told'): time.sleep(0.01)\n"
        "raise KeyError('of rank 0')"
    )
    assert reply.ename == "Told"
    assert "of rank 1" in reply.evalue
    assert [line for line in reply.shown.splitlines() if line.startswith("rank 0: KeyError")], reply.shown


def test_an_exception_under_run_is_the_ranks_failure_and_the_others_are_released(kernel: Kernel):
    (kernel.home.work / "bad.py").write_text("step = 7\nraise ValueError(f'NaN in step {step}')\n")
    culprit = Culprit(kernel, "run-magic")
    culprit.start(
        "-n 2",
        "import torch.distributed as dist\n"
        "if rank == 1:\n"
        f"    {culprit.waits}\n"
        "    get_ipython().run_line_magic('run', 'bad.py')\n"
        "dist.barrier()",
    )
    reply = culprit.fails("rank 0 waits in barrier")
    assert (reply.ename, reply.evalue) == ("ValueError", "NaN in step 7")
    assert "bad.py:2" in reply.shown
    assert re.search(r"^rank 0 was released from barrier \(line 6\)", reply.shown, re.MULTILINE)
    assert reply.seconds < GRACE_S


def test_a_rank_that_is_interrupted_on_its_way_out_of_a_collective_was_released_from_it(kernel: Kernel):
    culprit = Culprit(kernel, "way-out")
    culprit.start(
        "-n 2",
        "import time, torch.distributed as dist\n"
        "if rank == 1:\n"
        f"    {culprit.waits}\n"
        "    raise ValueError('NaN')\n"
        "try:\n"
        "    dist.barrier()\n"
        "except RuntimeError:\n"
        # like a rank of a busy machine that gets the interrupt before it has left
        "    time.sleep(30)",
    )
    reply = culprit.fails("rank 0 waits in barrier")
    assert (reply.ename, reply.evalue) == ("ValueError", "NaN")
    assert re.search(r"^rank 0 was released from barrier \(line 9\)", reply.shown, re.MULTILINE), reply.shown


# ---------------------------------------------------------------- exceptions that do harm when they are described


def test_hostile_exceptions_fail_their_cells_and_nothing_else(kernel: Kernel):
    for name in ("concatenates_a_number", "__str___exits", "has_notes_5", "pickles_as_an_exit"):
        reply = kernel.run(f"%%distributed -n 2\n{HOSTILE[name]}")
        assert (reply.status, reply.ename) in (("error", "RemoteError"), ("error", "ValueError")), (name, reply.story)
        assert "raise " in reply.shown, name
        assert "exit code" not in reply.evalue, name


def test_300_MB_of_text_stay_in_a_file_of_the_run(kernel: Kernel):
    (agent,) = kernel.home.agent_pids()
    before = resident_bytes(agent) + resident_bytes(kernel.home.pool_pid())
    reply = kernel.run(f"%%distributed -n 1\n{HOSTILE['has_300_MB']}")
    assert reply.ename == "RemoteError"
    path = re.search(r"the whole text is in (\S+)", reply.shown)
    assert path, reply.shown[-2000:]
    assert os.stat(path[1]).st_size > 300_000_000
    os.unlink(path[1])
    assert len(reply.traceback) + len(reply.text) < 200_000
    assert resident_bytes(agent) + resident_bytes(kernel.home.pool_pid()) < before + 50_000_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_hostile_exceptions_in_cells(kernel: Kernel):
    (agent,) = kernel.home.agent_pids()
    before = resident_bytes(agent) + resident_bytes(kernel.home.pool_pid())
    for name, source in HOSTILE.items():
        reply = kernel.run(f"%%distributed -n 2\nkeep = 7\n{source}")
        assert reply.status == "error", (name, reply.story)
        assert reply.ename != "WorkerDied", (name, reply.evalue)
        assert len(reply.traceback) + len(reply.text) < 400_000, name
    assert resident_bytes(agent) + resident_bytes(kernel.home.pool_pid()) < before + 50_000_000
    assert kernel.check("%%distributed -n 2\nprint('next')").lines(1) == ["next"]


# ---------------------------------------------------------------- types


def test_builtin_type_and_attributes(kernel: Kernel):
    body = "if rank == 1: raise FileNotFoundError(2, 'gone', 'weights.pt')"
    kernel.check(
        "try:\n"
        f"    {DISTRIBUTED.format(body=body)}\n"
        "except FileNotFoundError as error:\n"
        "    told = [error.errno, error.filename, error.rank, error.run_id, error.remote_traceback]"
    )
    errno, filename, rank, run_id, text = kernel.value("told")
    assert (errno, filename, rank) == (2, "weights.pt", 1)
    assert run_id == kernel.home.runs[-1]
    assert "FileNotFoundError" in text
    assert "if rank == 1: raise" in text
    assert "\x1b" not in text


def test_notebook_class_is_caught_by_its_own_type(kernel: Kernel):
    kernel.check("class MyError(Exception):\n    def __init__(self, a, b): super().__init__(a, b); self.b = b")
    kernel.check(
        "try:\n"
        f"    {DISTRIBUTED.format(body='raise MyError(1, [rank])')}\n"
        "except MyError as error:\n"
        "    told = [type(error) is MyError, error.args[0], error.b == [error.rank]]"
    )
    assert kernel.value("told") == [True, 1, True]


def test_class_defined_in_the_cell_keeps_name_and_message(kernel: Kernel):
    reply = kernel.run("%%distributed -n 2\nclass OnlyThere(Exception): pass\nraise OnlyThere('lost')")
    assert "OnlyThere" in reply.traceback
    assert "lost" in reply.evalue


def test_exception_with_required_arguments_that_pickle_breaks(kernel: Kernel):
    reply = kernel.run(
        "%%distributed -n 1\n"
        "class Picky(Exception):\n"
        "    def __init__(self, code, detail):\n"
        "        super().__init__(f'{code}: {detail}')\n"
        "raise Picky(7, 'sad')"
    )
    assert reply.status == "error"
    assert "Picky" in reply.traceback
    assert "7: sad" in reply.evalue
    assert line_of(reply) == 5


def test_unpicklable_exception_still_tells_type_message_and_line(kernel: Kernel):
    body = (
        "import threading\n"
        "class Stuck(Exception):\n"
        "    def __reduce__(self): raise TypeError('never')\n"
        "raise Stuck('held by a lock')"
    )
    reply = kernel.run(f"%%distributed -n 2\n{body}")
    assert reply.ename == "RemoteError"
    assert "Stuck: held by a lock" in reply.evalue
    assert line_of(reply) == 5
    kernel.check(
        "from sgpu_magic.errors import RemoteError\n"
        "try:\n"
        f"    {DISTRIBUTED.format(body=body)}\n"
        "except RemoteError as error:\n"
        "    told = [error.type_name.rpartition('.')[2], 'held by a lock' in error.remote_traceback]"
    )
    assert kernel.value("told") == ["Stuck", True]


def test_cause_is_shown(kernel: Kernel):
    reply = kernel.run(
        "%%distributed -n 1\n"
        "try:\n"
        "    {}['missing']\n"
        "except KeyError as error:\n"
        "    raise RuntimeError('no config') from error"
    )
    assert (reply.ename, reply.evalue) == ("RuntimeError", "no config")
    assert "KeyError: 'missing'" in reply.shown
    assert "direct cause" in reply.shown


def test_exception_group_keeps_its_type(kernel: Kernel):
    kernel.check(
        "try:\n"
        f"    {DISTRIBUTED.format(body='raise ExceptionGroup(chr(109), [ValueError(1)])')}\n"
        "except* ValueError as group:\n"
        "    told = len(group.exceptions)"
    )
    assert kernel.value("told") == 1


def test_exception_group_is_shown_as_its_rank_drew_it(kernel: Kernel):
    """IPython prints groups itself, with the frames that they have in the kernel; a group of its own stays so."""
    body = "def parts():\n    raise ExceptionGroup('both', [ValueError(1), KeyError(2)])\nparts()"
    reply = kernel.run(f"%%distributed -n 1\n{body}")
    assert (reply.ename, reply.evalue) == ("ExceptionGroup", "both (2 sub-exceptions)")
    assert f"|   Cell In[{reply.execution_count}], line 3, in parts" in reply.shown
    assert "| KeyError: 2" in reply.shown
    assert "interactiveshell" not in reply.story
    plain = kernel.run(body)
    assert plain.status == "error"
    assert "Exception Group Traceback" in plain.text


# ---------------------------------------------------------------- lines


def test_line_numbers_are_the_editors(kernel: Kernel):
    count = kernel.check("pass").execution_count
    reply = kernel.run(
        "%%distributed -n 2\n"  # line 1
        "x = 1\n"
        "\n"
        "def broken():\n"
        "    return 1 / 0\n"  # line 5
        "\n"
        "if rank == 0: broken()"  # line 7
    )
    assert reply.ename == "ZeroDivisionError"
    assert f"Cell In[{count + 1}], line 7" in reply.shown
    assert f"Cell In[{count + 1}], line 5" in reply.shown
    assert "----> 7 if rank == 0: broken()" in reply.shown
    assert "----> 5     return 1 / 0" in reply.shown


def test_lines_of_a_function_of_another_cell(kernel: Kernel):
    defined = kernel.check("x = 1\n\ndef divide(a):\n    return a / 0").execution_count
    reply = kernel.run("%%distributed -n 1\ndivide(3)")
    assert f"Cell In[{defined}], line 4" in reply.shown
    assert "----> 4     return a / 0" in reply.shown
    assert "----> 2 divide(3)" in reply.shown


def test_leading_blank_lines_and_comments_count(kernel: Kernel):
    reply = kernel.run("%%distributed -n 1\n\n# a remark\n\nraise ValueError('here')")
    assert line_of(reply) == 5


def test_no_frame_of_ours_in_a_users_error(kernel: Kernel):
    reply = kernel.run("%%distributed -n 2\nraise ValueError('mine')")
    assert "sgpu_magic/" not in reply.shown
    assert "interactiveshell" not in reply.shown


def test_name_error_hints_at_in(kernel: Kernel):
    kernel.check("only_eval_sees = 1")
    reply = kernel.run("%%distributed -n 1\neval('only_eval_sees')")
    assert reply.ename == "NameError"
    assert "--in only_eval_sees" in reply.traceback
    reply = kernel.run("%%distributed -n 1\neval('nobody_has_it')")
    assert "--in" not in reply.traceback


# ---------------------------------------------------------------- ends without an exception


def test_sys_exit_with_a_code_fails_and_without_is_success(kernel: Kernel):
    reply = kernel.run("%%distributed -n 2\nimport sys\nsys.exit(3)")
    assert reply.status == "error"
    assert "SystemExit" in reply.evalue + reply.ename
    assert "3" in reply.evalue
    assert "To exit: use" not in reply.text
    # the kernel itself goes on
    assert kernel.value("1 + 1") == 2
    assert "succeeded" in kernel.check("%%distributed -n 2\nimport sys\nsys.exit(0)").text


def test_os_exit_is_told_with_its_code(kernel: Kernel):
    reply = kernel.run(
        "%%distributed -n 2\n"
        "import os, torch.distributed as dist\n"
        "dist.barrier()\n"
        "print('last words', flush=True)\n"
        "if rank == 1: os._exit(3)\n"
        "dist.barrier()"
    )
    assert reply.ename == "WorkerDied"
    assert "rank 1 of 2" in reply.evalue
    assert "exited with code 3" in reply.evalue
    assert reply.lines(1) == ["last words"]


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (15, "SIGTERM")])
def test_signal_death_is_told_with_its_name(kernel: Kernel, number: int, name: str):
    reply = kernel.run(
        "%%distributed -n 2\n"
        "import os, time, torch.distributed as dist\n"
        "dist.barrier()\n"
        f"if rank == 1: os.kill(os.getpid(), {number}); time.sleep(60)\n"
        "dist.barrier()"
    )
    assert reply.ename == "WorkerDied"
    assert reply.seconds < GRACE_S
    assert re.search(rf"rank 1 of 2 \(process \d+\) was killed by {name}", reply.evalue), reply.evalue
    if number == 9:
        # there is no sign of memory pressure
        assert "another process or the system killed it" in reply.evalue
    assert kernel.check("%%distributed -n 2\nprint('next')").lines(0) == ["next"]


@pytest.mark.slow
def test_recursion_and_memory_errors_are_ordinary(kernel: Kernel):
    reply = kernel.run("%%distributed -n 1\ndef f(): return f()\nf()")
    assert reply.ename == "RecursionError"
    reply = kernel.run("%%distributed -n 1\nb = bytearray(1 << 60)")
    assert reply.ename == "MemoryError"


def test_an_error_with_the_text_of_a_lost_connection_is_the_ranks_own(kernel: Kernel):
    reply = kernel.run(
        "%%distributed -n 2\n"
        "import time\n"
        "if rank == 0: raise RuntimeError('upload failed: Connection reset by peer')\n"
        "time.sleep(60)"
    )
    assert (reply.ename, reply.evalue) == ("RuntimeError", "upload failed: Connection reset by peer")
    assert line_of(reply) == 3
    assert "rank 1 was stopped (line 4)" in reply.shown
    assert "KeyboardInterrupt" not in reply.text


def test_a_syntax_error_begins_with_the_cells_own_frame(kernel: Kernel):
    (kernel.home.work / "unfinished.py").write_text("x = 1\ny = = 2\n")
    reply = kernel.run("%%distributed -n 1\ndef read(): import unfinished\nread()")
    assert reply.ename == "SyntaxError"
    assert "unfinished.py:2" in reply.shown
    for runner in ("interactiveshell", "sgpu_magic"):
        assert runner not in reply.shown
