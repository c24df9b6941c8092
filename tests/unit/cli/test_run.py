"""`sgpu run`: parameters on the command line, required packages, kernels, and retries."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from sgpu_magic.agent.ranks.stop import catches
from sgpu_magic.cli import main as cli
from sgpu_magic.cli import run as running
from sgpu_magic.cli.jobs import all_jobs
from sgpu_magic.cli.main import command_parser, normalized
from sgpu_magic.cli.run import options_from
from sgpu_magic.config import load_settings
from sgpu_magic.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a notebook without cells; the command's other directories are there too."""
    for name, value in {"STATE_DIR": "state", "RUNTIME_DIR": "run", "CONFIG": "config.toml"}.items():
        monkeypatch.setenv(f"SGPU_{name}", str(tmp_path / value))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "train.ipynb").write_text(json.dumps({"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return work


def add_kernel(folder: Path, name: str, argv: list[str], language: str) -> None:
    spec = folder.parent / "jupyter" / "kernels" / name
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": name, "language": language}))


def options(*words: str) -> dict[str, Any]:
    line = ["run", "train.ipynb", *words]
    return options_from(command_parser(line).parse_args(normalized(line)))


def test_parameters_of_all_kinds_and_the_last_one_counts(folder: Path):
    (folder / "a.yaml").write_text("lr: 0.5\nname: file\nlayers: [1]")
    words = ["-r", "name=7", "-p", "lr", "0.25", "-y", "{layers: [64, 32], 3: three}", "-f", "a.yaml", "-p", "n=2"]
    made = options(*words)
    assert made["parameters"] == {"lr": 0.25, "name": "7", "layers": [64, 32], "3": "three", "n": 2}
    # options that are not given are left to the job file
    assert made.keys() == {"parameters", "env"}
    assert options("--gpus", "2", "--env", "A=b=c") == {"gpus": 2, "parameters": {}, "env": {"A": "b=c"}}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-y", "lr: ["], r"-y 'lr: \[' can't be read: while parsing"),
        (["-y", "[1, 2]"], r"-y '\[1, 2\]' is not a mapping: write -y '\{lr: 0\.1, layers: \[64, 32\]\}'"),
        (["-f", "missing.yaml"], r"missing\.yaml can't be read: No such file"),
        (["-p", "lr"], "-p takes NAME=VALUE or NAME VALUE"),
        (["-r", "=1"], "-r: '' is not a name"),
    ],
)
def test_parameters_that_mean_nothing(folder: Path, words: list[str], says: str):
    with pytest.raises(UsageError, match=says) as caught:
        options(*words)
    assert "\n" not in caught.value.message


def test_what_is_not_installed_is_named_with_its_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for needs, says in ((("no_such_a",), "no_such_a is"), (("no_such_a", "no_such_b"), "no_such_a and no_such_b are")):
        monkeypatch.setattr(running, "_NEEDS", ("json", *needs))
        assert cli.main(["run", "train.ipynb"]) == 2
        err = capsys.readouterr().err
        assert f"sgpu: {says} not installed, so no notebook can be executed." in err
        assert "pip install 'sgpu-magic[run]'" in err
    assert [path.name for path in folder.iterdir()] == ["train.ipynb"]


def test_kernels_that_can_not_be_meant(folder: Path, capsys: pytest.CaptureFixture[str]):
    add_kernel(folder, "ir", ["R"], "R")
    assert cli.main(["run", "train.ipynb", "--kernel", "ir"]) == 2
    assert "the kernel 'ir' runs R, and cells for a pool must be Python." in capsys.readouterr().err
    assert cli.main(["run", "train.ipynb", "--kernel", "julia-9"]) == 2
    assert re.search(r"there is no kernel 'julia-9' on this machine\. Available: .*\bir\b", capsys.readouterr().err)
    # neither a copy nor a job was created
    assert [path.name for path in folder.iterdir()] == ["train.ipynb"]
    assert all_jobs(load_settings()) == []


def test_a_kernel_that_does_not_start_is_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(running, "_RETRY_AFTER_S", 0.001)
    add_kernel(folder, "broken", ["/nowhere/python"], "python")
    assert cli.main(["run", "train.ipynb", "--kernel", "broken", "--retries", "2", "-o", "done.ipynb"]) == 3
    reported = capsys.readouterr()
    assert reported.out == f"{folder}/done.ipynb\n"
    lines = [line for line in reported.err.splitlines() if "No such file" not in line]
    assert [re.sub(r"in \d.*s", "in a moment", line) for line in lines if line.startswith("train.ipynb: ")] == [
        "train.ipynb: ended with code 3 in a moment",
        "train.ipynb: retrying in a moment (1 more after that)",
        "train.ipynb: ended with code 3 in a moment",
        "train.ipynb: retrying in a moment (0 more after that)",
        "train.ipynb: ended with code 3 in a moment",
    ]
    assert reported.err.count("the kernel broken does not start: ") == 3
    (record,) = all_jobs(load_settings())
    assert (record.state, record.code, record.copy) == ("pool failed", 3, f"{folder}/done.ipynb")


def test_the_time_limit_counts_while_a_retry_is_waited_for(folder: Path, capsys: pytest.CaptureFixture[str]):
    add_kernel(folder, "broken", ["/nowhere/python"], "python")
    assert cli.main(["run", "train.ipynb", "--kernel", "broken", "--retries", "9", "--timeout", "2s"]) == 124
    text = capsys.readouterr().err
    assert text.count("the kernel broken does not start: ") == 1
    assert text.endswith("train.ipynb: its time limit was exceeded before the retry\n")
    assert all_jobs(load_settings())[0].state == "timed out"


def test_sigterm_ends_the_wait_for_a_retry(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(running, "_RETRY_AFTER_S", 60.0)
    add_kernel(folder, "broken", ["/nowhere/python"], "python")

    def send() -> None:
        eventually(lambda: "retrying in" in capsys.readouterr().err, 30)
        eventually(lambda: catches(os.getpid(), signal.SIGTERM), 10)
        os.kill(os.getpid(), signal.SIGTERM)

    sending = threading.Thread(target=send)
    sending.start()
    assert cli.main(["run", "train.ipynb", "--kernel", "broken", "--retries", "1"]) == 143
    sending.join()
    assert capsys.readouterr().err == "train.ipynb: stopped before the retry\n"
    assert all_jobs(load_settings())[0].state == "terminated"
