"""`%sgpu_auto`: plain cells go to the ranks until it is off."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from kernels import Kernel

RANKS = 2


@pytest.fixture
def auto(kernel: Kernel) -> Iterator[Kernel]:
    """A kernel whose plain cells go to a session of two ranks."""
    kernel.check(f"s = %sgpu_connect -n {RANKS}\ns.wait(30)")
    assert "is on" in kernel.check("%sgpu_auto on").text
    yield kernel
    kernel.check("%sgpu_auto off")
    kernel.run("%sgpu_disconnect")
    kernel.check("globals().pop('s', None); globals().pop('x', None)")


def test_plain_cells_run_on_every_rank_and_are_marked(auto: Kernel):
    reply = auto.check("x = rank + 1\nprint('here', rank)\nx")
    assert [reply.lines(rank) for rank in range(RANKS)] == [["here 0"], ["here 1"]]
    assert reply.text.startswith("auto")
    assert "[1, 2]" in reply.result
    assert auto.check("print(x)").lines(1) == ["2"]


def test_off_again(auto: Kernel):
    auto.check("x = rank")
    assert "plain cells run here" in auto.check("%sgpu_auto off").text
    assert auto.check("print('x' in globals())").streams == "False\n"
    assert "is off" in auto.check("%sgpu_auto").text


def test_cells_for_the_notebook_stay_there(auto: Kernel):
    auto.check("%env SGPU_TESTED=1")
    auto.check("%%capture\nx = 'in the notebook'")
    assert auto.value("x") == "in the notebook"
    assert "rank 0" in auto.check("# a word\n\n%sgpu_push x\n%sgpu_pull x").text
    assert auto.check("%%rank 1\nprint('one')").lines(1) == ["one"]
    # a front end's own code is not a cell of the user
    assert auto.start("quietly = 1", silent=True).wait().status == "ok"
    assert auto.value("quietly") == 1


def test_line_numbers_are_the_editors(auto: Kernel):
    reply = auto.run("x = 1\n\n1/0")
    assert reply.ename == "ZeroDivisionError"
    assert re.search(r"Cell In\[\d+\], line 3\b", reply.traceback), reply.traceback
    reply = auto.run("\n\nx = 1\n1/0")
    assert re.search(r"Cell In\[\d+\], line 4\b", reply.traceback), reply.traceback
    reply = auto.run("x = 1\n\ndef f(:")
    assert re.search(r"Cell In\[\d+\], line 3\b", reply.traceback), reply.traceback


def test_a_cell_with_magics_of_ipython_goes_whole(auto: Kernel):
    reply = auto.check("%matplotlib inline\nfound = !echo there\nprint(found[0], rank)")
    assert reply.lines(1) == ["there 1"]


def test_an_interrupt_keeps_it_on(auto: Kernel):
    cell = auto.start("print('up', flush=True)\nwhile True: pass")
    cell.until_shown("[0] up")
    auto.interrupt()
    assert cell.wait(10).ename == "RunCancelled"
    assert auto.check("print(rank)").lines(1) == ["1"]


def test_it_is_off_again_with_the_session(auto: Kernel):
    reported = auto.check("%sgpu_disconnect").text
    assert "%sgpu_auto is off again" in reported
    assert auto.check("print('in the notebook')").streams == "in the notebook\n"


def test_it_is_off_again_when_the_session_has_ended_by_itself(auto: Kernel):
    assert auto.check("%sgpu_status").status == "ok"
    auto.check("%%capture\ns.end('a test ended it'); assert s.wait_for_end(10)")
    reply = auto.run("print(1)")
    assert reply.ename == "SessionError"
    assert "a test ended it" in reply.evalue
    assert "%sgpu_auto is off again" in reply.text
    assert auto.check("print(1)").streams == "1\n"


def test_it_needs_a_session(kernel: Kernel):
    reply = kernel.run("%sgpu_auto on")
    assert (reply.ename, "%sgpu_connect" in reply.evalue) == ("UsageError", True)
