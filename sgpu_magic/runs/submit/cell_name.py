"""The name of a cell's run when it has no `--name`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from sgpu_magic.formatting import clipped
from sgpu_magic.wire.run import CellSource

MOST_CHARS = 48
"""Longest name that is made of a comment or a line of code."""

_DEFINITION = re.compile(r"^(?:async\s+)?(?:def|class)\s+(\w+)", re.MULTILINE)
_IMPORT = re.compile(r"(?:import|from)\s")
# comments for tools: cell marks, type checkers, linters
_FOR_TOOLS = re.compile(r"#\s*(?:%%|!|-\*-|type:|noqa|fmt:|ruff:|pyright:|mypy:|pylint:)")


def cell_name(cell: CellSource) -> str:
    """Return a name for a cell: its leading comment, else the function that it is about, else its first line.

    The function is the first one that the cell defines and calls, or the first definition of a cell that has nothing
    else. Imports count as the first line only if there is no other. A cell without any code is named by its number.
    Scripts, which often begin with a license, are named by their function or file.
    """
    body = cell.body
    if cell.file:
        return _function(body) or cell.module or Path(cell.file).name
    name = _leading_comment(body) or _function(body) or _first_line(body)
    if name:
        return clipped(name, MOST_CHARS)
    return "cell" if cell.execution_count is None else f"cell {cell.execution_count}"


def _leading_comment(body: str) -> str:
    """Return the first comment before the code that has words, "" if there is none."""
    for line in _lines(body):
        if not line.startswith("#"):
            return ""
        words = line.strip("#-=*~ \t")
        if any(map(str.isalnum, words)) and not _FOR_TOOLS.match(line):
            return words
    return ""


def _function(body: str) -> str:
    """Return the first function or class that is defined and called, or the first of a cell that only defines.

    Functions that are only passed on, such as a signal handler, do not count.
    """
    defined: list[str] = _DEFINITION.findall(body)
    for name in defined:
        if re.search(rf"^(?!\s*(?:async\s+def|def|class)\b).*\b{name}\(", body, re.MULTILINE):
            return name
    return defined[0] if defined and _only_defines(body) else ""


def _only_defines(body: str) -> bool:
    """Whether the cell has only imports and definitions; False if it is not plain Python."""
    try:
        statements = ast.parse(body).body
    except (SyntaxError, ValueError):
        return False
    return all(
        isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)
        for each in statements
    )


def _first_line(body: str) -> str:
    code = [line for line in _lines(body) if not line.startswith("#")]
    return next((line for line in code if not _IMPORT.match(line)), code[0] if code else "")


def _lines(body: str) -> Iterator[str]:
    return filter(None, map(str.strip, body.splitlines()))
