"""Local code and variables on a node that does not see the notebook's files: real kernels, packages that were built.

The pool is this machine's own, told to build packages and to see nothing of the notebook (`environments = "built"`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import Home, Kernel

# one small package, so that a build is a matter of a second
REQUIREMENTS = "six==1.17.0\n"


def last_run(home: Home) -> str:
    return list(home.ledger())[-1]


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Home]:
    home = Home()
    base = home.path / "base.txt"
    base.write_text(REQUIREMENTS)
    home.environ |= {
        "SGPU_ENVIRONMENTS": "built",
        "SGPU_ENV_VERSION": str(base),
        "SGPU_VARIABLES": "TEAM_*",
        "SGPU_CODE_LIMIT_BYTES": "3000000",
        "SGPU_CODE_WARN_BYTES": "1000000",
        "HF_HUB_OFFLINE": "1",
        "TEAM_NAME": "vision",
        "NOT_ON_THE_LIST": "stays",
    }
    yield home
    home.close()


@pytest.fixture(scope="module")
def notebook(elsewhere: Home) -> Iterator[Kernel]:
    kernel = Kernel(elsewhere)
    kernel.check("%load_ext sgpu_magic")
    yield kernel
    kernel.close()


def test_modules_of_the_notebooks_folder_travel_and_an_edit_is_new_code(notebook: Kernel):
    work = notebook.home.work
    (work / "model.py").write_text("import helper\ndef answer():\n    return helper.VALUE\n")
    (work / "helper.py").write_text("VALUE = 1\n")
    (work / "unused.py").write_text("")
    package = work / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "words.txt").write_text("one two")
    cell = (
        "%%distributed -n 2 --out seen --ui none\n"
        "import os, model, importlib.resources, six\n"
        "import pkg\n"
        "seen = [model.answer(), importlib.resources.read_text('pkg', 'words.txt'), model.__file__, os.getcwd(),\n"
        "        os.path.exists('unused.py'), sorted(os.listdir(os.path.dirname(model.__file__))), six.__file__]"
    )
    notebook.check(cell)
    answer, words, file, cwd, unused, files, six = notebook.value("seen")
    home, run = notebook.home, last_run(notebook.home)
    assert (answer, words, unused) == (1, "one two", False)
    assert cwd == str(home.run_dir(run) / "work")
    assert file.startswith(str(home.run_dir(run) / "code"))
    assert files == ["helper.py", "model.py", "pkg"] or "__pycache__" in files
    assert str(home.state / "environments") in six
    (work / "helper.py").write_text("VALUE = 2\n")
    notebook.check(cell)
    assert notebook.value("seen[0]") == 2
    spec = json.loads((home.run_dir(last_run(home)) / "run.json").read_text())["spec"]
    ((entry, digest),) = spec["code"]
    assert entry == str(work)
    assert (home.state / "environments" / "code" / digest / "helper.py").read_text() == "VALUE = 2\n"


def test_a_module_imported_in_the_kernel_travels_as_it_is_on_disk(notebook: Kernel):
    path = notebook.home.work / "imported.py"
    path.write_text("def f():\n    return 'old'\n")
    notebook.check("import imported\nfrom imported import f")
    path.write_text("def f():\n    return 'new'\n")
    notebook.check("%%distributed -n 1 --out got --ui none\ngot = f()")
    assert notebook.value("got") == "new"
    assert notebook.value("f()") == "old"
    # other tests check what is shipped
    path.unlink()
    notebook.check("import sys\ndel sys.modules['imported'], imported, f")


@pytest.mark.slow
def test_a_path_entry_of_the_users_travels(notebook: Kernel):
    shelf = notebook.home.path / "shelf"
    shelf.mkdir()
    (shelf / "shelved.py").write_text("NAME = 'shelved'\n")
    notebook.check(f"import sys; sys.path.append({str(shelf)!r})")
    notebook.check("%%distributed -n 1 --out got --ui none\nfrom shelved import NAME as got")
    assert notebook.value("got") == "shelved"
    notebook.check(f"sys.path.remove({str(shelf)!r})")


@pytest.mark.slow
def test_variables_travel_by_the_list_the_setting_and_the_users_word(notebook: Kernel):
    notebook.check("%env SET_BY_MAGIC=a")
    notebook.check("import os; os.environ['SET_IN_CODE'] = 'b'")
    notebook.check(
        "%%distributed -n 1 --out got --ui none --env GIVEN=c --env PYTHONUNBUFFERED=1\n"
        "import os\n"
        "wanted = ['SET_BY_MAGIC', 'SET_IN_CODE', 'GIVEN', 'HF_HUB_OFFLINE', 'TEAM_NAME', 'RANK', 'PYTHONUNBUFFERED']\n"
        "got = [{name: os.environ.get(name) for name in wanted}, os.environ['VIRTUAL_ENV'], os.environ['PATH']]"
    )
    values, prefix, path = notebook.value("got")
    assert values == {
        "SET_BY_MAGIC": "a",
        "SET_IN_CODE": "b",
        "GIVEN": "c",
        "HF_HUB_OFFLINE": "1",
        "TEAM_NAME": "vision",
        "RANK": "0",
        "PYTHONUNBUFFERED": "1",
    }
    assert Path(prefix).is_relative_to(notebook.home.state / "environments")
    assert path.split(":")[0] == f"{prefix}/bin"
    run = notebook.home.run_dir(last_run(notebook.home))
    names = json.loads((run / "run.json").read_text())["spec"]["variable_names"]
    assert {"SET_BY_MAGIC", "SET_IN_CODE", "GIVEN", "HF_HUB_OFFLINE", "TEAM_NAME"} <= set(names)
    assert not {"NOT_ON_THE_LIST", "PATH", "HOME", "SGPU_STATE_DIR", "JPY_PARENT_PID", "MPLBACKEND"} & set(names)


def test_what_can_not_be_imported_there_is_refused_before_anything_starts(notebook: Kernel):
    runs = len(notebook.home.runs)
    notebook.check(
        "import sys, types\n"
        "made = types.ModuleType('made_here'); exec('class Thing: pass', made.__dict__)\n"
        "sys.modules['made_here'] = made; thing = made.Thing()"
    )
    reply = notebook.run("%%distributed -n 1 --ui none\nprint(thing)")
    assert reply.ename == "SerializationError"
    assert "`Thing` of the module `made_here`" in reply.evalue
    assert len(notebook.home.runs) == runs


@pytest.mark.slow
def test_large_code_is_told_and_too_large_code_refused(notebook: Kernel):
    package = notebook.home.work / "large"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "weights.bin").write_bytes(bytes(2_000_000))
    reply = notebook.check("%%distributed -n 1\nimport large")
    assert "2.0 MB of local code are sent with the run" in reply.text
    (package / "more.bin").write_bytes(bytes(2_000_000))
    reply = notebook.run("%%distributed -n 1\nimport large")
    assert "weights.bin (2.0 MB)" in reply.evalue
    (package / ".gitignore").write_text("*.bin\n")
    notebook.check("%%distributed -n 1 --out got --ui none\nimport large, os; got = os.listdir(large.__path__[0])")
    assert set(notebook.value("got")) - {"__pycache__"} == {"__init__.py", ".gitignore"}


@pytest.mark.slow
def test_a_sessions_ranks_hear_of_an_edit_and_load_it_anew(notebook: Kernel):
    path = notebook.home.work / "lesson.py"
    path.write_text("def f():\n    return 1\n")
    notebook.check("%sgpu_connect -n 2 --name travelling")
    notebook.check("%%distributed --out got --ui none\nimport lesson; got = lesson.f()")
    assert notebook.value("got") == 1
    path.write_text("def f():\n    return 2\n")
    reply = notebook.check("%%distributed\nprint(lesson.f())")
    assert reply.lines(0) == ["1"]
    assert "edited since" in reply.text
    reply = notebook.check("%%distributed --reload\nprint(lesson.f())")
    assert reply.lines(1) == ["2"]
    notebook.check("%%distributed --out place --ui none\nimport os; place = [os.getcwd(), lesson.__file__]")
    cwd, file = notebook.value("place")
    session = next(run for run in notebook.home.runs if cwd.startswith(str(notebook.home.run_dir(run))))
    assert Path(file).is_relative_to(notebook.home.run_dir(session) / "code")
    notebook.check("%sgpu_disconnect")


def test_here_too_a_package_that_the_chosen_ones_lack_is_told_before_anything_starts(kernel: Kernel):
    pinned = kernel.home.path / "pinned.txt"
    pinned.write_text(f"six==1.17.0 --hash=sha256:{'0' * 64}\n")
    (kernel.home.work / "near.py").write_text("X = 1\n")
    kernel.check("import pytest, near\nclass Holds:\n    pass\nheld = Holds(); held.value = pytest.approx, near")
    runs = len(kernel.home.runs)
    reply = kernel.run(f"%%distributed -n 1 --env-version {pinned} --ui none\nprint(held)")
    assert reply.ename == "SerializationError"
    assert "package pytest, which environment pinned.txt does not have" in reply.evalue
    assert len(kernel.home.runs) == runs
    kernel.check("del held")
