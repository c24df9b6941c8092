"""A job of `sgpu run`: its target, its options and its parameters."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from sgpu_magic.cli.headless.formats import Form
from sgpu_magic.cli.headless.job import check_values, declared, job_from, read_pair, source_of, typed
from sgpu_magic.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a notebook, a script and a job file, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    empty = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "train.ipynb").write_text(json.dumps(empty))
    (tmp_path / "script.py").write_text("print(1)\n")
    (tmp_path / "cells.py").write_text("# %%\nprint(1)\n")
    (tmp_path / "jobs").mkdir()
    return tmp_path


def test_a_script_runs_in_the_commands_folder_and_a_notebook_in_its_own(folder: Path):
    script = job_from("script.py", {}, ("--lr", "1"))
    assert (script.form, script.folder, script.as_written) == (Form.SCRIPT, folder, "script.py")
    assert script.arguments == ("--lr", "1")
    (folder / "jobs" / "n.json").write_text('{"notebook": "../script.py", "env": {"A": true, "B": 1.5, "C": "x"}}')
    from_file = job_from("jobs/n.json", {})
    assert from_file.folder == folder / "jobs" / ".."
    assert dict(from_file.variables) == {"A": "true", "B": "1.5", "C": "x"}
    assert job_from("train.ipynb", {}).folder == folder
    # a percent file is a notebook, unless it has arguments or is requested as a script
    assert job_from("cells.py", {}).form is Form.PERCENT
    assert job_from("cells.py", {}, ("1",)).form is Form.SCRIPT
    assert job_from("cells.py", {}, as_script=True).form is Form.SCRIPT


@pytest.mark.parametrize(
    ("target", "line", "says"),
    [
        ("train.ipynb", {"cells": "there"}, "the command: cells is 'there'; it can be auto, ranks, here"),
        ("train.ipynb", {"retries": -1}, "the command: retries is -1; it must be 0 to "),
        ("train.ipynb", {"env": {"A-B": "1"}}, "the command: 'A-B' is not the name of an environment variable"),
        ("train.ipynb", {"parameters": {"a b": 1}}, "the command: 'a b' is not a name that a variable can have"),
        ("script.py", {"parameters": {"lr": 1}}, r"is a script, .*`sgpu run script\.py -- --lr 0\.1`"),
        ("scrpt.py", {}, r"scrpt\.py does not exist\. Did you mean `script\.py`\?"),
        ("nowhere/train.ipynb", {}, r"nowhere/train\.ipynb does not exist\.$"),
    ],
)
def test_jobs_that_can_not_be_meant(folder: Path, target: str, line: dict[str, object], says: str):
    with pytest.raises(UsageError, match=says):
        job_from(target, line)


def test_targets_that_can_not_be_meant(folder: Path):
    with pytest.raises(UsageError, match=r"takes no arguments\. Give it parameters: -p NAME=VALUE"):
        job_from("train.ipynb", {}, ("--lr",))
    with pytest.raises(UsageError, match=r"train\.ipynb is not a Python script"):
        job_from("train.ipynb", {}, as_script=True)
    (folder / "job.json").write_text('{"notebook": "data.csv"}')
    with pytest.raises(UsageError, match=r"job\.json: 'data\.csv' is neither a notebook nor a script; their names end"):
        job_from("job.json", {})
    (folder / "job.json").write_text("{}")
    with pytest.raises(UsageError, match=r"job\.json names no notebook: add `notebook: NAME\.ipynb`"):
        job_from("job.json", {})


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("-3", -3), ("1_000", 1000), ("0.1", 0.1), (".5", 0.5), ("1e-3", 0.001), ("-inf", -math.inf),
        ("True", True), ("false", False), ("None", None), ("null", None),
        ("", ""), ("a10", "a10"), ("1.2.3", "1.2.3"), ("007x", "007x"), ("1__0", "1__0"), ("yes", "yes"),
    ],
)  # fmt: skip
def test_values_of_a_line_are_numbers_words_or_text(text: str, value: object):
    made = typed(text)
    assert (made, type(made)) == (value, type(value))


def test_parameters_are_python_that_gives_the_same_values():
    values = {
        "lr": 0.1, "top": math.inf, "low": -math.inf, "name": "it's\n", "layers": [64, [32, None]],
        "more": {"a": [math.inf], "b c": {"d": True}}, "none": None,
    }  # fmt: skip
    check_values("here", values)
    namespace: dict[str, object] = {}
    source = source_of(values)
    exec(source, namespace)
    assert {name: namespace[name] for name in values} == values
    assert source.startswith("# Parameters\nlr = 0.1\n")
    exec(source_of({"no": math.nan}), namespace)
    assert math.isnan(namespace["no"])  # type: ignore[arg-type]


def test_values_that_can_not_be_written_into_a_cell():
    for value in ({1}, b"x", [1, {2}], {"a": {3: 4}}):
        with pytest.raises(UsageError, match=r"here: a is a .*Write it as a string, and parse that in the notebook"):
            check_values("here", {"a": value})


def test_pairs_of_a_line():
    assert read_pair("-p", "lr = 0.1") == ("lr", " 0.1")
    assert read_pair("-p", "url=a=b") == ("url", "a=b")
    with pytest.raises(UsageError, match=r"-p takes NAME=VALUE or NAME VALUE, as in -p lr=0\.1"):
        read_pair("-p", "lr")
    for name in ("for", "1a", "", "a-b"):
        with pytest.raises(UsageError, match=f"-r: '{name}' is not a name that a variable can have"):
            read_pair("-r", f"{name}=1")


def test_names_that_a_parameters_cell_sets():
    assert declared("lr = 0.1\nn: int = 2\nm: str\na, (b, *c) = x = 1, (2,)\nprint(lr)") == {
        "lr", "n", "m", "a", "b", "c", "x",
    }  # fmt: skip
    assert declared("%time lr = 1") is None
    assert declared("a = '\0'") is None
