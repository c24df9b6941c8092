"""The name of a cell's run without `--name`."""

from __future__ import annotations

import pytest
from stories import Run

from sgpu_magic.runs.submit.cell_name import MOST_CHARS, cell_name
from sgpu_magic.runs.submit.submit import _without_secrets
from sgpu_magic.wire.run import CellSource

DEFINED_AND_CALLED = "import torch\ndef train(rate):\n    return rate\ntrain(0.1)"


@pytest.mark.parametrize(
    ("body", "name"),
    [
        pytest.param("# Fit the line\nimport os\nfit()", "Fit the line", id="leading-comment"),
        pytest.param("\n  # ---- Fit ----\nfit()", "Fit", id="comment-with-rule"),
        pytest.param("# %%\n#!/bin/x\n# ------\n# noqa: F821\n# Fit\nfit()", "Fit", id="comments-for-tools"),
        pytest.param(f"# Warm up\n{DEFINED_AND_CALLED}", "Warm up", id="comment-before-function"),
        pytest.param(DEFINED_AND_CALLED, "train", id="function-defined-and-called"),
        pytest.param("import signal\ndef stop(*_): ...\nsignal.signal(2, stop)", "def stop(*_): ...", id="passed-on"),
        pytest.param("class Net: ...\ndef loss(): ...", "Net", id="only-definitions"),
        pytest.param("import torch\nfrom a import b\nmodel(x)  # go", "model(x)  # go", id="first-line-after-imports"),
        pytest.param("import torch\n# later", "import torch", id="only-imports"),
        pytest.param("x = (1 +\n# inner\n2)", "x = (1 +", id="later-comment-does-not-count"),
        pytest.param("x" * 80, f"{'x' * MOST_CHARS} ...", id="long-line"),
        pytest.param("\n \n", "cell 7", id="empty"),
    ],
)
def test_a_cell_is_named_by_its_comment_its_function_or_its_first_line(body: str, name: str):
    assert cell_name(CellSource(body=body, execution_count=7)) == name


def test_a_script_is_named_by_its_file_and_not_by_its_license():
    source = "# Copyright (c) 2026\nprint(1)"
    assert cell_name(CellSource(body=source, file="/home/me/train.py")) == "train.py"
    assert cell_name(CellSource(body=source, file="/home/me/a/b.py", module="a.b")) == "a.b"


def test_a_secret_that_the_name_would_cut_is_not_in_it():
    secret = "s3cr3tV4lu3" * 6
    cell = CellSource(body=f'login(token="{secret}")', execution_count=7)
    spec = Run(2, cell=cell, name=cell_name(cell)).view.spec
    assert "s3cr3t" in spec.name
    redacted, source = _without_secrets(spec, {"HUB_TOKEN": secret}, frozenset())
    assert source == cell
    assert "s3cr3t" not in redacted.name
    assert redacted.name.startswith('login(token="')
