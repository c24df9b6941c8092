"""`dbutils` and the other names of a Databricks notebook: their values, files, secrets, and cells' magics."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from waiting import eventually

from sgpu_magic.errors import UsageError
from sgpu_magic.functions.compat.notebook import execution
from sgpu_magic.functions.compat.notebook.dbutils import Secrets, Widgets, variable_of
from sgpu_magic.functions.compat.notebook.execution import Library, Notebook, RunMagic, find_notebook, forget_replaced
from sgpu_magic.functions.compat.notebook.file_system import FileSystem, run_line
from sgpu_magic.functions.compat.notebook.names import CellMagics
from sgpu_magic.functions.compat.notebook.spark import Spark, run_sql
from sgpu_magic.options import notebook_job
from sgpu_magic.packages.distributions import InstalledPackages
from sgpu_magic.packages.snapshot import read_snapshot
from sgpu_magic.payload.namespace import only_in_notebook

# ---------------------------------------------------------------- widgets


def shown_widgets(**parameters: str) -> tuple[Widgets, list]:
    """Widgets in a front end that draws them, and the controls that it has drawn."""
    drawn: list = []
    return Widgets(parameters, drawn.append), drawn


def test_a_widget_has_its_default_until_somebody_changes_it():
    widgets, drawn = shown_widgets()
    widgets.text("lr", "0.1", "learning rate")
    widgets.dropdown("size", "s", ["s", "m"])
    widgets.combobox("name", "other", ["a", "b"])
    widgets.multiselect("days", "mo,tu", ["mo", "tu", "we"])
    assert widgets.getAll() == {"lr": "0.1", "size": "s", "name": "other", "days": "mo,tu"}
    assert [type(control).__name__ for control in drawn] == ["Text", "Dropdown", "Combobox", "SelectMultiple"]
    assert [control.description for control in drawn] == ["learning rate", "size", "name", "days"]
    drawn[0].value, drawn[1].value, drawn[3].value = "0.5", "m", ("we",)
    assert widgets.getAll() == {"lr": "0.5", "size": "m", "name": "other", "days": "we"}
    # the cell runs again: the chosen value and the control are kept
    widgets.dropdown("size", "s", ["s", "m"])
    assert widgets.get("size") == "m"
    assert drawn[4] is drawn[1]
    # a different widget of the same name starts from its default
    widgets.dropdown("size", "s", ["s", "m", "l"])
    assert widgets.get("size") == "s"
    assert drawn[1].comm is None
    widgets.removeAll()
    assert widgets.getAll() == {}
    assert drawn[0].comm is None


def test_parameters_take_precedence_and_nothing_is_drawn_without_a_front_end():
    widgets = Widgets({"lr": "0.25", "only": "x"}, None)
    widgets.text("lr", "0.1")
    widgets.text("n", 3)  # pyright: ignore[reportArgumentType]  people write numbers
    assert (widgets.get("lr"), widgets.get("n"), widgets.get("only")) == ("0.25", "3", "x")
    widgets.remove("lr")
    assert widgets.get("lr") == "0.25"
    assert widgets.getArgument("missing", "default") == "default"
    assert widgets.getArgument("lr", "default") == "0.25"


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda w: w.get("batch"), r"no widget 'batch'\. It has: lr\. .* `sgpu run -p batch=VALUE`"),
        (lambda w: w.getArgument("batch"), "no widget 'batch'"),
        (lambda w: w.dropdown("x", "c", ["a", "b"]), "default 'c' of the widget 'x' is not among its choices: a, b"),
        (lambda w: w.multiselect("x", "a,c", ["a", "b"]), "default 'c' of the widget 'x'"),
    ],
)
def test_a_widget_that_is_wrong_says_what_would_be_right(ask: Callable[[Widgets], object], says: str):
    widgets = Widgets({}, None)
    widgets.text("lr", "0.1")
    with pytest.raises(UsageError, match=says):
        ask(widgets)


def test_parameters_reach_widgets_as_text(monkeypatch: pytest.MonkeyPatch):
    given = {"lr": 0.1, "name": "a b", "flag": True, "nothing": None, "layers": [64, 32], "more": {"a": 1}}
    monkeypatch.setenv(notebook_job.PARAMETERS_VARIABLE, notebook_job.parameters_as_variable(given))
    assert notebook_job.parameters_of_process() == {
        "lr": "0.1", "name": "a b", "flag": "True", "nothing": "None", "layers": "[64,32]", "more": '{"a":1}',
    }  # fmt: skip
    monkeypatch.setenv(notebook_job.PARAMETERS_VARIABLE, "{")
    with pytest.raises(UsageError, match="SGPU_JOB_PARAMETERS can't be read"):
        notebook_job.parameters_of_process()
    monkeypatch.delenv(notebook_job.PARAMETERS_VARIABLE)
    assert notebook_job.parameters_of_process() == {}


def test_an_unknown_name_says_what_is_there_and_help_lists_it(capsys: pytest.CaptureFixture[str]):
    fs = FileSystem()
    with pytest.raises(AttributeError, match=r"dbutils\.fs has no 'mount' here\. It has: ls, cp, mv, rm, "):
        fs.mount  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    fs.help()
    fs.help("cp")
    out = capsys.readouterr().out
    assert "  put(file, contents, overwrite=False): Write text to a file." in out
    assert "dbutils.fs.cp(from_, to, recurse=False)\n\nCopy a file" in out
    assert not hasattr(fs, "_repr_html_")


@pytest.mark.parametrize("made", [FileSystem(), Widgets({}, None), Spark({})])
def test_none_of_them_leaves_the_notebook(made: object):
    assert "%%distributed" in only_in_notebook(made)
    with pytest.raises(TypeError, match="of the notebook's own process"):
        pickle.dumps(made)


def test_ordinary_objects_may_leave_the_notebook():
    assert [only_in_notebook(value) for value in (None, 1, types, FileSystem, Path)] == [""] * 5


# ---------------------------------------------------------------- files


@pytest.fixture
def volumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGPU_VOLUMES_DIR", str(tmp_path / "volumes"))
    return tmp_path / "volumes"


def test_paths_are_those_of_databricks(volumes: Path, capsys: pytest.CaptureFixture[str]):
    fs = FileSystem()
    assert fs.put("/tmp/a/x.txt", "häl")
    assert capsys.readouterr().out == "Wrote 4 bytes.\n"
    assert (volumes / "dbfs/tmp/a/x.txt").read_text() == "häl"
    assert fs.head("dbfs:/tmp/a/x.txt", 1) == fs.head("/dbfs/tmp/a/x.txt", 1) == "h"
    assert fs.mkdirs("/Volumes/main/default/data")
    assert fs.cp("dbfs:/tmp/a", "/Volumes/main/default/data/a", recurse=True)
    assert (volumes / "Volumes/main/default/data/a/x.txt").exists()
    found = fs.ls("dbfs:/Volumes/main/default/data")
    assert [(entry.path, entry.name, entry.size, entry.isDir()) for entry in found] == [
        ("dbfs:/Volumes/main/default/data/a/", "a/", 0, True)
    ]
    (inner,) = fs.ls(found[0].path)
    assert (inner.name, inner.size, inner.isFile(), fs.head(inner.path)) == ("x.txt", 4, True, "häl")
    assert fs.ls(inner.path) == [inner]
    assert fs.cp(inner.path, "/tmp/b/")
    assert fs.mv("/tmp/b/x.txt", "/tmp/b/y.txt")
    assert [entry.name for entry in fs.ls("/tmp/b")] == ["y.txt"]
    assert fs.rm("/tmp/b/y.txt")
    assert not fs.rm("/tmp/b/y.txt")
    assert fs.rm("/tmp/a", recurse=True)
    assert [entry.name for entry in fs.ls("/tmp")] == ["b/"]


def test_local_paths_are_named_by_their_scheme(tmp_path: Path):
    fs = FileSystem()
    fs.put(f"file:{tmp_path}/x", "1")
    assert fs.ls(f"file:{tmp_path}")[0].path == f"file:{tmp_path}/x"
    assert fs.ls(f"file://{tmp_path}/x")[0].size == 1


@pytest.mark.usefixtures("volumes")
@pytest.mark.parametrize(
    ("do", "error", "says"),
    [
        (lambda fs: fs.put("/there", ""), UsageError, "/there exists.*overwrite=True"),
        (lambda fs: fs.cp("/folder", "/other"), UsageError, "/folder is a folder.*recurse=True"),
        (lambda fs: fs.rm("/folder"), UsageError, "/folder is a folder.*recurse=True"),
        (lambda fs: fs.rm("/folder/../..", True), UsageError, "does not remove the root"),
        (lambda fs: fs.ls("/none"), FileNotFoundError, "there is no /none: on this machine it would be /"),
        (lambda fs: fs.head("s3://bucket/x"), UsageError, "s3://bucket/x is elsewhere"),
    ],
)
def test_files_that_are_wrong(do: Callable[[FileSystem], object], error: type[Exception], says: str):
    fs = FileSystem()
    fs.put("/there", "")
    fs.put("/folder/x", "")
    with pytest.raises(error, match=says):
        do(fs)
    assert fs.ls("/folder")


def test_without_the_setting_it_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SGPU_VOLUMES_DIR", raising=False)
    with pytest.raises(UsageError, match=r"SGPU_VOLUMES_DIR.*Write file:/tmp/x for that path of this machine"):
        FileSystem().head("/tmp/x")


@pytest.mark.usefixtures("volumes")
def test_the_magic_of_files(capsys: pytest.CaptureFixture[str]):
    fs = FileSystem()
    for line in ("put /a/x word", "cp -r /a /b", "ls /b", "head /b/x"):
        run_line(fs, line)
    assert capsys.readouterr().out == "Wrote 4 bytes.\nTrue\n           4  dbfs:/b/x\nword\n"
    with pytest.raises(UsageError, match="%fs takes one of cp, mv, rm"):
        run_line(fs, "mount x")
    with pytest.raises(UsageError, match=r"%fs cp: .*missing"):
        run_line(fs, "cp /a")


# ---------------------------------------------------------------- secrets


def test_secrets_are_variables_or_the_keyrings(monkeypatch: pytest.MonkeyPatch):
    secrets = Secrets()
    monkeypatch.setitem(sys.modules, "keyring", None)
    monkeypatch.setenv("SGPU_SECRET_MY_TEAM__HF_TOKEN", "abc")
    assert variable_of("my-team", "hf.token") == "SGPU_SECRET_MY_TEAM__HF_TOKEN"
    assert secrets.get("my-team", "hf.token") == "abc"
    assert secrets.getBytes("my-team", "hf.token") == b"abc"
    assert [found.key for found in secrets.list("my-team")] == ["hf_token"]
    assert [found.name for found in secrets.listScopes()] == ["my_team"]
    with pytest.raises(UsageError, match=r"no secret 'k' in the scope 'other'\. Set the variable SGPU_SECRET_OTHER__K"):
        secrets.get("other", "k")


def test_a_keyring_that_is_installed_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "keyring.py").write_text(
        "class errors:\n    class KeyringError(Exception): pass\n"
        "def get_password(scope, key):\n"
        "    if scope == 'locked': raise errors.KeyringError('it is locked')\n"
        "    return {('team', 'k'): 'from the keyring'}.get((scope, key))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "keyring", raising=False)
    assert Secrets().get("team", "k") == "from the keyring"
    with pytest.raises(UsageError, match=r"can't be read: it is locked\. Set SGPU_SECRET_LOCKED__K instead"):
        Secrets().get("locked", "k")
    monkeypatch.setenv("SGPU_SECRET_TEAM__K", "variable")
    assert Secrets().get("team", "k") == "variable"
    sys.modules.pop("keyring", None)


# ---------------------------------------------------------------- cells


class Shell:
    """What the transformer and `%run` use of a shell: its line magics, and variable substitution in a line."""

    def __init__(self, *also: str) -> None:
        self.also = also

    def find_line_magic(self, name: str) -> object:
        return print if name == "known" or name in self.also else None

    def var_expand(self, line: str, depth: int) -> str:
        return line


@pytest.mark.parametrize(
    ("cell", "becomes"),
    [
        ("\n\n%sh\nls\npwd\n", "%%bash --no-raise-error\nls\npwd\n"),
        ("%md # Title\ntext\n", "%%markdown\n# Title\ntext\n"),
        ("%python\nx = 1\n", "x = 1\n"),
        ("%sql select 1\n", "%%sql\nselect 1\n"),
        ("%md\n", "pass\n"),
        ("%sh\n", "pass\n"),
        ("%fs\nls /x\n", "%%fs\nls /x\n"),
        ("%fs ls /x\n", "%fs ls /x\n"),
        ("%known x\ny\n", "%known x\ny\n"),
        ("%shell\nls\n", "%shell\nls\n"),
        ("%%sh\nls\n", "%%sh\nls\n"),
        ("x = 1\n%sh ls\n", "x = 1\n%sh ls\n"),
        ("", ""),
    ],
)
def test_cells_with_one_percent_sign(cell: str, becomes: str):
    assert "".join(CellMagics(Shell())(cell.splitlines(keepends=True))) == becomes


def test_a_line_magic_of_the_users_keeps_its_meaning():
    lines = ["%sql select 1\n", "x = 1\n"]
    assert CellMagics(Shell("sql"))(lines) == lines


# ---------------------------------------------------------------- other notebooks


def test_notebooks_are_found_without_their_suffix(tmp_path: Path):
    for name in ("a.py", "b.ipynb"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    assert find_notebook(tmp_path, "./a") == tmp_path / "a.py"
    assert find_notebook(tmp_path / "folder", "../b") == tmp_path / "b.ipynb"
    assert find_notebook(tmp_path, "folder") is None


@pytest.mark.parametrize("line", ["-m package", "script.py --lr 1", "none", "'", "", "it.ipynb"])
def test_what_ipython_runs_goes_to_ipython(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("# %%\nprint(1)\n")
    (tmp_path / "it.ipynb").write_text("{}")
    asked: list[str] = []
    RunMagic(Shell(), Widgets({}, None), asked.append)(line)
    assert asked == [line]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """A notebook's shell; its variables are the test's own."""
    made = InteractiveShell.instance()
    before = dict(made.user_ns)
    yield made
    made.user_ns.clear()
    made.user_ns.update(before)


def notebook_file(path: Path, *sources: str) -> None:
    cells = [{"cell_type": "markdown", "source": ["# Words"]}]
    cells += [{"cell_type": "code", "source": source.splitlines(keepends=True)} for source in sources]
    path.write_text(json.dumps({"cells": cells}))


def test_a_notebook_runs_in_this_namespace_with_its_arguments(
    shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "setup.py").write_text(
        "# Databricks notebook source\nfactor = dbutils_widgets.get('factor')\n\n# COMMAND ----------\n\n"
        "# MAGIC %run ./script.py --fast\n\n# COMMAND ----------\n\nfactor * 2\n"
    )
    (tmp_path / "lib" / "script.py").write_text("print(1)\n")
    (tmp_path / "lib" / "back.py").write_text("# Databricks notebook source\n# MAGIC %run ./again\n")
    (tmp_path / "lib" / "again.py").write_text("# Databricks notebook source\n# MAGIC %run ./back\n")
    notebook_file(tmp_path / "it.ipynb", "b = 2", "c = b + 1;")
    widgets, asked = Widgets({}, None), list[str]()
    magic = RunMagic(shell, widgets, asked.append)
    monkeypatch.setitem(shell.magics_manager.magics["line"], "run", magic)
    shell.user_ns["dbutils_widgets"] = widgets
    magic('./lib/setup $factor="a b"')
    assert shell.user_ns["factor"] == "a b"
    # its last value is displayed, and relative paths in it stay relative to it
    assert "'a ba b'" in capsys.readouterr().out
    assert asked == [f"{tmp_path}/lib/script.py --fast"]
    # its arguments do not reach this notebook's widgets
    assert widgets.getAll() == {}
    magic("it")
    assert (shell.user_ns["b"], shell.user_ns["c"]) == (2, 3)
    with pytest.raises(UsageError, match=r"run each other in a cycle: back\.py -> again\.py -> back\.py"):
        magic("./lib/back")
    with pytest.raises(UsageError) as raised:
        magic("it fast=1")
    assert raised.value.message == "`%run` of the notebook it.ipynb takes arguments as $name=\"value\", not 'fast=1'."
    (tmp_path / "odd.ipynb").write_text("{}")
    with pytest.raises(UsageError, match=r"odd\.ipynb is not a notebook: it is not valid notebook JSON"):
        magic("odd")


# ---------------------------------------------------------------- other notebooks


PLAYS_SGPU_RUN = """#!{python}
import json, os, pathlib, sys, time
here = pathlib.Path({folder!r})
(here / "asked.json").write_text(json.dumps(sys.argv[1:]))
if "--timeout" in sys.argv:
    sys.exit(124)
if "-r" not in sys.argv:
    (here / "begun.part").write_text(str(os.getpid()))
    os.replace(here / "begun.part", here / "begun")
    time.sleep(600)
print("a line of the notebook's")
if "name=bad" in sys.argv:
    sys.stderr.write("".join(f"line {{number}}\\n" for number in range(100)))
    sys.exit(1)
copy = here / "child.executed.ipynb"
copy.write_text(json.dumps({{"metadata": {{"sgpu": {{"exit_value": "abab"}}}} if "name=ab" in sys.argv else {{}}}}))
print(copy)
"""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a notebook, and a program that stands for `sgpu run`; tests/e2e/test_run_databricks.py has that."""
    program = tmp_path / "python"
    program.write_text(PLAYS_SGPU_RUN.format(python=sys.executable, folder=str(tmp_path)))
    program.chmod(0o755)
    notebook_file(tmp_path / "child.ipynb")
    monkeypatch.setattr(execution.sys, "executable", str(program))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_another_notebook_is_run_with_its_arguments_and_gives_its_value(
    jobs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    job = notebook_job.JobDefaults(gpus=2, type="a10")
    monkeypatch.setenv(notebook_job.VARIABLE, notebook_job.as_variable(job))
    assert Notebook().run("./child", arguments={"name": "ab", "n": 3}) == "abab"
    assert capsys.readouterr().out == f"sgpu: child.ipynb has run; its executed copy is {jobs}/child.executed.ipynb\n"
    words = json.loads((jobs / "asked.json").read_text())
    assert words[:4] == ["-m", "sgpu_magic.cli", "run", str(jobs / "child.ipynb")]
    assert words[-4:] == ["-r", "name=ab", "-r", "n=3"]
    # the child gets the job's devices too
    assert words[4:-4] == notebook_job.as_arguments(job)
    assert Notebook().run("child", arguments={"name": "other"}) == ""


def test_a_notebook_that_fails_is_missing_or_takes_too_long(jobs: Path):
    with pytest.raises(UsageError) as missing:
        Notebook().run("./none")
    assert missing.value.message == f"dbutils.notebook.run: there is no notebook './none' in {jobs}."
    with pytest.raises(RuntimeError) as failed:
        Notebook().run("child", arguments={"name": "bad"})
    sent = str(failed.value).splitlines()
    assert sent[0] == "child.ipynb failed: `sgpu run` ended with code 1."
    assert (sent[1], sent[-1], len(sent)) == ("line 80", "line 99", 21)
    with pytest.raises(TimeoutError, match=r"child\.ipynb took longer than 1\.5 s and was ended"):
        Notebook().run("child", 1.5)
    assert json.loads((jobs / "asked.json").read_text())[-2:] == ["--timeout", "1.5s"]


def test_an_interrupt_ends_the_other_notebook(jobs: Path):
    def interrupt() -> None:
        eventually((jobs / "begun").exists, 30, "the other notebook begins")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        Notebook().run("child")
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int((jobs / "begun").read_text()), 0)


# ---------------------------------------------------------------- restart


@pytest.mark.slow
def test_python_is_restarted_in_a_kernel_that_goes_on(
    site: Path, shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    installed(site, "fast", "1", fast__init="__version__ = '1'")
    taken = [snapshot(site)]
    monkeypatch.setattr(execution, "take_snapshot", lambda: taken[-1])
    library = Library(shell, {"dbutils"})
    import fast  # pyright: ignore[reportMissingImports]

    compiled = sys.modules["fast.core"] = types.ModuleType("fast.core")
    compiled.__file__ = str(site / "fast/core.abi3.so")
    shell.user_ns.update(dbutils=1, model=fast, _private=2)
    installed(site, "fast", "2", fast__init="__version__ = '2'")
    taken.append(snapshot(site))
    library.restartPython()
    assert capsys.readouterr().out == (
        "sgpu: restart the kernel to use the change of fast 1 -> 2: compiled code of it is loaded.\n"
    )
    assert shell.user_ns["dbutils"] == 1
    assert not {"model", "_private"} & shell.user_ns.keys()
    assert "get_ipython" in shell.user_ns
    # reported once
    library.restartPython()
    assert capsys.readouterr().out == ""
    # a removed package, and a package without a list of its files
    (site / "fast-2.dist-info" / "RECORD").unlink()
    assert forget_replaced(taken[-1], InstalledPackages(()), sys.modules) == [
        "restart the kernel to use the change of fast 2 removed: compiled code of it is loaded."
    ]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages on the import path; modules imported from it are removed afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def installed(site: Path, name: str, version: str, **files: str) -> None:
    """Install a distribution of these files, named with `__` for a slash, into the folder."""
    record = [f"{name}-{version}.dist-info/METADATA,,"]
    for old in site.glob(f"{name}-*.dist-info"):
        (old / "METADATA").unlink()
        (old / "RECORD").unlink()
        old.rmdir()
    for file, source in files.items():
        path = site / (file.replace("__", "/").replace("/init", "/__init__") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        record.append(f"{path.relative_to(site)},,")
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("\n".join(record) + "\n")


def snapshot(site: Path) -> InstalledPackages:
    return read_snapshot([str(site)])


def test_replaced_packages_are_imported_anew(site: Path):
    installed(site, "oldnew", "1", oldnew__init="from oldnew import part", oldnew__part="value = 1")
    installed(site, "same", "1", samepkg="x = 1")
    before = snapshot(site)
    import oldnew  # pyright: ignore[reportMissingImports]
    import samepkg  # pyright: ignore[reportMissingImports]

    installed(site, "oldnew", "2", oldnew__init="from oldnew import part", oldnew__part="value = 22")
    assert forget_replaced(before, snapshot(site), sys.modules) == []
    assert not {"oldnew", "oldnew.part"} & set(sys.modules)
    assert sys.modules["samepkg"] is samepkg
    again = __import__("oldnew")
    assert (again.part.value, oldnew.part.value) == (22, 1)
    # no changes since
    assert forget_replaced(snapshot(site), snapshot(site), sys.modules) == []
    assert sys.modules["oldnew"] is again


def test_a_namespace_package_keeps_what_others_have_in_it(site: Path):
    installed(site, "one", "1", sharing__one__init="")
    installed(site, "two", "1", sharing__two__init="")
    before = snapshot(site)
    import sharing.one  # pyright: ignore[reportMissingImports]
    import sharing.two  # pyright: ignore[reportMissingImports]  # noqa: F401

    installed(site, "one", "2", sharing__one__init="")
    assert forget_replaced(before, snapshot(site), sys.modules) == []
    assert {"sharing", "sharing.one", "sharing.two"} & set(sys.modules) == {"sharing", "sharing.two"}


def test_compiled_packages_need_a_restart_of_the_kernel(site: Path):
    installed(site, "fast", "1", fast__init="__version__ = '1'")
    before = snapshot(site)
    import fast  # pyright: ignore[reportMissingImports]

    compiled = sys.modules["fast.core"] = types.ModuleType("fast.core")
    compiled.__file__ = str(site / "fast/core.abi3.so")
    installed(site, "fast", "2", fast__init="__version__ = '2'")
    (sentence,) = forget_replaced(before, snapshot(site), sys.modules)
    assert sentence == "restart the kernel to use the change of fast 1 -> 2: compiled code of it is loaded."
    assert sys.modules["fast"] is fast
    # the module was imported after the package changed
    fast.__version__ = "2"
    assert forget_replaced(before, snapshot(site), sys.modules) == []


def test_what_the_kernel_runs_on_stays(site: Path):
    installed(site, "comm", "1", commlike="x = 1")
    before = snapshot(site)
    import commlike  # pyright: ignore[reportMissingImports]

    installed(site, "comm", "2", commlike="x = 2")
    (sentence,) = forget_replaced(before, snapshot(site), sys.modules)
    assert "restart the kernel to use the change of comm 1 -> 2" in sentence
    assert sys.modules["commlike"] is commlike


# ---------------------------------------------------------------- spark


def test_without_pyspark_it_is_a_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    for use in (lambda: Spark({}).read, lambda: run_sql(Spark({}), "select 1", {})):
        with pytest.raises(UsageError, match="no Spark here, because pyspark is not installed"):
            use()
    assert "pyspark is not installed" in repr(Spark({}))


def test_without_pyspark_the_users_name_is_known(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.setenv("LOGNAME", "ann")
    spark = Spark({})
    assert spark.sql("SELECT current_user()").collect()[0][0] == "ann"
    assert spark.sql("select current_user() as username;").first()["username"] == "ann"
    assert spark.sql("SELECT session_user() name").first().name == "ann"
    assert spark.sql("SELECT current_user()").first()["current_user()"] == "ann"
    run_sql(spark, "select current_user()", {})
    assert capsys.readouterr().out == "current_user()\nann\n"
    with pytest.raises(UsageError, match="no Spark here"):
        spark.sql("SELECT current_user() FROM t")


PYSPARK = """
class Frame:
    def __init__(self, text): self.text, self.columns = text, ["n"] if "select" in text else []
    def show(self): print("rows of", self.text)
class Session:
    def sql(self, text): return Frame(text)
class SparkSession:
    class builder:
        @staticmethod
        def getOrCreate(): return Session()
"""


def test_with_pyspark_it_is_the_session(site: Path, capsys: pytest.CaptureFixture[str]):
    (site / "pyspark").mkdir()
    (site / "pyspark/__init__.py").touch()
    (site / "pyspark/sql.py").write_text(PYSPARK)
    sys.modules.pop("pyspark", None)
    namespace: dict[str, object] = {}
    namespace["spark"] = lazy = Spark(namespace)
    assert repr(lazy) == "spark: a session is made when it is used"
    run_sql(lazy, "use main;\nselect 1;\n", namespace)
    assert capsys.readouterr().out == "rows of select 1\n"
    assert type(namespace["spark"]).__name__ == "Session"
    assert type(namespace["_sqldf"]).__name__ == "Frame"
