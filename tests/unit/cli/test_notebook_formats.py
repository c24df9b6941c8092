"""Text formats of notebooks that `sgpu run` reads, and which files are scripts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from lazy_modules import jupytext, nbformat

from sgpu_magic.cli.headless.formats import Form, form_of, kernel_name, read_notebook, submits_runs
from sgpu_magic.errors import UsageError

DATABRICKS = """# Databricks notebook source
# MAGIC %md
# MAGIC # Training
# MAGIC of *words*

# COMMAND ----------

# MAGIC %pip install -q words

# COMMAND ----------

# DBTITLE 1,Look at the machine
# MAGIC %sh
# MAGIC ls /

# COMMAND ----------

# MAGIC %sh -e false

# COMMAND ----------

# MAGIC %python
# MAGIC a = 1

# COMMAND ----------

# MAGIC %sql
# MAGIC select 1

# COMMAND ----------

import os
# MAGIC %matplotlib inline
print(os.sep)

# COMMAND ----------

# MAGIC %%distributed --gpus 2
# MAGIC # a comment
# MAGIC print(rank)
"""


def file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def cells(path: Path) -> list[tuple[str, str]]:
    made = read_notebook(path, form_of(path))
    nbformat.validate(made)
    return [(cell.cell_type, cell.source) for cell in made.cells]


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("# Databricks notebook source\nprint(1)\n", Form.DATABRICKS),
        ("import os\n\n# %%\nprint(1)\n", Form.PERCENT),
        ("#%% [markdown]\n# Title\n", Form.PERCENT),
        ("# %% a title\n!ls\n%%time\n", Form.PERCENT),
        ("# ---\n# jupyter:\n#   kernelspec:\n#     name: python3\n# ---\n\n# # Title\n\nprint(1)\n", Form.JUPYTEXT),
        ("# ---\n# jupyter:\n#   jupytext:\n#     format_name: light\n# ---\n\n# +\nprint(1)\n", Form.JUPYTEXT),
        ("# ---\n# jupyter:\n#   jupytext:\n#     format_name: percent\n# ---\n\nprint(1)\n", Form.PERCENT),
        ("print(1)\n", Form.SCRIPT),
        ("# %%time is slow\n# 50 %% of it\nx = 7\n    # %% indented\n", Form.SCRIPT),
        ('TEMPLATE = """\n# %%\nprint(1)\n"""\n', Form.SCRIPT),
        ("# ---\n# a ruler\n# ---\nprint(1)\n", Form.SCRIPT),
    ],
)
def test_a_python_file_is_a_notebook_by_its_marks(tmp_path: Path, text: str, form: Form):
    assert form_of(file(tmp_path, "it.py", text)) is form


def test_databricks_cells(tmp_path: Path):
    assert cells(file(tmp_path, "it.py", DATABRICKS)) == [
        ("markdown", "# Training\nof *words*"),
        ("code", "%pip install -q words"),
        ("code", "%%bash --no-raise-error\nls /"),
        ("code", "%%bash -e\nfalse"),
        ("code", "a = 1"),
        ("code", "%%sql\nselect 1"),
        ("code", "import os\n%matplotlib inline\nprint(os.sep)"),
        ("code", "%%distributed --gpus 2\n# a comment\nprint(rank)"),
    ]


def test_percent_cells_are_those_that_jupytext_has_written(tmp_path: Path):
    new = nbformat.v4
    made = new.new_notebook(metadata={"kernelspec": {"name": "words", "display_name": "w", "language": "python"}})
    made.cells = [
        new.new_markdown_cell("# Title\n\n- a\n- b"),
        new.new_code_cell("%load_ext sgpu_magic\n%pip --version\n!ls -l"),
        new.new_code_cell("lr = 0.1", metadata={"tags": ["parameters"]}),
        new.new_code_cell("%%distributed --gpus 2\nprint('a')\n\n\ndef f():\n    return 1"),
        new.new_code_cell("# %pip is a comment here\nx = '%'"),
        new.new_code_cell("%%bash --no-raise-error\nls -l\n# a comment"),
        new.new_raw_cell("raw text"),
    ]
    path = file(tmp_path, "it.py", jupytext.writes(made, "py:percent"))
    assert form_of(path) is Form.PERCENT
    assert cells(path) == [(cell.cell_type, cell.source) for cell in made.cells]
    assert read_notebook(path, Form.PERCENT).cells[2].metadata.tags == ["parameters"]
    assert kernel_name(path, Form.PERCENT) == "words"


def test_percent_cells_as_people_write_them(tmp_path: Path):
    text = 'import os\n# %% [markdown]\n"""\n# A title\n"""\n# %% md too\n%md\n*words*\n#%%\n%sh ls\n# %%\n'
    assert cells(file(tmp_path, "it.py", text)) == [
        ("code", "import os"),
        ("markdown", "# A title"),
        ("markdown", "*words*"),
        ("code", "%%bash --no-raise-error\nls"),
    ]


@pytest.mark.parametrize("name", ["it.md", "it.Rmd", "it.py"])
def test_other_forms_are_jupytexts(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# T"), nbformat.v4.new_code_cell("a = 1")])
    made.metadata["kernelspec"] = {"name": "words", "display_name": "w", "language": "python"}
    path = tmp_path / name
    jupytext.write(made, path, fmt="py:light" if name == "it.py" else None)
    assert form_of(path) is Form.JUPYTEXT
    assert cells(path) == [("markdown", "# T"), ("code", "a = 1")]
    assert kernel_name(path, Form.JUPYTEXT) == "words"
    monkeypatch.setitem(sys.modules, "jupytext", None)
    with pytest.raises(UsageError, match=r"pip install 'sgpu-magic\[jupytext\]'"):
        read_notebook(path, Form.JUPYTEXT)


@pytest.mark.parametrize("header", ["jupyter:\n  kernelspec:\n    name: python3", "jupyter: ["])
def test_what_jupytext_can_not_read_is_refused(tmp_path: Path, header: str):
    path = file(tmp_path, "it.md", f"---\n{header}\n---\n\ntext\n")
    with pytest.raises(UsageError, match="is not a notebook that jupytext can read"):
        read_notebook(path, Form.JUPYTEXT)


def test_a_notebook_that_another_one_runs_is_read_with_it(tmp_path: Path):
    (tmp_path / "lib").mkdir()
    file(tmp_path, "lib/setup.py", "# Databricks notebook source\nn = 1\n# COMMAND ----------\n# MAGIC %run ./more\n")
    file(tmp_path, "lib/more.py", "# %%\nm = 2\n")
    script = file(tmp_path, "script.py", "print(1)\n")
    first = file(tmp_path, "a.py", "# Databricks notebook source\n# MAGIC %run ./lib/setup\n")
    assert cells(first) == [("code", "n = 1"), ("code", "m = 2")]
    second = file(tmp_path, "b.py", "# %%\nbefore = 1\n# %run lib/setup.py\n%run ./script.py -x 'a b'\nafter = 1\n")
    assert cells(second) == [
        ("code", "before = 1"),
        ("code", "n = 1"),
        ("code", "m = 2"),
        ("code", f"%run {script} -x 'a b'"),
        ("code", "after = 1"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("k = 3")]), tmp_path / "nb.ipynb")
    third = file(tmp_path, "c.py", "# Databricks notebook source\n# MAGIC %run ./nb\n")
    assert cells(third) == [("code", "k = 3")]
    # arguments set widgets, which exist only in the kernel
    fourth = file(tmp_path, "d.py", '# Databricks notebook source\n# MAGIC %run ./nb $lr="1 2"\n')
    assert cells(fourth) == [("code", f"%run {tmp_path / 'nb.ipynb'} '$lr=1 2'")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# MAGIC %run ./nowhere", "there is no such notebook in "),
        ("# MAGIC %run ./it", "run each other in a cycle: it.py -> it.py"),
        ("# MAGIC %run ./other $lr=1 word", "takes arguments only for its widgets"),
    ],
)
def test_a_run_that_can_not_be_meant_is_refused(tmp_path: Path, text: str, words: str):
    file(tmp_path, "other.py", "# Databricks notebook source\nn = 1\n")
    with pytest.raises(UsageError, match=words):
        cells(file(tmp_path, "it.py", f"# Databricks notebook source\n{text}\n"))


@pytest.mark.parametrize(
    ("source", "submits"),
    [
        ("from sgpu_magic import distributed\n@distributed(gpus=8)\ndef f(): ...", True),
        ("import sgpu_magic as sg\ndef main():\n    with sg.connect(gpus=2) as s: ...", True),
        ("from serverless_gpu.ray import ray_launch", True),
        ("from sgpu_magic import runtime\nprint(runtime.get_global_rank())", False),
        ("from serverless_gpu import runtime as rt", False),
        ("import sgpu_magic.runtime\nmap(str, [])", False),
        ("from torch import distributed", False),
        ("not python", False),
    ],
)
def test_a_script_that_submits_runs_is_known(source: str, submits: bool):
    assert submits_runs(source) is submits


def test_an_ipynb_notebook_runs_others_as_databricks_names_them(tmp_path: Path):
    file(
        tmp_path,
        "setup.py",
        "# Databricks notebook source\na = 1\n\n# COMMAND ----------\n\n# MAGIC %md words\n",
    )
    file(tmp_path, "script.py", "print(1)\n")
    new = nbformat.v4
    inner = new.new_notebook(cells=[new.new_code_cell("b = 2"), new.new_code_cell("%run ./it")])
    nbformat.write(inner, tmp_path / "inner.ipynb")
    sources = [
        "%run ./setup",
        "%run './inner'",
        "%run inner.ipynb",
        "%run script",
        "x = 1\n%run ./setup",
        "%run ./none",
    ]
    path = tmp_path / "it.ipynb"
    nbformat.write(new.new_notebook(cells=[new.new_code_cell(source) for source in sources]), path)
    with pytest.raises(UsageError, match=r"run each other in a cycle: it\.ipynb -> inner\.ipynb -> it\.ipynb"):
        cells(path)
    inner.cells.pop()
    nbformat.write(inner, tmp_path / "inner.ipynb")
    assert cells(path) == [
        ("code", "a = 1"),
        ("markdown", "words"),
        ("code", "b = 2"),
        *(("code", source) for source in sources[2:]),
    ]
