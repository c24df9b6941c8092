"""Frames of a script that `sgpu run` executes on the ranks: named by its file in every view."""

from __future__ import annotations

from sgpu_magic.agent.ranks.rank_process import NotebookFrames
from sgpu_magic.views.stacks import last_python_line, stack_lines
from sgpu_magic.views.tracebacks import excerpt_of
from sgpu_magic.wire.base import FailureKind
from sgpu_magic.wire.rank_events import Failure, StackFrame
from sgpu_magic.wire.run import CellSource

FILE = "/home/u/train.py"
SCRIPT = CellSource(body="import os\ndef step():\n    os._exit(4)\nstep()\n", file=FILE, arguments=("train.py",))
FRAMES = (StackFrame(FILE, 3, "step"), StackFrame(FILE, 4, "<module>"), StackFrame("/lib/IPython/shell.py", 9, "run"))
TRACEBACK = """---------------------------------------------------------------------------
ValueError                                Traceback (most recent call last)
File ~/train.py:4
      2 def step():
      3     os._exit(4)
----> 4 step()

File /lib/torch/nn/modules/module.py:88, in call(self)
---> 88 raise ValueError("NaN")

ValueError: NaN"""


def test_stacks_begin_at_the_script() -> None:
    assert stack_lines(FRAMES, SCRIPT) == [
        f"File {FILE}, line 4",
        "  step()",
        f"File {FILE}, line 3, in step",
        "  os._exit(4)",
    ]
    assert last_python_line(FRAMES, SCRIPT) == f"{'train.py'}, line 3, in step: os._exit(4)"
    assert NotebookFrames(SCRIPT).upwards(FRAMES) == FRAMES[:2]
    assert NotebookFrames(SCRIPT).describe(FRAMES[0]) == f"{FILE}, line 3, in step: os._exit(4)"
    # for a cell, the same file is an ordinary module
    assert NotebookFrames(CellSource(body="step()")).innermost(FRAMES) is None


def test_the_excerpt_of_a_traceback_is_the_scripts_part() -> None:
    failure = Failure(
        kind=FailureKind.USER_CODE, message="NaN", rank=0, type_name="ValueError", traceback_text=TRACEBACK, line=4
    )
    assert excerpt_of(failure, SCRIPT).code == [
        "File ~/train.py:4",
        "      2 def step():",
        "      3     os._exit(4)",
        "----> 4 step()",
    ]
    assert excerpt_of(failure, CellSource(body="import train")).code[0].startswith("File /lib/torch")


def test_without_a_stack_the_failed_line_is_the_scripts() -> None:
    failure = Failure(kind=FailureKind.USER_CODE, message="NaN", rank=0, type_name="ValueError", line=4)
    assert excerpt_of(failure, SCRIPT).code[0] == f"File {FILE}, line 4"
