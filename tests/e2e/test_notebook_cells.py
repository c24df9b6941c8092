"""Cells that behave on the ranks as in the notebook: IPython's own names, magics, and odd forms of code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernels import Kernel
from shared_homes import SharedKernel

RANKS = range(2)


@pytest.fixture
def session(kernel: Kernel, module_kernel: SharedKernel) -> Iterator[Kernel]:
    """A kernel that is connected to two ranks."""
    kernel.check("%sgpu_connect --gpus 2 --type cpu")
    yield kernel
    kernel.check("%sgpu_disconnect")
    module_kernel.forget()


# what a plain cell does first, the cell, and what each rank prints
CELLS = {
    "the last result": ("40 + 2", "print(_)", ["42"]),
    "the last result as an operand": ("40 + 2", "_ + 1\nprint(_)", ["42"]),
    "the last input": ("a = 1", "print(_i)", ["a = 1"]),
    "all inputs": ("a = 2", "print(In[-2])", ["a = 2"]),
    "the future of an earlier cell": (
        "from __future__ import annotations",
        "def f(x: missing): ...\nprint(f.__annotations__)",
        ["{'x': 'missing'}"],
    ),
    "its own future": (
        "pass",
        "from __future__ import annotations\ndef f(x: missing): ...\nprint(f.__annotations__)",
        ["{'x': 'missing'}"],
    ),
    "an indented body": ("pass", "    z = 1\n    if z:\n        print(z)", ["1"]),
    "a string alone": ("pass", "'''text'''", []),
    "exit with success": ("pass", "print('before')\nexit()\nprint('after')", ["before"]),
    "quit": ("pass", "print('before')\nquit()\nprint('after')", ["before"]),
    "sys.exit with success": ("pass", "import sys\nprint('before')\nsys.exit(0)", ["before"]),
    "the repr of exit": ("pass", "print(exit)", ["exit() ends the cell on this rank"]),
    "matplotlib": ("pass", "%matplotlib inline\nprint('drawn')", ["drawn"]),
    "autoreload": ("pass", "%load_ext autoreload\n%autoreload 2\nprint('loaded')", ["loaded"]),
    "config": ("pass", "%config InlineBackend.figure_format = 'retina'\nprint('set')", ["set"]),
    "await": ("import asyncio", "print(await asyncio.sleep(0, 'woken'))", ["woken"]),
}


@pytest.mark.parametrize("case", CELLS)
def test_cell_does_what_the_notebook_does(session: Kernel, case: str):
    before, body, printed = CELLS[case]
    session.check(before)
    reply = session.check(f"%%distributed\n{body}")
    assert [reply.lines(rank) for rank in RANKS] == [printed] * 2, reply.story


def printed(kernel: Kernel, body: str) -> list[list[str]]:
    """Return what each rank prints in a cell."""
    reply = kernel.check(f"%%distributed\n{body}")
    return [reply.lines(rank) for rank in RANKS]


def test_last_result_is_the_ranks_or_the_notebooks_whichever_is_newer(session: Kernel):
    session.check("%%distributed\nrank + 10")
    assert printed(session, "print(_)") == [["10"], ["11"]]
    session.check("'of the notebook'")
    assert printed(session, "print(_)") == [["of the notebook"]] * 2
    session.check("%%distributed\nrank + 20")
    assert printed(session, "print(_)") == [["20"], ["21"]]
    # IPython does not overwrite a variable of that name
    session.check("%%distributed\nfor _ in range(3): pass")
    session.check("'newer'")
    assert printed(session, "print(_)") == [["2"]] * 2


def test_results_by_number_are_the_notebooks_and_the_ranks(session: Kernel):
    number = session.check("{'loss': 0.5}").execution_count
    own = session.check("%%distributed\nrank + 30").execution_count
    body = f"print(Out[{number}]['loss'], _{number}['loss'], Out[{own}])"
    assert printed(session, body) == [["0.5 0.5 30"], ["0.5 0.5 31"]]
    # again, when the ranks have both
    assert printed(session, f"print(Out[{number}], Out[{own}])") == [["{'loss': 0.5} 30"], ["{'loss': 0.5} 31"]]
    assert printed(session, f"print('Out[{number}]' in In[-1], len(In) > {own})") == [["True True"]] * 2


def test_store_writes_once_and_reads_everywhere(session: Kernel):
    session.check("%%distributed\nmine = 40 + rank\n%store mine")
    session.check("%%distributed\ndel mine\n%store -r mine")
    assert printed(session, "print(mine)") == [["40"]] * 2
    # the notebook and its ranks share one store
    session.check("%store -r mine")
    assert session.value("mine") == 40
    session.check("%store -d mine")


def test_function_of_a_new_rank_reads_them_too(kernel: Kernel):
    kernel.check("'a result'")
    reply = kernel.check("%%distributed -n 2 --type cpu\ndef last():\n    return _\nprint(last())")
    assert [reply.lines(rank) for rank in RANKS] == [["a result"]] * 2, reply.story
