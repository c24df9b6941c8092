"""Where `sgpu run` puts the executed copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgpu_magic.cli.headless.job import job_from
from sgpu_magic.cli.headless.outcome import copy_of


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


def test_a_name_with_a_slash_at_its_end_is_a_folder(notebook: Path):
    job_file = notebook.parent / "jobs" / "nightly.json"
    job_file.parent.mkdir()
    job_file.write_text(json.dumps({"notebook": "../train.ipynb", "output": "runs/"}))
    in_file, on_line = copy_of(job_from(str(job_file), {})), copy_of(job_from("train.ipynb", {"output": "mine/"}))
    assert in_file is not None
    assert on_line is not None
    assert (in_file.parent, on_line.parent) == (job_file.parent / "runs", notebook.parent / "mine")
    assert all(path.is_file() and path.match("train.*.ipynb") for path in (in_file, on_line))


def test_another_name_is_a_file_unless_the_folder_exists(notebook: Path):
    assert copy_of(job_from("train.ipynb", {"output": "out/done.ipynb"})) == notebook.parent / "out" / "done.ipynb"
    inside = copy_of(job_from("train.ipynb", {"output": "out"}))
    assert inside is not None
    assert inside.parent == notebook.parent / "out"
