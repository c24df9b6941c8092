"""The page about packages, MLflow, cost and replays: it runs from top to bottom, and shows what it says."""

from __future__ import annotations

import re

import pytest
from executed_notebooks import NOTEBOOKS, Executed, execute, headings, introduction, saved
from kernels import Home

pytestmark = pytest.mark.slow

NOTEBOOK = NOTEBOOKS / "records.ipynb"


@pytest.fixture(scope="module")
def executed() -> Executed:
    """The notebook, run from top to bottom in a home of its own, with tracking as users have it."""
    made = Home({"SGPU_TRACK": "all"})
    try:
        return execute(NOTEBOOK, made)
    finally:
        made.close()


def test_its_table_of_contents_leads_to_every_section():
    links = re.findall(r"\[([^\]]+)\]\(#([^)]+)\)", introduction(NOTEBOOK))
    assert [title for title, _ in links] == headings(NOTEBOOK)
    assert all(anchor == title.replace(" ", "-") for title, anchor in links)


def test_only_the_run_over_its_limit_fails(executed: Executed):
    assert [name for cell in executed.cells for name in cell.errors] == ["RunTimeout"]
    for cell in executed.cells:
        assert bool(cell.errors) == cell.fails, f"{cell.source}\n{cell.text}"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("The packages of the ranks", ["Python 3", "packages", "torch", "from an index"]),
        ("Other packages for one run", ["[0] 4.12.3 12.4 million", "[1] 4.12.3 24.8 million"]),
        ("The run in MLflow", ["[1] loss 0.2063", "0.1 40 0.2063"]),
        ("What it cost", ["80 % of its cost limit of $0.01 is used", "limit of $0.01 is reached", "cpu"]),
        ("The same run again", ["a replay of run", "[1] loss 0.2063", "[2] loss"]),
    ],
)
def test_each_section_shows_what_it_says(executed: Executed, section: str, words: list[str]):
    for word in words:
        assert word in executed.of(section)


def test_its_saved_outputs_are_those_of_a_whole_run():
    kept = saved(NOTEBOOK)
    for word in ("24.8 million", "0.1 40 0.2063", "is reached", "a replay of run"):
        assert any(word in cell.text for cell in kept), word
