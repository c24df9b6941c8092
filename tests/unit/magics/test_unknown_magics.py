"""A magic that does not exist gets a suggestion below IPython's error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.error import UsageError

from sgpu_magic.magics.unknown_magics import UnknownMagics

THERE = {"line": {"sgpu_status": None, "time": None}, "cell": {"distributed": None, "sgpu_auto_cell": None}}


def after(cell: str, error: Exception | None) -> None:
    shell: Any = SimpleNamespace(magics_manager=SimpleNamespace(magics=THERE))
    own: Any = SimpleNamespace(magics={"line": {"sgpu_status": ""}, "cell": {"distributed": "", "sgpu_auto_cell": ""}})
    result = SimpleNamespace(error_in_exec=error, info=SimpleNamespace(raw_cell=cell))
    UnknownMagics(shell, [own]).after_cell(result)


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("%sgpu_statsu", "Did you mean `%sgpu_status`?\n"),
        ("x = 1\ny = %sgpu_statsu team", "Did you mean `%sgpu_status`?\n"),
        ("%%distributd --gpus 2\nprint(rank)", "Did you mean `%%distributed`?\n"),
        # one that exists and refuses its line, one that is not like ours, and one of plain Python
        ("%sgpu_status --what", ""),
        ("%matplotlb inline", ""),
        ("%%sgpu_auto_cel", ""),
        ("5 %sgpu_statsu", ""),
    ],
)
def test_a_misspelled_magic(cell: str, says: str, capsys: pytest.CaptureFixture[str]):
    after(cell, UsageError("not found"))
    assert capsys.readouterr() == ("", says)


@pytest.mark.parametrize("error", [None, ValueError("the cell's own")])
def test_other_cells_get_none(error: Exception | None, capsys: pytest.CaptureFixture[str]):
    after("%sgpu_statsu", error)
    assert capsys.readouterr() == ("", "")
