"""The notebook about runs from Python: it says every name and option, runs, and has its outputs."""

from __future__ import annotations

import inspect
import re

import pytest
from executed_notebooks import NOTEBOOKS, Executed, execute, headings, saved
from kernels import Home
from lazy_modules import nbformat

import sgpu_magic
from sgpu_magic import Run
from sgpu_magic.functions.sweep import Sweep
from sgpu_magic.options.python_form import Options, SharedOptions

pytestmark = pytest.mark.slow

NOTEBOOK = NOTEBOOKS / "python_api.ipynb"


@pytest.fixture(scope="module")
def executed(home: Home) -> Executed:
    return execute(NOTEBOOK, home)


def text() -> str:
    made = nbformat.read(NOTEBOOK, as_version=4)
    return "\n\n".join(cell.source for cell in made.cells if cell.cell_type == "markdown")


def options_in(table_after: str) -> set[str]:
    """Names in the first column of the table that follows a text."""
    blocks = text().split(table_after, 1)[1].split("\n\n")
    table = next(block for block in blocks if block.startswith("| option |"))
    rows = re.findall(r"^\| (`\w+`[^|]*)\|", table, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_public_name_has_its_page():
    names = {name for name in sgpu_magic.__all__ if "_" not in name}
    assert names <= set(headings(NOTEBOOK))


def test_every_option_is_in_its_table():
    assert options_in("**Options.**") == {*Options.__annotations__, "run_async"}
    wanted = set(inspect.signature(sgpu_magic.map).parameters) - {"fn", "items", "options"}
    assert options_in("as `Executor.map` does |") == wanted | set(SharedOptions.__annotations__)


@pytest.mark.parametrize("cls", [Run, Sweep])
def test_everything_that_one_can_ask_is_told(cls: type):
    reported = text()
    own = [name for name in vars(cls) if not name.startswith("_")]
    inherited = ["done", "exception"] if cls is Run else []
    assert [name for name in (*own, *inherited) if not re.search(rf"\b{name}\b", reported)] == []


@pytest.mark.slow
def test_it_runs_from_top_to_bottom(executed: Executed):
    for cell in executed.cells:
        assert bool(cell.errors) == cell.fails, f"{cell.source}\n{cell.text}"
    assert "[21, 21]" in executed.of("distributed")
    assert "best with lr 0.3" in executed.of("map")
    assert "still has Linear" in executed.of("connect")
    assert "[0, 3]" in executed.of("Programs without a notebook")


def test_the_saved_outputs_are_those_of_this_version_and_of_no_machine(executed: Executed):
    kept = saved(NOTEBOOK)
    again = "save them with scripts/save_outputs.py"
    assert [cell.errors for cell in kept] == [cell.errors for cell in executed.cells], again
    for old, new in zip(kept, executed.cells, strict=True):
        assert bool(old.text) == bool(new.text), f"{again}\n{old.source}"
        assert not re.search(r"/(tmp/sg|root|work|Users|home/(?!you/))", old.text), old.text
