"""Imports go one way, heavy packages have one owner each, and `import sgpu_magic` costs next to nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sgpu_magic"

FOR_ALL = {"errors", "config", "wire", "system", "files", "__version__"}
BY_HAND = {"payload", "packages", "client", "views"}
MAY_USE: dict[str, set[str]] = {
    "__init__": {"functions", "magics", "runs"},
    "errors": set(),
    "config": set(),
    "wire": set(),
    "system": set(),
    "files": set(),
    "payload": set(),
    "packages": set(),
    "client": {"payload", "packages"},
    "views": set(),
    "panel": {"client", "packages", "runs", "views"},
    "runs": BY_HAND,
    "functions": BY_HAND | {"runs", "runtime"},
    "magics": BY_HAND | {"panel", "runs"},
    # the command looks at everything that a person may want to see from a shell
    "cli": BY_HAND | {"agent", "nodes", "runs", "tracking", "pool"},
    "runtime": set(),
    "pool": {"nodes", "packages", "tracking"},
    "nodes": {"agent", "packages"},
    # the worker only by its command line
    "agent": {"packages"},
    "worker": {"functions", "payload", "tracking", "runtime"},
    "tracking": {"packages", "views"},
    "server": {"client", "panel", "runs", "views"},
}
"""What a part of the package may import of the others."""

HEAVY_OWNERS: dict[str, set[str]] = {
    "torch": {"worker", "payload/tensors.py", "runtime.py"},
    "ray": {"nodes/ray", "worker/ray"},
    "pynvml": {"agent/watch/nvml.py"},
    "IPython": {"magics", "views", "runs/notices.py", "worker", "payload/names.py"},
    "ipykernel": {"magics", "views", "worker"},
    "anywidget": {"views/live/widgets.py"},
    "ipywidgets": {"views/live/widgets.py"},
    "mlflow": {"tracking"},
}


@dataclass(frozen=True)
class Import:
    """One import statement.

    Args:
        file: Relative to the package.
        line: Its line.
        module: The absolute name of what is imported, down to the imported name.
        at_import: It runs when its module is imported, not in a function.
    """

    file: str
    line: int
    module: str
    at_import: bool

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def imports_in(source: str, file: str) -> Iterator[Import]:
    """Every import that runs at some time; those for type checkers only are left out."""

    def walk(node: ast.AST, top: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for other in child.orelse:
                    yield from walk(other, top)
                continue
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(file, child.lineno, alias.name, top)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{file}:{child.lineno}: a relative import"
                for alias in child.names:
                    yield Import(file, child.lineno, f"{child.module}.{alias.name}", top)
            else:
                inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, top and not inner)

    yield from walk(ast.parse(source), True)


@cache
def all_imports() -> list[Import]:
    found: list[Import] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        found += imports_in(path.read_text(), path.relative_to(PACKAGE).as_posix())
    return found


def part_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def wrong_way(imports: list[Import]) -> list[str]:
    wrong: list[str] = []
    for found in imports:
        top, _, rest = found.module.partition(".")
        if top != "sgpu_magic":
            continue
        part, target = part_of(found.file), rest.split(".")[0]
        if target != part and target not in FOR_ALL | MAY_USE.get(part, set()):
            wrong.append(f"{found.place}: {part} imports {target}")
    return wrong


def strangers(imports: list[Import]) -> list[str]:
    wrong: list[str] = []
    for found in imports:
        heavy = found.module.split(".")[0]
        owners = HEAVY_OWNERS.get(heavy)
        if owners is not None and not any(
            found.file == owner or found.file.startswith(owner + "/") for owner in owners
        ):
            wrong.append(f"{found.place} imports {heavy}")
    return wrong


def test_every_part_of_the_package_is_known_here():
    parts = {part_of(path.relative_to(PACKAGE).as_posix()) for path in PACKAGE.rglob("*.py")}
    assert parts - set(MAY_USE) == set()


def test_imports_go_one_way():
    assert wrong_way(all_imports()) == []


def test_what_a_server_takes_of_the_panel_knows_no_kernel():
    served = {
        "schema", "messages", "device_rows", "pool_state", "past_runs", "poll_pool", "watch", "pool_list", "orders",
    }  # fmt: skip
    widgets = {"live_views", "rank_widgets", "comm", "widgets"}
    wrong: list[str] = []
    for found in all_imports():
        top, part, module, inner, *_ = [*found.module.split("."), "", "", ""]
        is_served = found.file.removeprefix("panel/").removesuffix(".py") in served
        if top == "sgpu_magic" and (part_of(found.file) == "server" or (found.file.startswith("panel/") and is_served)):
            knows_kernel = part == "runs" and (module, inner) != ("choice", "schema")
            if knows_kernel or (part == "panel" and module not in served) or (module == "live" and inner in widgets):
                wrong.append(found.place)
    assert wrong == []


def test_each_heavy_package_has_its_owner():
    assert strangers(all_imports()) == []


def test_a_wrong_import_would_be_found():
    bad = "def f():\n    from sgpu_magic.worker.process import zygote\n    import torch\nimport sgpu_magic.errors\n"
    imports = list(imports_in(bad, "agent/service.py"))
    assert wrong_way(imports) == ["agent/service.py:2: agent imports worker"]
    assert strangers(imports) == ["agent/service.py:3 imports torch"]
    assert strangers(list(imports_in("import pynvml", "agent/ranks/output.py"))) == [
        "agent/ranks/output.py:1 imports pynvml"
    ]


def test_the_protocol_does_no_io():
    forbidden = {"socket", "zmq", "threading", "asyncio", "time", "subprocess", "multiprocessing"}
    assert [
        f"{found.place} imports {found.module}"
        for found in all_imports()
        if found.file.startswith("wire/") and found.module.split(".")[0] in forbidden
    ] == []


def test_nobody_imports_pickle_but_who_packs():
    unpacks = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
    assert [
        f"{found.place} imports {found.module}"
        for found in all_imports()
        if found.module.split(".")[0] in unpacks and part_of(found.file) not in ("payload", "worker")
    ] == []


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
        pytest.param("import sgpu_magic.agent.service", HEAVY - {"zmq"}, id="agent"),
        pytest.param(
            "import sgpu_magic.pool.service, sgpu_magic.nodes.local",
            HEAVY - {"zmq"},
            id="pool",
        ),
        pytest.param("from sgpu_magic.payload import buffers, unpack", {"torch", "numpy"}, id="unpack"),
        pytest.param("import sgpu_magic.magics", HEAVY - {"IPython", "numpy", "zmq", "cloudpickle"}, id="magics"),
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


def test_no_two_rooms_import_each_other():
    TopologicalSorter(MAY_USE).prepare()
