# ruff: noqa: T201
"""Measure the structure of `sgpu_magic`: `python scripts/house.py` prints figures, `--map` draws its packages.

A package here is a folder or module at the top level. Its layer is one above the highest package that it imports from.
Imports count anywhere in a file, except under `TYPE_CHECKING`. Packages that import each other share a layer and are
listed. Sizes are printed and not judged: a module is as long as its concept needs.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sgpu_magic"
# modules that all others may import are left out
_GROUND = frozenset(("__init__", "config", "errors"))
_LONG = 500
_LONGEST_SHOWN = 5
_WIDTH = 118
_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
_NO_CODE = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)

Graph = Mapping[str, set[str]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the package's structure, or draw it.")
    parser.add_argument("--map", action="store_true", help="the packages by layer, with their docstrings and imports")
    draws: bool = parser.parse_args().map
    sources = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    files = imports_of_files(sources)
    packages = _packages(files)
    print("\n".join(_map(packages, sources) if draws else _figures(packages, files, sources)))
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


def _packages(files: Graph) -> dict[str, set[str]]:
    packages: dict[str, set[str]] = {}
    for name, imported in files.items():
        package = name.split(".")[0]
        if package in _GROUND:
            continue
        found = packages.setdefault(package, set())
        found |= {target.split(".")[0] for target in imported} - {package} - _GROUND
    return packages


def cycles(graph: Graph) -> list[list[str]]:
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


def layers(packages: Graph) -> dict[str, int]:
    """Return the layer of each package, 1 at the bottom."""
    cycle_of = {name: tuple(cycle) for cycle in cycles(packages) for name in cycle}
    known: dict[str, int] = {}

    def layer(package: str) -> int:
        if package not in known:
            together = cycle_of.get(package, (package,))
            below = {target for each in together for target in packages.get(each, ())} - {*together}
            height = 1 + max((layer(target) for target in below), default=0)
            known.update(dict.fromkeys(together, height))
        return known[package]

    return {package: layer(package) for package in packages}


# ---------------------------------------------------------------- figures


def _figures(packages: Graph, files: Graph, sources: Mapping[Path, str]) -> list[str]:
    modules = {path: source for path, source in sources.items() if path.stem not in ("__init__", "__main__")}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    lines = {path: source.count("\n") for path, source in modules.items()}
    folders = sorted(package for package in packages if (PACKAGE / package).is_dir())
    among_files, among_packages = cycles(files), cycles(packages)
    statement_count = sum(isinstance(node, ast.stmt) for tree in trees.values() for node in ast.walk(tree))
    code_lines = sum(len(_code_lines(source)) for source in sources.values())
    names = Counter(name for tree in trees.values() for name in _public_classes(tree))
    shared = sorted(name for name, count in names.items() if count > 1)
    rows = [
        ("folders at the top", f"{len(folders)}"),
        ("modules at the top", f"{len(list(PACKAGE.glob('*.py')))}"),
        ("layers", f"{max(layers(packages).values())}"),
        ("cycles between packages", f"{len(among_packages)}"),
        ("cycles between files", f"{len(among_files)}"),
        ("modules", f"{len(modules):,}"),
        ("lines of the median module", f"{statistics.median(lines.values()):.0f}"),
        (f"modules over {_LONG} lines", f"{sum(count > _LONG for count in lines.values())}"),
        ("AST statements", f"{statement_count:,}"),
        ("code lines", f"{code_lines:,}"),
        ("statements a code line", f"{statement_count / code_lines:.2f}"),
        ("nested conditional expressions", f"{sum(map(_nested_conditionals, trees.values()))}"),
        ("modules with constants after their first function", f"{sum(map(_has_late_constants, trees.values()))}"),
        ("`# fmt: skip`", f"{sum(source.count('# fmt: skip') for source in sources.values())}"),
        ("public class names in several modules", f"{len(shared)}"),
    ]
    found = [f"{figure:>8}  {name}" for name, figure in rows]
    found += [f"packages that import each other: {', '.join(cycle)}" for cycle in among_packages]
    found += [f"files that import each other: {', '.join(cycle)}" for cycle in among_files]
    longest = sorted(modules, key=lambda path: -lines[path])[:_LONGEST_SHOWN]
    found += [f"{lines[path]:>8}  lines: {path.relative_to(ROOT)}" for path in longest]
    return [*found, f"class names in several modules: {', '.join(shared)}"]


def _public_classes(tree: ast.Module) -> set[str]:
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}


def _nested_conditionals(tree: ast.Module) -> int:
    """Return how many conditional expressions are the condition or a branch of another."""
    return sum(
        isinstance(child, ast.IfExp)
        for node in ast.walk(tree)
        if isinstance(node, ast.IfExp)
        for child in (node.test, node.body, node.orelse)
    )


def _has_late_constants(tree: ast.Module) -> bool:
    defined = False
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined = True
        elif defined and isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and _CONSTANT.fullmatch(target.id) for target in targets):
                return True
    return False


def _code_lines(source: str) -> set[int]:
    """Return the numbers of the lines that are not blank, a comment or a docstring."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text:
            left_out |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return lines - left_out


# ---------------------------------------------------------------- the map


def _map(packages: Graph, sources: Mapping[Path, str]) -> Iterator[str]:
    layer_of = layers(packages)
    for layer in sorted({*layer_of.values()}, reverse=True):
        yield f"{layer} {'-' * (_WIDTH - 2)}"
        for package in sorted(name for name in packages if layer_of[name] == layer):
            folder = PACKAGE / package / "__init__.py"
            text = (
                ast.get_docstring(ast.parse(sources[folder if folder in sources else PACKAGE / f"{package}.py"])) or ""
            )
            head, *rest = text.splitlines()
            yield f"{package + ('/' if folder in sources else ''):<12}{head}"
            if folder in sources:
                yield from (f"            {line}".rstrip() for line in _without_edges(rest))
            if packages[package]:
                yield f"            -> {', '.join(sorted(packages[package]))}"


def _without_edges(lines: Iterable[str]) -> list[str]:
    return "\n".join(lines).strip("\n").splitlines()


if __name__ == "__main__":
    sys.exit(main())
