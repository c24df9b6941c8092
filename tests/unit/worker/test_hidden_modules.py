"""Modules that were executed ahead appear in a process as if its own code had executed them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

# what a process sees of imports: executed plainly, and executed ahead, hidden and shown
PROGRAM = """
import atexit, importlib, json, logging, logging.config, os, sys, warnings
from sgpu_magic.worker.preload.hidden_modules import HiddenModules
from sgpu_magic.worker.preload.import_recorder import ImportRecorder

def seen(before, registered, shown):
    names = [name for name in sys.modules if name not in before]
    return {
        "modules": names,
        "attributes": {name: sorted(vars(sys.modules[name])) for name in names},
        "specs": {name: repr(type(sys.modules[name].__spec__.loader)) for name in names},
        "packages": {name: sys.modules[name].__package__ for name in names},
        "environ": {name: value for name, value in os.environ.items() if name.startswith("T_")},
        "filters": [repr(each) for each in warnings.filters],
        "registered": registered,
        "shown": shown,
        "finders": [type(each).__name__ for each in sys.meta_path],
        "disabled": sorted(
            name for name, each in logging.Logger.manager.loggerDict.items()
            if name in sys.modules and isinstance(each, logging.Logger) and each.disabled
        ),
    }

def one(roots, ahead, planned):
    registered, shown = [], []
    def register(function, *args, **kwargs):
        registered.append([function.__module__, list(args)])
        return function
    atexit.register = register
    before = set(sys.modules)
    if ahead:
        hidden = HiddenModules()
        # in another order than the process imports them
        for root in reversed(roots):
            recorder = hidden.recorder()
            with recorder.recording():
                importlib.import_module(root)
            hidden.hide(recorder.imports)
        hidden.plan(planned)
        assert not {name for name in sys.modules if name not in before}, sys.modules.keys() - before
        assert registered == []
    first = seen(before, list(registered), list(shown))
    logging.config.dictConfig({"version": 1})
    warnings.showwarning = lambda message, category, filename, *rest: shown.append([str(message), filename])
    found = []
    for root in roots:
        importlib.import_module(root)
        found.append(seen(before, list(registered), list(shown)))
    if ahead:
        first["finders"].remove("HiddenModules")
        for each in found:
            each["finders"] = [name for name in each["finders"] if name != "HiddenModules"]
    return [first, *found]

for line in sys.stdin:
    folder, roots, ahead, planned = json.loads(line)
    reading, writing = os.pipe()
    if os.fork() == 0:
        sys.path.insert(0, folder)
        with open(writing, "w") as out:
            json.dump(one(roots, ahead, planned), out)
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        print(json.dumps(json.loads(answer.read() or "null")), flush=True)
    os.wait()
"""
LINES = (
    "import os; os.environ['T_{name}'] = '1'",
    "import os; os.environ['T_{name}'] = os.environ.get('T_{name}', '') + '{name} '",
    "import os; os.environ.setdefault('T_{name}', '2'); os.environ.pop('T_{name}')",
    "import warnings; warnings.warn('from {name}', DeprecationWarning)",
    "import warnings; warnings.warn('from {name}')",
    "import warnings; warnings.filterwarnings('ignore', 'of {name}')",
    "import warnings; warnings.simplefilter('always')",
    "import atexit; atexit.register(lambda *args: None, '{name}')",
    "import logging; logger = logging.getLogger(__name__)",
    "value = 1",
    "def __getattr__(name):\n    if name[0] == '_':\n        raise AttributeError(name)\n"
    "    import importlib\n    return importlib.import_module('{other}')",
    "import importlib; importlib.import_module('{other}')",
    "import {other}",
    "import {other}",
    "import {other} as alias",
    "from {other} import *",
    "try:\n    import missing_{name}\nexcept ImportError:\n    pass",
    "import sys, types; sys.modules['put_there_{name}'] = part = types.ModuleType('put_there_{name}')\n"
    "part.__spec__ = __spec__",
)


def write_packages(folder: Path, seed: int) -> list[str]:
    """Write packages whose modules import each other at random, and their own packages. Returns what to import.

    There are no other circles, since the order of their modules depends on which of them is imported first, and no
    `from package import *`, since what it finds depends on what was imported before.
    """
    chance = random.Random(seed)
    folder.mkdir(parents=True)
    packages = [f"p{seed}_{number}" for number in range(chance.randint(1, 4))]
    names: list[str] = []
    for package in packages:
        names += [f"{package}.m{number}" for number in range(chance.randint(0, 4))] + [package]
    for at, name in enumerate(names):
        lines: list[str] = []
        earlier = [*names[:at], name.partition(".")[0]]
        for line in chance.choices(LINES, k=chance.randint(0, 5)):
            other = chance.choice(earlier)
            form = "import {other}" if line.endswith("*") and other in packages else line
            lines.append(form.format(name=name.replace(".", "_"), other=other))
        path = folder.joinpath(*name.split("."))
        if name in packages:
            path.mkdir(exist_ok=True)
            path /= "__init__"
            inner = [each.rpartition(".")[2] for each in names if each.startswith(f"{name}.")]
            lines += [f"from . import {each}" for each in inner if chance.random() < 0.4]
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".py").write_text("\n".join(lines) + "\n")
    return chance.sample(names, k=min(len(names), chance.randint(1, 3)))


@pytest.fixture(scope="module")
def program() -> Any:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def seen(
    program: subprocess.Popen[str], folder: Path, roots: list[str], *, ahead: bool, planned: list[str] | None = None
) -> Any:
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(json.dumps([str(folder), roots, ahead, planned or []]) + "\n")
    return json.loads(program.stdout.readline())


@pytest.mark.parametrize("seed", range(60))
def test_shown_modules_are_as_executed_ones(program: subprocess.Popen[str], tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "site-packages"
    roots = write_packages(folder, seed)
    plain = seen(program, folder, roots, ahead=False)
    if plain is None:
        pytest.skip("these imports fail without anything else")
    assert seen(program, folder, roots, ahead=True) == plain
    assert seen(program, folder, roots, ahead=True, planned=roots) == plain


def run(code: str, *folders: Path) -> str:
    head = """
        import importlib, os, sys
        from sgpu_magic.worker.preload.hidden_modules import HiddenModules
        from sgpu_magic.worker.preload.import_recorder import ImportRecorder
        def ahead(*roots):
            hidden = HiddenModules()
            recorder = hidden.recorder()
            with recorder.recording():
                for root in roots:
                    importlib.import_module(root)
            hidden.hide(recorder.imports)
            return hidden
    """
    program = textwrap.dedent(head) + textwrap.dedent(code)
    path = ":".join(map(str, folders))
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return folder


def test_a_file_of_the_user_takes_the_place_of_a_module_that_was_executed(tmp_path: Path) -> None:
    installed = write(tmp_path / "site-packages", top="import inner, other", inner="where = 'installed'", other="")
    own = write(tmp_path / "notebook", inner="where = 'the notebook'")
    out = run(
        f"""
        hidden = ahead("top")
        before = list(hidden.names)
        sys.path.insert(0, {str(own)!r})
        import top
        print(top.inner.where, before, sys.modules["inner"].__file__)
        print(hidden.names)
        """,
        installed,
    )
    first, _, rest = out.partition("\n")
    assert first.startswith("the notebook [")
    assert first.endswith(f" {own / 'inner.py'}")
    assert rest == "[]\n"


def test_a_finder_that_waits_for_a_module_is_called_when_it_is_shown(tmp_path: Path) -> None:
    inner = "import atexit; atexit.register(print, 'at exit')"
    installed = write(tmp_path / "site-packages", top="import inner", inner=inner)
    out = run(
        """
        hidden = ahead("top")
        from sgpu_magic.worker.process.patches import after_import
        after_import(("inner",), lambda module: print("imported", module.__name__, "inner" in sys.modules))
        import top
        import inner
        """,
        installed,
    )
    assert out == "imported inner True\nat exit\n"


def test_what_is_known_of_a_hidden_module_is_as_of_any(tmp_path: Path) -> None:
    installed = write(tmp_path / "site-packages", top="import inner", inner="")
    out = run(
        """
        import importlib.util, inspect
        plain = importlib.util.find_spec("top")
        hidden = ahead("top")
        found = importlib.util.find_spec("top")
        print("top" in sys.modules, plain.origin == found.origin, plain.cached == found.cached)
        print(found.loader.get_source("top") == plain.loader.get_source("top"))
        import top
        print(type(top.__spec__.loader).__name__, inspect.getsource(top).strip(), importlib.reload(top) is top)
        """,
        installed,
    )
    assert out == "False True True\nTrue\nSourceFileLoader import inner True\n"


def test_what_is_read_at_import_is_recorded_by_module(tmp_path: Path) -> None:
    installed = write(
        tmp_path / "site-packages",
        top="import inner, os; 'T_THERE' in os.environ",
        inner="""
            import os
            os.getenv("T_A"), dict(os.environ), os.environ.copy(), list(os.environ.items()), {**os.environ}
            os.environ.get("T_B", ""), os.environ.get(list(os.environ)[0])
            os.getcwd()
        """,
    )
    out = run(
        """
        recorder = ImportRecorder()
        os.environ["T_C"] = "1"
        with recorder.recording():
            import top
        for name in ("inner", "top"):
            record = recorder.imports[name]
            print(sorted(record.reads), record.reads_directory, sorted(record.requests - {"_io"}))
        """,
        installed,
    )
    assert out == "['PYTHONPATH', 'T_A', 'T_B'] True ['os']\n['T_THERE'] False ['inner', 'os']\n"


def test_an_import_that_would_execute_a_module_otherwise_is_a_conflict(tmp_path: Path) -> None:
    installed = write(
        tmp_path / "site-packages",
        first="import setter, reader",
        second="import reader",
        third="import setter, reader",
        setter="import os; os.environ['T_SET'] = '1'",
        reader="import os; os.environ.get('T_SET')",
    )
    out = run(
        """
        hidden = HiddenModules()
        for root in ("first", "third", "second"):
            recorder = hidden.recorder()
            with recorder.recording():
                importlib.import_module(root)
            hidden.hide(recorder.imports)
            print(root, repr(hidden.conflict))
        """,
        installed,
    )
    assert out == "first ''\nthird ''\nsecond 'reader'\n"
