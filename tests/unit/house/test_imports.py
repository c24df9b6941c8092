"""Imports go one way, heavy packages have one owner each, and `import sgpu_magic` costs next to nothing.

The contracts of import-linter in pyproject.toml hold who may import whom. What they can't say is here: what an
import really loads, that no two modules import each other (their contract for that takes folders, not modules), that
one place describes a run, and a rule about single modules of two packages.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "sgpu_magic"


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of a tree: `root` has pyproject.toml and the package."""
    command = [Path(sys.executable).parent / "lint-imports", "--no-logo", "--no-cache"]
    environ = {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "200"}
    return subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True)


def test_the_contracts_are_kept():
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


def test_a_wrong_import_would_be_found(tmp_path: Path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(PACKAGE, tmp_path / "sgpu_magic", ignore=lambda _, names: [n for n in names if n == "__pycache__"])
    planted = {
        "agent/planted.py": "def f():\n    from sgpu_magic.worker.process import zygote\n    import torch\n",
        "agent/ranks/planted.py": "import pynvml\n",
        "wire/planted.py": "import socket\n",
        "functions/planted.py": "from sgpu_magic.functions import compat\n",
        "pool/planted.py": "def f():\n    from sgpu_magic.tracking import store\n",
        "worker/planted.py": "from sgpu_magic.worker.ray.cluster import RayRun\n",
        "nodes/planted.py": "from sgpu_magic.agent.runs import ray_directories\n",
        "client/planted.py": "import pickle\nfrom sgpu_magic import views\n",
        "planted_package.py": "",
    }
    for name, code in planted.items():
        (tmp_path / "sgpu_magic" / name).write_text(code)
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    for wrong in (
        "sgpu_magic.agent.planted -> sgpu_magic.worker",
        "sgpu_magic.agent.planted -> torch",
        "sgpu_magic.agent.ranks.planted -> pynvml",
        "sgpu_magic.wire.planted -> socket",
        "sgpu_magic.functions.planted -> sgpu_magic.functions.compat",
        "sgpu_magic.pool.planted -> sgpu_magic.tracking.store",
        "sgpu_magic.worker.planted -> sgpu_magic.worker.ray.cluster",
        "sgpu_magic.nodes.planted -> sgpu_magic.agent.runs.ray_directories",
        "sgpu_magic.client.planted -> pickle",
        "sgpu_magic.client.planted -> sgpu_magic.views",
        "sgpu_magic.planted_package",
    ):
        assert wrong in done.stdout


def test_no_two_modules_import_each_other():
    structure = runpy.run_path(str(ROOT / "scripts" / "house.py"))
    imports = structure["imports_of_files"]({path: path.read_text() for path in PACKAGE.rglob("*.py")})
    assert structure["cycles"](imports) == []


def test_one_place_describes_a_run():
    calls = [path for path in PACKAGE.rglob("*.py") if re.search(r"(?<!class )\bRunSpec\(", path.read_text())]
    assert calls == [PACKAGE / "runs" / "submit" / "spec.py"]


def imports_in(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield line and name, in its parts, of every import that runs at some time: those for type checkers do not."""

    def walk(node: ast.AST) -> Iterator[tuple[int, list[str]]]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.If() if "TYPE_CHECKING" in ast.unparse(child.test):
                    pass
                case ast.Import():
                    yield from ((child.lineno, alias.name.split(".")) for alias in child.names)
                case ast.ImportFrom():
                    yield from ((child.lineno, f"{child.module}.{alias.name}".split(".")) for alias in child.names)
                case _:
                    yield from walk(child)

    yield from walk(ast.parse(path.read_text()))


def test_what_a_server_takes_of_the_panel_knows_no_kernel():
    served = {
        "schema", "device_rows", "pool_state", "past_runs", "poll_pool", "poller", "orders",
    }  # fmt: skip
    widgets = {"live_views", "rank_widgets", "comm", "widgets"}
    wrong: list[str] = []
    for path in [*(PACKAGE / "server").rglob("*.py"), *(PACKAGE / "panel" / f"{name}.py" for name in sorted(served))]:
        for line, (top, part, module, inner, *_) in ((line, [*name, "", "", ""]) for line, name in imports_in(path)):
            knows_kernel = part == "runs" and (module, inner) != ("choice", "schema")
            not_served = part == "panel" and module not in served
            is_widget = module == "live" and inner in widgets
            if top == "sgpu_magic" and (knows_kernel or not_served or is_widget):
                wrong.append(f"{path.relative_to(PACKAGE)}:{line}")
    assert wrong == []


def loaded_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.split()}


HEAVY = {"torch", "ray", "mlflow", "pynvml", "IPython", "numpy", "zmq", "cloudpickle", "anywidget", "ipywidgets"}


@pytest.mark.parametrize(
    ("code", "without"),
    [
        pytest.param("import sgpu_magic", HEAVY, id="the package"),
        pytest.param("import sgpu_magic.runtime", HEAVY, id="runtime"),
        pytest.param("import sgpu_magic.wire.codec", HEAVY, id="wire"),
        pytest.param("import sgpu_magic.agent.service", HEAVY - {"zmq"} | {"packaging"}, id="agent"),
        pytest.param(
            "import sgpu_magic.pool.service, sgpu_magic.nodes.local",
            HEAVY - {"zmq"},
            id="pool",
        ),
        pytest.param("from sgpu_magic.payload import buffers, unpack", {"torch", "numpy"}, id="unpack"),
        pytest.param(
            "import sgpu_magic.magics.extension", HEAVY - {"IPython", "numpy", "zmq", "cloudpickle"}, id="magics"
        ),
        pytest.param("import sgpu_magic.cli.main", {"torch", "ray", "mlflow", "IPython"}, id="command"),
    ],
)  # fmt: skip
def test_an_import_brings_nothing_heavy(code: str, without: set[str]):
    assert loaded_after(code) & without == set()


def test_the_public_names_are_the_documented_ones():
    code = "import sgpu_magic; print(*sgpu_magic.__all__); [getattr(sgpu_magic, n) for n in sgpu_magic.__all__]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = set(done.stdout.split())
    assert {"__version__", "load_ipython_extension", "unload_ipython_extension"} <= names
    assert not any(name.startswith("_") and name != "__version__" for name in names)


# ---------------------------------------------------------------- code in strings

IMPORT = re.compile(r"^\s*from (sgpu_magic[\w.]*) import (\([^)]*\)|[^\n;#]+)", re.MULTILINE)
IMPORTED = re.compile(r"(?:^|[,(])\s*(\w+)(?: as (\w+))?")


def missing_names(code: str) -> list[str]:
    """The names of the package that code imports, or uses of a module that it imports, and that are not there.

    Renaming tools don't look into strings.
    """
    missing: list[str] = []
    for module, names in IMPORT.findall(code):
        for name, alias in IMPORTED.findall(names):
            imported = file_of(f"{module}.{name}")
            if imported is not None:
                defined = {*names_of(imported), "__file__", "__name__", "__dict__"}
                uses = set(re.findall(rf"(?<![\w.]){alias or name}\.([A-Za-z_]\w*)", code))
                missing += [f"{module}.{name}.{use}" for use in uses - defined if not is_in(imported, use)]
            elif (file := file_of(module)) is None or name not in names_of(file):
                missing.append(f"{module}.{name}")
    return missing


def file_of(module: str) -> Path | None:
    """The file of a module or package, None without one."""
    path = ROOT / module.replace(".", "/")
    files = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in files if file.is_file()), None)


def is_in(file: Path, module: str) -> bool:
    """Whether a module is in the package whose `__init__` this is."""
    return file.name == "__init__.py" and ((file.parent / module).is_dir() or (file.parent / f"{module}.py").is_file())


def names_of(file: Path) -> set[str]:
    """The names that a module defines or imports, wherever, and those that it makes by `__getattr__`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.alias():
                names.add(node.asname or node.name)
            case ast.Constant(value=str() as text):
                names.add(text)
            case _:
                pass
    return names


def test_a_name_that_is_not_there_is_found():
    code = "from sgpu_magic import distributed, nowhere\nfrom sgpu_magic.wire.base import (RunState,\n  RunStates,\n)\n"
    assert missing_names(code) == ["sgpu_magic.nowhere", "sgpu_magic.wire.base.RunStates"]
    assert missing_names("    from sgpu_magic.elsewhere import x as y") == ["sgpu_magic.elsewhere.x"]
    uses = "from sgpu_magic.wire import base as b, nodes\nb.RunState, b.Nothing, other.b.x\n"
    assert missing_names(uses) == ["sgpu_magic.wire.base.Nothing", "sgpu_magic.wire.nodes"]


def texts_in(file: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module with their lines; of an f-string, its fixed parts."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Constant(value=str() as text):
                yield node.lineno, text
            case ast.JoinedStr(values=parts):
                yield node.lineno, "{}".join(part.value for part in parts if isinstance(part, ast.Constant))
            case _:
                pass


@pytest.mark.parametrize("folder", ["sgpu_magic", "tests", "scripts"])
def test_code_in_strings_uses_what_is_there(folder: str):
    wrong = {
        f"{path.relative_to(ROOT)}:{line}": missing
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != Path(__file__)
        for line, text in texts_in(path)
        if "import" in text and (missing := missing_names(text))
    }
    assert wrong == {}
