"""What users of other parallel magics ran into, tried with a session's.

The cases are those that ipyparallel's tests of its magics care about (targets, streaming, errors, interrupts, the mode
in which every cell is sent), and issues of its users: a display that is dropped, a late line in the wrong cell, a rank
that never comes to a barrier, an interrupt that takes the state with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import Kernel, eventually
from shared_homes import SharedKernel

RANKS = 3


@pytest.fixture
def session(kernel: Kernel, module_kernel: SharedKernel) -> Iterator[Kernel]:
    """A kernel that is connected to three ranks."""
    kernel.check(f"%sgpu_connect --gpus {RANKS} --type cpu")
    kernel.check("%%distributed\npass")
    yield kernel
    kernel.run("%sgpu_auto off")
    kernel.check("%sgpu_disconnect")
    module_kernel.forget()


# ---------------------------------------------------------------- targets


@pytest.mark.parametrize(
    ("ranks", "those"), [("0", [0]), ("2,0", [0, 2]), ("1-2", [1, 2]), ("0,1-2", [0, 1, 2]), ("1,1", [1])]
)
def test_cell_runs_on_the_ranks_that_are_named(session: Kernel, ranks: str, those: list[int]):
    session.check("%%distributed\nhere = False")
    reply = session.check(f"%%distributed --ranks {ranks}\nhere = True\nprint('here')")
    assert [rank for rank in range(RANKS) if reply.lines(rank) == ["here"]] == those, reply.story
    session.check("%sgpu_pull here:all")
    assert session.value("here") == [rank in those for rank in range(RANKS)]


@pytest.mark.parametrize("ranks", ["3", "0-3", "-4", "x", "1-0"])
def test_rank_that_there_is_not_is_refused_before_anything_runs(session: Kernel, ranks: str):
    session.check("%%distributed\nuntouched = True")
    reply = session.run(f"%%distributed --ranks {ranks}\nuntouched = False")
    assert reply.ename == "UsageError", reply.story
    session.check("%sgpu_pull untouched:all")
    assert session.value("untouched") == [True] * RANKS


def test_cells_on_different_ranks_take_turns_and_share_what_they_set(session: Kernel):
    session.check("%%distributed\nseen = []")
    for rank in (2, 0, 2, 1):
        session.check(f"%%rank {rank}\nseen.append('one')")
    session.check("%%distributed\nseen.append('all')")
    session.check("%sgpu_pull seen:all")
    assert session.value("seen") == [["one", "all"], ["one", "all"], ["one", "one", "all"]]


def test_out_of_one_rank_is_that_ranks(session: Kernel):
    session.check("%%distributed --ranks 2 --out whose\nwhose = rank")
    assert session.value("whose") == 2
    session.check("%%distributed --ranks 1-2 --out whose:all\nwhose = rank")
    assert session.value("whose") == [1, 2]


# ---------------------------------------------------------------- output


def test_lines_are_there_while_the_cell_goes_on(session: Kernel, tmp_path: Path):
    go = tmp_path / "go"
    cell = session.start(
        "%%distributed\n"
        "import pathlib, time\n"
        "print('before', rank)\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n"
        "print('after', rank)"
    )
    for rank in range(RANKS):
        cell.until_shown(f"before {rank}")
    assert "after" not in cell.reply.text
    go.touch()
    reply = cell.wait()
    for rank in range(RANKS):
        assert reply.lines(rank) == [f"before {rank}", f"after {rank}"], reply.story


def test_no_display_is_dropped_in_a_row_of_cells(session: Kernel):
    # ipyparallel#457: the last display of a cell arrived too late
    for number in range(20):
        reply = session.check(
            f"%%distributed --name shows\nfrom IPython.display import display\ndisplay('shown {number}')"
        )
        assert reply.text.count(f"shown {number}") == RANKS, reply.story


def test_late_line_is_not_the_next_cells(session: Kernel, tmp_path: Path):
    # ray#34831: output of a thread after the end of its cell
    go, done = tmp_path / "go", tmp_path / "done"
    session.check(
        "%%rank 1\n"
        "import pathlib, threading, time\n"
        "def late():\n"
        f"    while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n"
        "    print('much too late', flush=True)\n"
        f"    pathlib.Path({str(done)!r}).touch()\n"
        "threading.Thread(target=late).start()"
    )
    session.check("late_run = _")
    go.touch()
    eventually(done.exists, 10, "the late line")
    eventually(lambda: session.value("late_run.logs(1).read_text()") == "much too late\n", 5, "it is in the cell's log")
    reply = session.check("%%distributed\nprint('mine')")
    assert "too late" not in reply.text
    assert [reply.lines(rank) for rank in range(RANKS)] == [["mine"]] * RANKS, reply.story


def test_equal_lines_of_all_ranks_all_come(session: Kernel):
    reply = session.check("%%distributed\nfor _ in range(5): print('the same')")
    assert [reply.lines(rank) for rank in range(RANKS)] == [["the same"] * 5] * RANKS, reply.story


def test_there_is_no_keyboard(session: Kernel):
    reply = session.run("%%rank 0\ninput('name? ')", timeout_s=20)
    assert reply.status == "error", reply.story
    assert "input" in reply.evalue + reply.traceback
    session.check("%%distributed\npass")


# ---------------------------------------------------------------- errors


def test_same_error_on_all_ranks_is_shown_once(session: Kernel):
    reply = session.run("%%distributed --name fails\nraise ValueError('everywhere')")
    assert (reply.ename, reply.evalue) == ("ValueError", "everywhere"), reply.story
    assert reply.shown.count("raise ValueError('everywhere')") == 1, reply.story


def test_first_error_counts_and_says_where(session: Kernel):
    reply = session.run(
        "%%distributed\n"
        "import time\n"
        "time.sleep(0.3 * (2 - rank))\n"
        "raise [KeyError, ValueError, IndexError][rank](f'of rank {rank}')"
    )
    assert (reply.ename, reply.evalue) == ("IndexError", "of rank 2"), reply.story
    assert "rank 2 of 3" in reply.text + reply.traceback, reply.story


def test_barrier_that_one_rank_never_reaches(session: Kernel):
    # ipyparallel#435: the waiting ranks hang for good
    session.check("%%distributed\nimport torch.distributed as dist\nkept = rank")
    reply = session.run("%%distributed\nif rank == 1:\n    1 / 0\ndist.barrier()", timeout_s=20)
    assert reply.ename == "ZeroDivisionError", reply.story
    assert reply.seconds < 5
    reply = session.check(
        "%%distributed\nimport torch\ntotal = torch.tensor(kept + 1)\ndist.all_reduce(total)\nprint(total.item())"
    )
    assert [reply.lines(rank) for rank in range(RANKS)] == [["6"]] * RANKS, reply.story


def test_syntax_error_reaches_no_rank(session: Kernel):
    session.check("%%distributed\nuntouched = True")
    reply = session.run("%%distributed\nuntouched = False\nif True print()")
    assert "SyntaxError" in reply.ename + reply.traceback, reply.story
    session.check("%sgpu_pull untouched")
    assert session.value("untouched") is True


# ---------------------------------------------------------------- interrupts


def test_interrupt_keeps_the_state_and_the_next_cell_runs(session: Kernel):
    # ipyparallel#634
    session.check("%%distributed\nimport time, torch.distributed as dist\nsteps = 0")
    cell = session.start("%%distributed\nprint('going', flush=True)\nwhile True:\n    steps += 1\n    time.sleep(0.01)")
    for rank in range(RANKS):
        cell.until(lambda rank=rank: "going" in cell.reply.lines(rank), what=f"rank {rank}")
    session.interrupt()
    reply = cell.wait()
    assert reply.ename == "RunCancelled", reply.story
    assert reply.seconds < 10
    reply = session.check("%%distributed\ndist.barrier()\nprint(steps > 0)")
    assert [reply.lines(rank) for rank in range(RANKS)] == [["True"]] * RANKS, reply.story


def test_interrupt_of_ranks_that_wait_for_each_other(session: Kernel):
    session.check("%%distributed\nimport torch.distributed as dist\nkept = 10 * rank")
    cell = session.start(
        "%%distributed\nif rank != 0:\n    print('waits', flush=True)\n    dist.barrier()\nelse:\n"
        "    import time\n    time.sleep(60)"
    )
    for rank in (1, 2):
        cell.until(lambda rank=rank: "waits" in cell.reply.lines(rank), what=f"rank {rank}")
    session.interrupt()
    reply = cell.wait()
    assert reply.ename == "RunCancelled", reply.story
    reply = session.check("%%distributed\ndist.barrier()\nprint(kept)")
    assert [reply.lines(rank) for rank in range(RANKS)] == [["0"], ["10"], ["20"]], reply.story


def test_interrupt_between_cells_is_harmless(session: Kernel):
    session.check("%%distributed\nkept = rank")
    session.interrupt()
    session.run("pass")
    reply = session.check("%%distributed\nprint(kept)")
    assert [reply.lines(rank) for rank in range(RANKS)] == [["0"], ["1"], ["2"]], reply.story


# ---------------------------------------------------------------- every cell


def test_every_cell_goes_to_the_ranks_until_off(session: Kernel):
    session.check("%sgpu_auto on")
    session.check("a = rank\ndef twice(x):\n    return 2 * x")
    reply = session.check("print(twice(a))")
    assert [reply.lines(rank) for rank in range(RANKS)] == [["0"], ["2"], ["4"]], reply.story
    session.check("%sgpu_auto off")
    assert session.value("'a' in globals() or 'twice' in globals()") is False
    assert session.check("print('here')").streams == "here\n"


def test_error_and_syntax_error_leave_the_mode_on(session: Kernel):
    session.check("%sgpu_auto on")
    assert session.run("1 / (rank - 1)").ename == "ZeroDivisionError"
    assert "SyntaxError" in session.run("if True print()").ename + session.run("x = = 1").traceback
    reply = session.check("print('still', rank)")
    assert [reply.lines(rank) for rank in range(RANKS)] == [["still 0"], ["still 1"], ["still 2"]], reply.story


def test_last_expression_and_magics_of_a_cell_that_is_sent(session: Kernel):
    session.check("%sgpu_auto on")
    reply = session.check("value = 100 + rank\nvalue")
    assert all(str(100 + rank) in reply.text for rank in range(RANKS)), reply.story
    reply = session.check("%timeit -n1 -r1 pass")
    assert reply.text.count("loop") >= 1, reply.story


def test_mode_without_a_session_is_refused(kernel: Kernel):
    reply = kernel.run("%sgpu_auto on")
    assert reply.ename in ("SessionError", "UsageError"), reply.story
    assert "%sgpu_connect" in reply.evalue
    assert kernel.check("print('here')").streams == "here\n"
