"""Patterns of code: find syntax in a function, class or module, and replace it.

A pattern is one expression or statement, written in Python. It is compared with the syntax tree, so layout, comments
and the kind of quotes make no difference. A name of one capital letter stands for any expression, and for the same
expression each time: `min(A, A + 1)` matches `min(end, end + 1)`.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_PLACEHOLDER = re.compile("[A-Z]")
# whether a name is read or assigned, and spellings that mean the same
_IGNORED_FIELDS = frozenset(("ctx", "kind", "type_comment"))


def find_module(root: Path, name: str) -> tuple[Path, tuple[str, ...]]:
    """Find the module of a function, class or module.

    Args:
        root: The folder that contains the top-level package.
        name: A dotted name, such as `package.module.Class.method`.

    Returns:
        The module's file, and what remains of the name within the module.

    Raises:
        ValueError: There is no such module.
    """
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        base = root.joinpath(*parts[:count])
        for file in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
            if file.is_file():
                return file, tuple(parts[count:])
    raise ValueError(f"there is no module for {name} in {root}")


@dataclass(frozen=True, slots=True)
class Scope:
    """The part of a module in which a pattern is searched.

    Args:
        names: The names of a class and a function in it; empty for the whole module.
        beside: A pattern that the same function contains, where the names alone don't tell which function is meant.
    """

    names: tuple[str, ...]
    beside: str | None = None


def replace(source: str, scope: Scope, pattern: str, replacement: str) -> str:
    """Return a module's source with the code that matches `pattern` replaced. Comments are lost.

    Args:
        source: The module's source.
        scope: The part of the module to search.
        pattern: An expression or statement.
        replacement: What replaces it. The pattern's placeholders stand for what they have matched.

    Raises:
        ValueError: There is no such scope, or it does not contain the pattern exactly once.
    """
    return _replace(source, scope, pattern, _parse(pattern), _parse(replacement))


def remove(source: str, scope: Scope, pattern: str) -> str:
    """Return a module's source without the statement that matches `pattern`; arguments and errors as in `replace`."""
    return _replace(source, scope, pattern, _parse_statement(pattern), ast.Pass())


def _replace(source: str, scope: Scope, text: str, pattern: ast.AST, replacement: ast.AST) -> str:
    tree = ast.parse(source)
    within = _definition(tree, scope.names)
    if scope.beside is not None:
        within = _function_with(within, scope.beside)
    old, bound = _the_only(_found(pattern, within), f"`{text}` matches")
    new = _Filled(bound).visit(replacement)
    return ast.unparse(ast.fix_missing_locations(_Replaced(old, new).visit(tree)))


def _parse_statement(text: str) -> ast.stmt:
    statements = ast.parse(text).body
    if len(statements) != 1:
        raise ValueError(f"`{text}` is not one statement")
    return statements[0]


def _parse(text: str) -> ast.AST:
    statement = _parse_statement(text)
    return statement.value if isinstance(statement, ast.Expr) else statement


def _definition(tree: ast.Module, names: Sequence[str]) -> ast.AST:
    found: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef = tree
    for name in names:
        for node in found.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                found = node
                break
        else:
            raise ValueError(f"there is no class or function {'.'.join(names)}")
    return found


def _function_with(within: ast.AST, text: str) -> ast.AST:
    """Return the innermost function that contains a pattern."""
    pattern = _parse(text)
    functions = [node for node in ast.walk(within) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    containing = [function for function in functions if _found(pattern, function)]
    innermost = [each for each in containing if not any(_is_nested(other, each) for other in containing)]
    return _the_only(innermost, f"`{text}` is in a function")


def _is_nested(inner: ast.AST, outer: ast.AST) -> bool:
    return inner is not outer and inner in ast.walk(outer)


def _found(pattern: ast.AST, within: ast.AST) -> list[tuple[ast.AST, dict[str, ast.expr]]]:
    """Return what matches a pattern, with what its placeholders stand for."""
    found: list[tuple[ast.AST, dict[str, ast.expr]]] = []
    for node in ast.walk(within):
        bound: dict[str, ast.expr] = {}
        if _matches(pattern, node, bound):
            found.append((node, bound))
    return found


def _the_only(found: Sequence[T], what: str) -> T:
    if len(found) != 1:
        raise ValueError(f"{what} {len(found)} times, expected once")
    return found[0]


def _matches(pattern: Any, code: Any, bound: dict[str, ast.expr]) -> bool:
    """Compare two parts of syntax trees, and bind the pattern's placeholders."""
    if isinstance(pattern, ast.Name) and _PLACEHOLDER.fullmatch(pattern.id) and isinstance(code, ast.expr):
        before = bound.setdefault(pattern.id, code)
        return before is code or ast.unparse(before) == ast.unparse(code)
    if type(pattern) is not type(code):
        return False
    if isinstance(pattern, ast.AST):
        fields = [field for field in pattern._fields if field not in _IGNORED_FIELDS]
        return all(_matches(getattr(pattern, field), getattr(code, field), bound) for field in fields)
    if isinstance(pattern, list):
        pairs = zip(pattern, code, strict=True)
        return len(pattern) == len(code) and all(_matches(one, other, bound) for one, other in pairs)
    return pattern == code


class _Filled(ast.NodeTransformer):
    """Puts what placeholders have matched in their place."""

    def __init__(self, bound: dict[str, ast.expr]) -> None:
        self._bound = bound

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self._bound.get(node.id, node))


class _Replaced(ast.NodeTransformer):
    """Replaces one node of a tree."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old = old
        self._new = new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else self.generic_visit(node)
