"""`sgpu run` of notebooks that were written in Databricks: their widgets, their files, their end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from headless_notebooks import notebook
from kernels import Home, plain
from lazy_modules import nbformat
from pool_client import PoolClient

from sgpu_magic.wire.base import RunState

HOME_VARIABLES = {"SGPU_SIMULATE": "a10:4,h100:2", "SGPU_PRICES": "a10=1.20"}
COMMAND = [sys.executable, "-m", "sgpu_magic.cli"]
TRAIN = """# Databricks notebook source
# MAGIC %md
# MAGIC # Training

# COMMAND ----------

dbutils.widgets.removeAll()
dbutils.widgets.text("lr", "0.1")
dbutils.widgets.dropdown("size", "small", ["small", "large"])
lr = float(dbutils.widgets.get("lr"))
size = dbutils.widgets.get("size")

# COMMAND ----------

# MAGIC %sh
# MAGIC echo from a shell

# COMMAND ----------

# MAGIC %run ./setup $factor="2"

# COMMAND ----------

loss = scaled(lr * (rank + 1))
print("loss", loss, size)

# COMMAND ----------

dbutils.notebook.exit(f"lr={lr}")

# COMMAND ----------

raise ValueError("this cell never runs")
"""


SETUP = """# Databricks notebook source
factor = float(dbutils.widgets.get("factor"))
def scaled(x):
    return factor * x
"""


@pytest.fixture(scope="module", autouse=True)
def warm(home: Home) -> None:
    """The pool, its agent and its zygote are there, and what they take is no leak."""
    client = PoolClient(home)
    try:
        assert client.begin("pass", ranks=2, device_type="a10").ended().state is RunState.SUCCEEDED
    finally:
        client.close()


def run(home: Home, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [*COMMAND, "run", *arguments], env=home.environ, cwd=home.work, capture_output=True, text=True, timeout=90
    )
    return done.returncode, done.stdout, done.stderr


def text_of(cell: nbformat.NotebookNode) -> str:
    data = [output.get("data", {}) for output in cell.outputs]
    texts = [
        output.get("text", "") or made.get("text/plain", "") for output, made in zip(cell.outputs, data, strict=True)
    ]
    return plain("\n".join(texts))


@pytest.mark.slow
def test_a_source_file_with_widgets_runs_on_the_ranks_and_exits(home: Home):
    (home.work / "train.py").write_text(TRAIN)
    (home.work / "setup.py").write_text(SETUP)
    code, out, err = run(home, "train.py", "-n", "2", "--type", "a10", "-p", "lr=0.25")
    assert code == 0, err
    assert "no cell is tagged" not in err
    assert re.search(r"^the notebook exited in cell \d with: lr=0\.25$", err, re.MULTILINE), err
    assert "train.py: succeeded in " in err
    made = nbformat.read(out.splitlines()[-1], as_version=4)
    nbformat.validate(made)
    assert made.metadata.sgpu == {"exit_value": "lr=0.25"}
    assert made.metadata.papermill.exception is None
    code_cells = [cell for cell in made.cells if cell.cell_type == "code"]
    assert code_cells[0].source.startswith("%load_ext sgpu_magic.compat\n%sgpu_connect ")
    texts = [text_of(cell) for cell in code_cells]
    assert "from a shell" in texts[3]
    assert "[1] loss 1.0 small" in texts[5]
    assert texts[6] == "Notebook exited: lr=0.25\n"
    assert code_cells[7].outputs == []


@pytest.mark.slow
def test_a_notebook_runs_another_and_gets_its_value(home: Home):
    folder = home.work / "jobs"
    folder.mkdir()
    child = notebook(
        "name = dbutils.widgets.get('name')", "assert name != 'bad', 'a bad name'", "dbutils.notebook.exit(name * 2)"
    )
    parent = notebook(
        "value = dbutils.notebook.run('./child', 60, {'name': 'ab'})\nprint('value', value)",
        "print('own', dbutils.widgets.getAll())",
        "dbutils.notebook.run('child', arguments={'name': 'bad'})",
    )
    for name, made in (("child", child), ("parent", parent)):
        made.metadata["kernelspec"]["name"] = "python3"
        nbformat.write(made, folder / f"{name}.ipynb")
    code, out, err = run(home, "jobs/parent.ipynb", "-p", "own=1")
    assert code == 1
    assert "RuntimeError: child.ipynb failed: `sgpu run` ended with code 1." in err
    assert "AssertionError: a bad name" in err
    made = nbformat.read(out.splitlines()[-1], as_version=4)
    assert "value abab" in text_of(made.cells[-3])
    # the other notebook has widgets of its own
    assert "own {'own': '1'}" in text_of(made.cells[-2])
    assert len(list(Path(folder).glob("child.*.ipynb"))) == 2


@pytest.mark.slow
def test_a_notebook_that_loads_it_itself_is_not_changed(home: Home):
    made = notebook("%load_ext sgpu_magic.compat", "%sh\necho here", "%restart_python", "print('dbutils' in globals())")
    made.metadata["kernelspec"]["name"] = "python3"
    nbformat.write(made, home.work / "own.ipynb")
    code, out, err = run(home, "own.ipynb", "-v")
    assert code == 0, err
    assert out.splitlines()[:2] == ["here", "True"]
    executed = nbformat.read(out.splitlines()[-1], as_version=4)
    assert [cell.source for cell in executed.cells] == [cell.source for cell in made.cells]
