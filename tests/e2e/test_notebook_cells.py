"""Cells that behave on the ranks as in the notebook: IPython's own names, magics, and odd forms of code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernels import Kernel

RANKS = range(2)


@pytest.fixture
def session(kernel: Kernel) -> Iterator[Kernel]:
    """A kernel that is connected to two ranks."""
    kernel.check("%sgpu_connect --gpus 2 --type cpu")
    yield kernel
    kernel.check("%sgpu_disconnect")
    kernel.check("%reset -f")


# what a plain cell does first, the cell, and what each rank prints
CELLS = {
    "the last result": ("40 + 2", "print(_)", ["42"]),
    "the last result as an operand": ("40 + 2", "_ + 1\nprint(_)", ["42"]),
    "an older result": ("'older'\nNone", "print(__ if __ else 'none')", None),
    "no result yet": ("%reset -f out", "print(repr(_))", None),
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
    "a magic inside a block": ("pass", "if True:\n    %env SEEN=1\nimport os\nprint(os.environ['SEEN'])", None),
}


@pytest.mark.parametrize("case", [case for case, (_, _, printed) in CELLS.items() if printed is not None])
def test_cell_does_what_the_notebook_does(session: Kernel, case: str):
    before, body, printed = CELLS[case]
    session.check(before)
    reply = session.check(f"%%distributed\n{body}")
    assert [reply.lines(rank) for rank in RANKS] == [printed] * 2, reply.story
