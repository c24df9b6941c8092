"""Notebooks that `sgpu run` executes in real kernels without a pool: their environment, and how they end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lazy_modules import nbformat

from sgpu_magic.cli import main as cli
from sgpu_magic.cli.headless.cell_end import ExitCode
from sgpu_magic.cli.headless.execution import NotebookRun
from sgpu_magic.cli.headless.job import job_from


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, value in {"STATE_DIR": "state", "RUNTIME_DIR": "run", "CONFIG": "config.toml"}.items():
        monkeypatch.setenv(f"SGPU_{name}", str(tmp_path / value))
    for name in ("SGPU_POOL", "SGPU_VARIABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.chdir(tmp_path)
    add_kernel(tmp_path, monkeypatch, [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])
    yield tmp_path
    # a cell that imports the package may have started one
    cli.main(["pool", "stop", "--force"])


def add_kernel(folder: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    """Make `it` a kernel that is started by `argv`."""
    spec = folder / "jupyter" / "kernels" / "it"
    spec.mkdir(parents=True, exist_ok=True)
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "it", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(folder / "jupyter"))


def saved(folder: Path, *cells: str) -> None:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made.metadata["kernelspec"] = {"name": "it", "display_name": "it", "language": "python"}
    nbformat.write(made, folder / "train.ipynb")


def test_a_terminated_notebook_says_where_and_keeps_its_outputs(folder: Path, capsys: pytest.CaptureFixture[str]):
    saved(
        folder,
        "import os\nprint(os.environ['SGPU_POOL'], os.environ['SGPU_VARIABLES'], os.environ['A'])\n6 * 7",
        # the parent process is the command
        "import signal, time\nos.kill(os.getppid(), signal.SIGTERM)\nwhile True: time.sleep(0.01)",
        "print('never')",
    )
    before = signal.getsignal(signal.SIGTERM)
    words = ["train.ipynb", "-v", "-o", "copy.ipynb", "--pool", "team", "--env", "A=b"]
    assert cli.main(["run", *words]) == 143
    reported = capsys.readouterr()
    assert reported.out == f"team A b\n42\n{folder}/copy.ipynb\n"
    assert "stopped in cell 2; the notebook's runs were ended.\n" in reported.err
    assert "train.ipynb: ended with code 143 in " in reported.err
    made = nbformat.read(folder / "copy.ipynb", as_version=4)
    nbformat.validate(made)
    first, second, third = (cell.outputs for cell in made.cells)
    assert [output.output_type for output in first] == ["stream", "execute_result"]
    # the cell was interrupted as in a notebook
    assert [output.ename for output in second] == ["KeyboardInterrupt"]
    assert third == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_time_limit_counts_while_the_kernel_starts(folder: Path, monkeypatch: pytest.MonkeyPatch):
    saved(folder, "print('never')")
    # this kernel never answers
    add_kernel(folder, monkeypatch, ["sleep", "100"])
    # socket paths are limited to 108 bytes, so a long temporary folder is not used
    long = folder / ("long" * 25)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    reported: list[tuple[int, int]] = []
    job = job_from("train.ipynb", {"timeout": 0.1})
    with open(os.devnull, "w") as nowhere:
        run = NotebookRun(job, folder / "train.ipynb", None, nowhere, lambda *cells: reported.append(cells))
        code = run.run(time.monotonic() + 0.1)
    assert (code, reported) == (ExitCode.TIMED_OUT, [])
    assert list(long.iterdir()) == []
    assert json.loads((folder / "train.ipynb").read_text())["metadata"]["papermill"]["exception"] is True


@pytest.mark.parametrize(
    ("cell", "code"),
    [
        ("from sgpu_magic.errors import UsageError\nraise UsageError('not so')", ExitCode.USAGE),
        ("class UsageError(Exception):\n    _render_traceback_ = ours\nraise UsageError('not so')", ExitCode.FAILED),
        (
            "class NotebookExit(BaseException):\n    _render_traceback_ = ours\nraise NotebookExit('no')",
            ExitCode.FAILED,
        ),
        ("from sgpu_magic.options.notebook_job import NotebookExit\nraise NotebookExit('42')", ExitCode.OK),
    ],
    ids=["ours", "of the same name", "an exit of the same name", "an exit"],
)
def test_an_exit_code_comes_from_the_class_of_the_error(folder: Path, cell: str, code: ExitCode):
    # shown as this package's errors are
    saved(folder, "def ours(self):\n    return ['See `%sgpu_help usage`.']", cell)
    assert cli.main(["run", "train.ipynb", "-o", "copy.ipynb"]) == code
