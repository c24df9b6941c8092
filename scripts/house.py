# ruff: noqa: T201
"""Measure the package's structure from its imports: `python scripts/house.py` prints figures, `--map` a map.

A room is a folder or module at the top level of `sgpu_magic`. Its floor is one above the highest room that it imports
from. Imports count anywhere in a file, except under `TYPE_CHECKING`. Rooms that import each other share a floor and are
listed.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sgpu_magic"
# modules that all others may import are left out
_GROUND = frozenset(("__init__", "config", "errors"))
_SHORT, _LONG = 60, 350
_WIDTH = 118
_NO_CODE = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)

Graph = Mapping[str, set[str]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the house, or draw it.")
    parser.add_argument("--map", action="store_true", help="rooms in floors, with their sentences, modules and arrows")
    draws: bool = parser.parse_args().map
    sources = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    files = imports_of_files(sources)
    rooms = _rooms(files)
    print("\n".join(_map(rooms, sources) if draws else _figures(rooms, files, sources)))
    return 0


# ---------------------------------------------------------------- imports


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports_of_files(sources: Mapping[Path, str]) -> dict[str, set[str]]:
    """Return which modules of the package each module imports at run time, by their sources."""
    known = {_name(path) for path in sources}
    return {
        _name(path): {found for found in _imported(source, known) if found != _name(path)}
        for path, source in sources.items()
    }


def _imported(source: str, known: set[str]) -> Iterator[str]:
    for node in _without_typing(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, _, inner = name.partition(".")
            # the longest prefix that is a module; the rest is a name in it
            while top == "sgpu_magic" and inner and inner not in known:
                inner = inner.rpartition(".")[0]
            if top == "sgpu_magic" and inner:
                yield inner


def _without_typing(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _without_typing(child)


def _rooms(files: Graph) -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {}
    for name, imported in files.items():
        room = name.split(".")[0]
        if room in _GROUND:
            continue
        found = rooms.setdefault(room, set())
        found |= {target.split(".")[0] for target in imported} - {room} - _GROUND
    return rooms


def circles(graph: Graph) -> list[list[str]]:
    """Return the import cycles, each with its names sorted (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(graph.get(name, ())):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def floors(rooms: Graph) -> dict[str, int]:
    """Return the floor of each room, 1 at the bottom."""
    circle_of = {name: tuple(circle) for circle in circles(rooms) for name in circle}
    known: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in known:
            together = circle_of.get(room, (room,))
            below = {target for each in together for target in rooms.get(each, ())} - {*together}
            height = 1 + max((floor(target) for target in below), default=0)
            known.update(dict.fromkeys(together, height))
        return known[room]

    return {room: floor(room) for room in rooms}


# ---------------------------------------------------------------- figures


def _figures(rooms: Graph, files: Graph, sources: Mapping[Path, str]) -> list[str]:
    modules = {path: source for path, source in sources.items() if path.stem not in ("__init__", "__main__")}
    lengths = {path: source.count("\n") for path, source in modules.items()}
    folders = sorted(room for room in rooms if (PACKAGE / room).is_dir())
    loose = sorted(path.stem for path in PACKAGE.glob("*.py"))
    among_files, among_rooms = circles(files), circles(rooms)
    rows = [
        ("folders at the top", len(folders)),
        ("modules at the top", len(loose)),
        ("floors", max(floors(rooms).values())),
        ("circles between rooms", len(among_rooms)),
        ("circles between files", len(among_files)),
        ("modules", len(modules)),
        (f"modules under {_SHORT} lines", sum(length < _SHORT for length in lengths.values())),
        (f"modules over {_LONG} lines", sum(length > _LONG for length in lengths.values())),
        ("lines", sum(source.count("\n") for source in sources.values())),
        ("statements", sum(map(statements, sources.values()))),
    ]
    told = [f"{figure:>8,}  {name}" for name, figure in rows]
    told += [f"rooms that import each other: {', '.join(circle)}" for circle in among_rooms]
    told += [f"files that import each other: {', '.join(circle)}" for circle in among_files]
    long = sorted((path for path in modules if lengths[path] > _LONG), key=lambda path: -lengths[path])
    return told + [f"{lengths[path]} lines: {path.relative_to(ROOT)}" for path in long]


def statements(source: str) -> int:
    """Return the number of lines that are not blank, a comment, a docstring or an import."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if isinstance(node, ast.Import | ast.ImportFrom) or is_text:
            left_out |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return len(lines - left_out)


# ---------------------------------------------------------------- the map


def _map(rooms: Graph, sources: Mapping[Path, str]) -> Iterator[str]:
    height = floors(rooms)
    for floor in sorted({*height.values()}, reverse=True):
        yield f"{floor} {'-' * (_WIDTH - 2)}"
        for room in sorted(name for name in rooms if height[name] == floor):
            folder = PACKAGE / room / "__init__.py"
            text = ast.get_docstring(ast.parse(sources[folder if folder in sources else PACKAGE / f"{room}.py"])) or ""
            head, *rest = text.splitlines()
            yield f"{room + ('/' if folder in sources else ''):<12}{head}"
            if folder in sources:
                yield from (f"            {line}".rstrip() for line in _without_edges(rest))
            if rooms[room]:
                yield f"            -> {', '.join(sorted(rooms[room]))}"


def _without_edges(lines: Iterable[str]) -> list[str]:
    return "\n".join(lines).strip("\n").splitlines()


if __name__ == "__main__":
    sys.exit(main())
