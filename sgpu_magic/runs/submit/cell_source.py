"""A cell's source as it is read before it runs: what it needs, and what it may leave behind."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from sgpu_magic.errors import CellSyntaxError
from sgpu_magic.payload.names import CellNames, names_in

_DEFINITION = re.compile(r"^(?:async\s+)?(?:def|class)\s+(\w+)", re.MULTILINE)
_WORD = re.compile(r"[^\W\d]\w*")
_HEAVY_BYTES = 100_000_000


def read_cell(source: str, number: int | None, transform: Callable[[str], str] | None) -> CellNames:
    """Return the names in a cell.

    Args:
        source: The cell, with its magic's line.
        number: The notebook's number of it; None from a program.
        transform: The shell's `transform_cell`; IPython's stock one when left out.

    Raises:
        CellSyntaxError: It does not compile.
    """
    try:
        return names_in(source, transform=transform)
    except SyntaxError as error:
        raise _does_not_compile(error, source, number) from None


def name_of(body: str, number: int | None) -> str:
    """Return what to call a cell: the first function or class that it defines, else its number."""
    found = _DEFINITION.search(body)
    if found is not None:
        return found[1]
    return "cell" if number is None else f"cell {number}"


def words_in(body: str) -> list[str]:
    """Return every identifier in the cell."""
    return _WORD.findall(body)


def heavy_names(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return the names, with their bytes, that are worth a word."""
    return tuple((name, size) for name, size in sizes.items() if size > _HEAVY_BYTES)


def _does_not_compile(error: SyntaxError, source: str, number: int | None) -> CellSyntaxError:
    """Say it as IPython says it of a plain cell."""
    lines = source.splitlines()
    line = error.lineno or 1
    text = lines[line - 1] if line <= len(lines) else ""
    column = max((error.offset or 1) - 1, 0) - (len(text) - len(text.lstrip()))
    excerpt = f"    {text.strip()}\n    {' ' * max(column, 0)}^" if text.strip() else ""
    cell = "the code" if number is None else f"Cell In[{number}]"
    return CellSyntaxError(error.msg, f"{cell}, line {line}", excerpt)


def transform_of(shell: Any) -> Callable[[str], str] | None:
    """Return the shell's own transform of cells, None without a shell.

    What sends plain cells to a session's ranks has an attribute `sends_cells` and is left out: it would take the cell's
    body for such a cell.
    """
    if shell is None:
        return None
    manager = shell.input_transformer_manager

    def transform(source: str) -> str:
        lines = (source if source.endswith("\n") else f"{source}\n").splitlines(keepends=True)
        for each in (*manager.cleanup_transforms, *manager.line_transforms):
            if not getattr(each, "sends_cells", False):
                lines = each(lines)
        lines = manager.do_token_transforms(lines)
        for each in shell.input_transformers_post:
            lines = each(lines)
        return "".join(lines)

    return transform
