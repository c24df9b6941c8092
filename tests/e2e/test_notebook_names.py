"""`%load_ext sgpu_magic.compat` in a real kernel: what a Databricks notebook has without defining it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import Home, Kernel

HOME_VARIABLES = {"SGPU_SIMULATE": "a10:4,h100:8", "SGPU_STAND_IN": "cpu", "SGPU_RAY_DASHBOARD": "false"}

SOURCE = "# Databricks notebook source\n"
COMMAND = "\n# COMMAND ----------\n"


@pytest.fixture
def notebook(kernel: Kernel) -> Iterator[Kernel]:
    """A kernel with the extension loaded; nothing of it is left afterwards."""
    kernel.check("%load_ext sgpu_magic.compat")
    yield kernel
    kernel.check("if 'dbutils' in globals(): dbutils.widgets.removeAll()\n%unload_ext sgpu_magic.compat")


def test_the_names_come_and_go_and_leave_the_users_alone(kernel: Kernel):
    names = "sorted({'dbutils', 'displayHTML', 'spark'} & set(globals()))"
    kernel.check("displayHTML = str.upper")
    run = kernel.value("repr(get_ipython().find_line_magic('run'))")
    kernel.check("%load_ext sgpu_magic.compat")
    assert kernel.value(names) == ["dbutils", "displayHTML", "spark"]
    assert kernel.value("displayHTML('mine')") == "MINE"
    assert "dbutils" not in kernel.check("%who").text
    kernel.check("%unload_ext sgpu_magic.compat")
    assert kernel.value(names) == ["displayHTML"]
    assert kernel.value("repr(get_ipython().find_line_magic('run'))") == run
    assert "not found" in kernel.run("%restart_python").shown
    assert kernel.value("len(get_ipython().input_transformers_cleanup)") == kernel.value(
        "len([t for t in get_ipython().input_transformers_cleanup if type(t).__name__ != 'CellMagics'])"
    )
    # the ranks are still there
    assert kernel.check("del displayHTML\nget_ipython().run_cell_magic('distributed', '-n 1', 'print(rank)')").lines(0)


def test_a_widget_is_drawn_and_has_what_its_reader_enters(notebook: Kernel):
    reply = notebook.check(
        "dbutils.widgets.text('lr', '0.1', 'learning rate')\n"
        "dbutils.widgets.dropdown('size', 'small', ['small', 'large'])"
    )
    assert len(reply.displays) == 2, reply.story
    shown = [data["application/vnd.jupyter.widget-view+json"]["model_id"] for data in reply.displays]
    text, choice = (notebook.front_end.models[model_id] for model_id in shown)
    assert (text.state["_model_name"], text.state["value"], text.state["description"]) == (
        "TextModel", "0.1", "learning rate",
    )  # fmt: skip
    assert choice.state["_options_labels"] == ["small", "large"]
    notebook.front_end.set(text, value="0.5")
    notebook.front_end.set(choice, index=1)
    assert notebook.value("dbutils.widgets.getAll()") == {"lr": "0.5", "size": "large"}
    notebook.check("dbutils.widgets.removeAll()")
    assert not text.is_open
    reply = notebook.run("dbutils.widgets.get('lr')")
    assert "the notebook has no widget 'lr'. It has: none." in reply.traceback


def test_cells_with_one_percent_sign(notebook: Kernel):
    assert notebook.check("%sh\nfor n in 1 2\ndo echo line $n\ndone\nfalse").text == "line 1\nline 2"
    assert notebook.check("%md\n# Title\n- a point").displays[0]["text/markdown"] == "# Title\n- a point\n"
    assert notebook.check("%python\nx = 20\nx + 1").result == "21"
    assert "no Spark here" in notebook.run("%sql\nselect 1").shown
    assert notebook.check("displayHTML('<b>bold</b>')").displays[0]["text/html"] == "<b>bold</b>"


def test_on_the_ranks_html_is_shown_and_dbutils_says_why_it_is_not_there(notebook: Kernel):
    reply = notebook.check("%%distributed -n 1 --type cpu\ndisplayHTML('<i>from the rank</i>')")
    assert "<i>from the rank</i>" in reply.html + str(reply.displays), reply.story
    for use in ("dbutils.widgets.get('lr')", "spark.sql('select 1')"):
        reply = notebook.run(f"%%distributed -n 1 --type cpu\n{use}")
        name = use.partition(".")[0]
        assert reply.ename == "SerializationError"
        assert f"the cell uses `{name}`, which stays in the notebook: {name} is an object of the" in reply.traceback
    reply = notebook.run(
        "def lr():\n    return dbutils.widgets.get('lr')\nget_ipython().run_cell_magic('distributed', '-n 1', 'lr()')"
    )
    assert "uses `lr`, which uses `dbutils`, which stays in the notebook" in reply.traceback
    assert "If the ranks don't reach it, keep the name out with --exclude dbutils." in reply.traceback


def test_cells_that_go_to_the_ranks_leave_dbutils_here(notebook: Kernel):
    notebook.check("%sgpu_connect -n 2 --type cpu\n%sgpu_auto on")
    try:
        notebook.check("dbutils.widgets.text('lr', '0.25')\nlr = float(dbutils.widgets.get('lr'))")
        assert notebook.check("print(lr * rank)").lines(1) == ["0.25"]
        assert notebook.check("%python\nprint('python', rank)").lines(1) == ["python 1"]
        assert notebook.check("%sh\necho $RANK here").text.strip() == "here"
        notebook.check("%sgpu_auto off\n%reload_ext sgpu_magic")
        notebook.check("%sgpu_connect -n 2 --type cpu\n%sgpu_auto on")
        assert notebook.check("%sh\necho $RANK there").text.strip() == "there"
        # a comment does not keep a cell in the notebook
        assert notebook.check("# not dbutils\nprint('on', rank)").lines(1) == ["on 1"]
    finally:
        notebook.check("%sgpu_auto off\n%sgpu_disconnect")


# ---------------------------------------------------------------- other notebooks


@pytest.fixture
def other(home: Home) -> Iterator[Path]:
    """A notebook in source format, in a folder, which runs another one beside it."""
    folder = home.work / "common"
    folder.mkdir()
    (folder / "base.py").write_text(f"{SOURCE}base = 'from base'\n")
    path = folder / "setup.py"
    path.write_text(
        f"{SOURCE}# MAGIC %run ./base\n{COMMAND}\n# MAGIC %md\n# MAGIC words\n{COMMAND}\n"
        f"# MAGIC %sh\n# MAGIC echo shell of setup\n{COMMAND}\n"
        "def scaled(x):\n    return x / factor\nenv = dbutils.widgets.getArgument('env', 'none')\nenv\n"
    )
    (folder / "cells.ipynb").write_text(
        json.dumps({"cells": [{"cell_type": "code", "source": ["from_cells = 1\n", "from_cells + 1"]}], "nbformat": 4})
    )
    yield path
    for each in folder.iterdir():
        each.unlink()
    folder.rmdir()


@pytest.mark.usefixtures("other")
def test_run_puts_another_notebooks_names_here(notebook: Kernel):
    reply = notebook.check('%run ./common/setup $env="dev"')
    assert reply.text == "shell of setup\n'dev'", reply.story
    # `$env` is no variable of this notebook, which has one of that name now
    assert notebook.check('%run ./common/setup $env="prod"').text == "shell of setup\n'prod'"
    notebook.check("env = 'dev'")
    assert notebook.value("[base, env]") == ["from base", "dev"]
    assert notebook.check("%run common/cells").text == "2"
    assert notebook.check('%run common/cells.ipynb $x="1"').text == "2"
    # the arguments apply to the other notebook only
    assert notebook.value("dbutils.widgets.getArgument('env', 'none')") == "none"
    # functions that it defined work on the ranks
    notebook.check("factor = 4")
    assert notebook.check("%%distributed -n 1 --type cpu\nprint(scaled(2))").lines(0) == ["0.5"]
    # IPython's own %run of a script is as it was
    (notebook.home.work / "script.py").write_text("print(__name__)\n")
    assert notebook.check("%run script.py").text == "__main__"
    assert notebook.check("line = 'wrong'\nname = 'script'\n%run {name}.py").text == "__main__"


@pytest.mark.usefixtures("other")
def test_an_error_in_another_notebook_is_shown_once_with_its_line(notebook: Kernel):
    notebook.check("%run ./common/setup\nfactor = 0")
    (notebook.home.work / "fails.py").write_text(f"{SOURCE}ok = 1\n{COMMAND}\ny = 2\nscaled(1)\n")
    reply = notebook.run("%run ./fails")
    assert reply.ename == "ZeroDivisionError"
    assert reply.messages.count("error") == 1
    assert "fails.py, cell 2" in reply.traceback
    assert "setup.py, cell 4" in reply.traceback
    assert "return x / factor" in reply.traceback
    assert "execution.py" not in reply.traceback
    (notebook.home.work / "loop.py").write_text(f"{SOURCE}# MAGIC %run ./loop\n")
    assert "in a cycle: loop.py -> loop.py" in notebook.run("%run ./loop").traceback


def test_exit_ends_run_all_with_one_line(notebook: Kernel):
    first = notebook.start(
        "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)\n"
        "try:\n    dbutils.notebook.exit('all\\ndone')\nexcept Exception:\n    print('caught')"
    )
    queued = [notebook.start("after = 1"), notebook.start("after = 2")]
    # messages sent before this reply have reached the kernel, which aborts only those that it has at the exit
    asked = notebook.client.session.msg("kernel_info_request")
    notebook.client.control_channel.send(asked)
    while notebook.client.get_control_msg(timeout=10)["parent_header"]["msg_id"] != asked["header"]["msg_id"]:
        pass
    (notebook.home.work / "go").touch()
    reply = first.wait(10)
    assert reply.status == "error"
    assert reply.traceback == "Notebook exited: all done"
    assert reply.streams == ""
    assert [cell.wait(10).status for cell in queued] == ["aborted", "aborted"]
    # a cell that the user runs afterwards is executed
    assert notebook.value("'after' in globals()") is False
    assert notebook.check("after = 3").status == "ok"


@pytest.mark.slow
def test_an_interrupt_ends_the_other_notebook_too(notebook: Kernel, home: Home):
    code = "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(600)"
    cell = {"cell_type": "code", "source": code, "metadata": {}, "outputs": [], "execution_count": None, "id": "a"}
    metadata = {"kernelspec": {"name": "python3", "display_name": "python3"}}
    made = {"cells": [cell], "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    (home.work / "sleeps.ipynb").write_text(json.dumps(made))
    running = notebook.start("dbutils.notebook.run('./sleeps')")
    running.until(lambda: (home.work / "begun").exists(), 60, "the other notebook begins")
    notebook.interrupt()
    reply = running.wait(60)
    assert reply.ename == "KeyboardInterrupt", reply.story
    # the leak check fails if a process is left
    assert notebook.check("print('goes on')").text == "goes on"


def test_restart_python_forgets_variables_and_goes_on(notebook: Kernel):
    notebook.check("import json\nx = list(range(3))\n_y = 1\nx")
    first = notebook.start("dbutils.library.restartPython()")
    then = notebook.start("found = sorted(name for name in ('x', '_y', 'json', 'dbutils') if name in globals())")
    assert (first.wait(20).status, then.wait(20).status) == ("ok", "ok")
    assert first.reply.text == ""
    assert notebook.value("found") == ["dbutils"]
    assert notebook.value("sum(isinstance(value, list) and value == [0, 1, 2] for value in Out.values())") == 0
    assert notebook.check("%restart_python").text == ""
    assert notebook.value("'found' in globals()") is False
    # the extension is still there
    assert notebook.check("%%distributed -n 1 --type cpu\nprint('rank', rank)").lines(0) == ["rank 0"]
