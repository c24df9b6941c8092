"""The walk through sessions: it runs from top to bottom in half a minute, and shows what it says."""

from __future__ import annotations

import re

import pytest
from executed_notebooks import NOTEBOOKS, Executed, execute, headings, introduction, saved
from kernels import Home

from sgpu_magic import errors

pytestmark = pytest.mark.slow

NOTEBOOK = NOTEBOOKS / "sessions.ipynb"
# on two cores; a reader waits for it
MOST_SECONDS = 30


@pytest.fixture(scope="module")
def executed(home: Home) -> Executed:
    """The notebook, run from top to bottom in a home of its own."""
    return execute(NOTEBOOK, home)


def test_it_takes_less_than_half_a_minute(executed: Executed):
    assert executed.seconds < MOST_SECONDS


def test_its_table_of_contents_leads_to_every_section():
    links = re.findall(r"\[([^\]]+)\]\(#([^)]+)\)", introduction(NOTEBOOK))
    assert [title for title, _ in links] == headings(NOTEBOOK)
    assert all(anchor == title.replace(" ", "-") for title, anchor in links)


def test_only_cells_that_are_to_fail_do(executed: Executed):
    failed = [name for cell in executed.cells for name in cell.errors]
    assert failed == ["ValueError", "RunCancelled", "WorkerDied", "SessionError"], [
        (cell.source, cell.text) for cell in executed.cells if bool(cell.errors) != cell.fails
    ]
    for cell in executed.cells:
        assert bool(cell.errors) == cell.fails, f"{cell.source}\n{cell.text}"
        for name in cell.errors:
            # the user's own exceptions have the same page
            topic = getattr(errors, name, errors.RemoteError).topic
            assert cell.text.splitlines()[-1] == f"See `%sgpu_help {topic}`.", cell.text


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("Train over several cells", ["[0] step 100  loss", "[1] step 100  loss", "[0] step 300  loss"]),
        ("Some of the ranks", ["[0] on all 4096 samples"]),
        ("To the ranks and back", ["[300, 300]", "[1] step 500  loss"]),
        (
            "Whose value counts",
            [
                "[0] of the rank: 11",
                "[1] of the rank: 21",
                "[0] of the notebook again: 5",
                "[1] of the notebook again: 5",
            ],
        ),
        ("An error keeps the state", ["a bad batch", "rank 1 of 2", "[0] step 600  loss", "[1] step 600  loss"]),
        ("Interrupt", ["[0] still there: ", "[1] still there: "]),
        ("A dead rank", ["%sgpu_restart --rank 1", "[1] has nothing", "[0] has ['history', 'model', 'optimizer']"]),
        ("Edited modules", ["'first version'", "session_utils.py", "'second version, edited'"]),
        ("A fresh cell beside it", ["[0] False 2", "[1] False 2"]),
        ("Every cell", ["100", "False"]),
    ],
)
def test_what_a_reader_sees(executed: Executed, section: str, words: list[str]):
    text = executed.of(section)
    assert [word for word in words if word not in text] == [], text


def test_training_goes_on_from_cell_to_cell(executed: Executed):
    """The loss falls over all cells of the walk: none of them began anew."""
    losses = [
        float(found) for cell in executed.cells for found in re.findall(r"^\[0\] step .* loss (\S+)", cell.text, re.M)
    ]
    assert losses[0] > 2 * losses[1] > 0
    assert max(losses[2:]) < losses[1]


def test_saved_outputs_are_those_of_this_version_and_of_no_machine(executed: Executed):
    again = "save them with scripts/save_outputs.py"
    kept = saved(NOTEBOOK)
    assert [cell.source for cell in kept] == [cell.source for cell in executed.cells], again
    assert [cell.errors for cell in kept] == [cell.errors for cell in executed.cells], again
    # every number of one run differs from the next run's
    assert [_shape(cell.text) for cell in kept if not cell.fails] == [
        _shape(cell.text) for cell in executed.cells if not cell.fails
    ], again
    for cell in kept:
        assert not re.search(r"/(tmp/sg|root|work|Users|home/(?!you/))", cell.text), cell.text


def _shape(text: str) -> list[str]:
    """Which ranks have said something, and on how many lines."""
    return sorted(found for found in re.findall(r"^\[\d\]", text, re.M) if "step" not in text)
