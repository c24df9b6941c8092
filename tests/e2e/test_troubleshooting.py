"""The pages of help, and the notebook that provokes every error: it has a section for each page."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from executed_notebooks import ROOT, Executed, execute, headings, introduction, saved
from kernels import Home, Kernel

from sgpu_magic import errors
from sgpu_magic.views import help as help_pages
from sgpu_magic.views.remote_error import OUT_OF_MEMORY, topic_of
from sgpu_magic.wire.base import FailureKind

NOTEBOOK = ROOT / "notebooks/troubleshooting.ipynb"
# on two cores; a reader waits for it
MOST_SECONDS = 90
# no error refers to it: a run that hangs raises nothing
HANGS = "hang"


def title(topic: str) -> str:
    return help_pages.page(topic).splitlines()[0].removeprefix("# ")


def error_classes() -> list[type[errors.SgpuError]]:
    """All of `errors` that are raised: those that no other is made of."""
    found = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.SgpuError)]
    return [cls for cls in found if cls not in (errors.SgpuError, errors.RunFailed)]


@pytest.fixture(scope="module")
def executed(home: Home) -> Executed:
    """The notebook, run from top to bottom in a home of its own."""
    return execute(NOTEBOOK, home)


# ---------------------------------------------------------------- sections


@pytest.mark.parametrize("kind", FailureKind)
def test_every_failure_kind_has_a_section(kind: FailureKind):
    assert title(topic_of(kind)) in headings(NOTEBOOK)


@pytest.mark.parametrize("cls", error_classes())
def test_every_error_has_a_page_and_names_it(cls: type[errors.SgpuError], monkeypatch: pytest.MonkeyPatch):
    assert title(cls.topic) in headings(NOTEBOOK)
    assert help_pages.page(cls.__name__) == help_pages.page(cls.topic)
    monkeypatch.setitem(sys.modules, "sgpu_magic.magics", ModuleType("loaded"))
    error = cls("what happened", type_name="E") if cls is errors.RemoteError else cls("what happened")
    assert error._render_traceback_()[-1] == f"See `%sgpu_help {cls.topic}`."
    for name in ("sgpu_magic.magics", "sgpu_magic.server"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert error._render_traceback_()[-1] == f"See `sgpu help {cls.topic}` in a shell."
    assert str(error) == "what happened"


def test_every_section_is_some_errors_and_the_table_leads_to_all():
    assert set(help_pages.topics()) == {cls.topic for cls in error_classes()} | {HANGS, OUT_OF_MEMORY}
    assert sorted(headings(NOTEBOOK)) == sorted(map(title, help_pages.topics()))
    assert len(headings(NOTEBOOK)) == len(set(headings(NOTEBOOK)))
    table = introduction(NOTEBOOK)
    links = re.findall(r"\[([^\]]+)\]\(#([^)]+)\)", table)
    assert sorted(title for title, _ in links) == sorted(headings(NOTEBOOK))
    assert all(anchor == title.replace(" ", "-") for title, anchor in links)


def test_the_wheel_has_the_pages(tmp_path: Path):
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        for topic in help_pages.topics():
            assert packed.read(f"sgpu_magic/views/help/{topic}.md").decode() == help_pages.page(topic)


def test_help_is_shown_as_markdown_and_in_a_shell_as_text(kernel: Kernel):
    shown = kernel.check("%sgpu_help rank-died").displays[-1]
    assert shown["text/markdown"] == help_pages.page("rank-died")
    assert "%sgpu_help" in kernel.run("%sgpu_help nowhere").traceback
    home = kernel.home
    output = subprocess.run(
        [sys.executable, "-m", "sgpu_magic.cli", "help", "rank-died"],
        env=home.environ,
        cwd=home.work,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (output.returncode, output.stderr) == (0, "")
    assert output.stdout.startswith("A rank died\n===========\n\nWhat you see. A `WorkerDied`")
    assert "SIGSEGV, SIGBUS   a crash in C or CUDA code" in output.stdout
    assert output.stdout.rstrip("\n") == shown["text/plain"]


# ---------------------------------------------------------------- the run


@pytest.mark.slow
def test_it_takes_less_than_a_coffee(executed: Executed):
    assert executed.seconds < MOST_SECONDS


@pytest.mark.slow
def test_cells_that_are_to_fail_do_and_name_their_section(executed: Executed):
    for cell in executed.cells:
        if cell.fails:
            assert len(cell.errors) == 1, f"{cell.source}\n{cell.text}"
            last = cell.text.splitlines()[-1]
            # a suggestion takes the place of the page's name
            suggests = "Did you mean" in last
            named = re.fullmatch(r"See `%sgpu_help ([a-z-]+)`\.", last)
            assert suggests or named is not None, cell.text
            assert cell.section == title("usage" if named is None else named[1])
        else:
            assert not cell.errors, f"{cell.source}\n{cell.text}"
            assert "this never runs" not in cell.text


@pytest.mark.slow
def test_every_section_shows_what_it_is_about(executed: Executed):
    raised = {cell.section: cell.errors[0] for cell in executed.cells if cell.fails}
    assert raised == {
        "The cell or an option is wrong": "UsageError",
        "A value can't be sent to the ranks": "SerializationError",
        "Not enough free devices": "CapacityError",
        "A session can't take the cell": "SessionError",
        "The ranks' Python does not start": "EnvironmentFailed",
        "Your code raised": "ValueError",
        "Out of memory": "RuntimeError",
        "A rank died": "WorkerDied",
        "The node was lost": "NodeLost",
        "The run timed out": "RunTimeout",
        "The run was cancelled": "RunCancelled",
        "The pool can't be reached": "PoolError",
    }
    assert set(headings(NOTEBOOK)) - raised.keys() == {title(HANGS), "A bug in sgpu-magic"}


@pytest.mark.slow
def test_saved_outputs_are_those_of_this_version_and_of_no_machine(executed: Executed):
    kept = saved(NOTEBOOK)
    again = "save them with scripts/save_outputs.py"
    assert [cell.errors for cell in kept] == [cell.errors for cell in executed.cells], again
    assert [cell.text.splitlines()[-1] for cell in kept if cell.fails] == [
        cell.text.splitlines()[-1] for cell in executed.cells if cell.fails
    ], again
    for cell in kept:
        assert not re.search(r"/(tmp/sg|root|work|Users|home/(?!you/))", cell.text), cell.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("The cell or an option is wrong", ["no option `--gpu`", "Did you mean `--gpus`?"]),
        ("A value can't be sent to the ranks", ["loader.lock", "['a.parquet', 'b.parquet']"]),
        ("Not enough free devices", ["--wait", "first"]),
        ("A session can't take the cell", ["%sgpu_restart --rank 1", "[1] both again"]),
        ("The ranks' Python does not start", ["'torch' is not a package", "its log: "]),
        ("Your code raised", ["rank 1 of 2", "NaN in batch 118", "released from barrier", "division by zero"]),
        ("Out of memory", ["memory when it failed", "largest tensors of rank 1", "cache[2] (500, 500) float32 1.0 MB"]),
        ("A rank died", ["SIGSEGV", "ctypes.string_at(0)", "[0] step 3", "attempt 2 of 2"]),
        ("The node was lost", ["the agent", "[1] here again"]),
        (
            "The run timed out",
            ["reached its 2 s time limit", "rank 1 is in load_batch", "rank 1 has not reached barrier"],
        ),
        ("A run hangs", ["rank 1 has not reached barrier", "time.sleep(6)", "[0] at last"]),
        ("The run was cancelled", ["interrupted"]),
        ("The pool can't be reached", ["SGPU_RUNTIME_DIR"]),
        ("A bug in sgpu-magic", ["torch", "runtime directory"]),
    ],
)
def test_what_a_reader_sees(executed: Executed, section: str, words: list[str]):
    text = executed.of(section)
    # ignore the wide spaces between columns
    reported = re.sub(r" +", " ", text)
    assert [word for word in words if word not in reported] == [], text
