"""Parameters as papermill has them: typed values, and a cell after the one tagged `parameters` that sets them.

Source: papermill's documentation, "Parameterize" and "Command line interface".
"""

from __future__ import annotations

import ast
import keyword
import math
import re
from collections.abc import Mapping
from typing import Any, cast

from sgpu_magic.errors import UsageError

TAG = "parameters"
INJECTED_TAG = "injected-parameters"

_WORDS: dict[str, object] = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_NUMBER = re.compile(r"[+-]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?inf|nan")


def typed(text: str) -> object:
    """Return a value as a person means it on a command line: a number, a truth, nothing, else the text."""
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text) is None:
        return text
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def read_pair(option: str, text: str) -> tuple[str, str]:
    """Read `NAME=VALUE`.

    Raises:
        UsageError: There is no name, or no sign.
    """
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals:
        raise UsageError(f"{option} takes NAME=VALUE or NAME VALUE, as in {option} lr=0.1.")
    check_name(option, name)
    return name, value


def check_name(option: str, name: str) -> None:
    """Raise UsageError when Python can't have a variable of that name."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"{option}: {name!r} is no name that a notebook's variable can have.")


def check_values(where: str, values: Mapping[str, object]) -> None:
    """Raise UsageError when a value can't be written into a cell: what JSON has can."""
    for name, value in values.items():
        check_name(where, name)
        if not _is_plain(value):
            kind = type(value).__name__
            raise UsageError(
                f"{where}: {name} is a {kind}; a parameter is a number, a text, true, false, nothing, or a list or "
                "mapping of these. Write it as a text, and read that in the notebook."
            )


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in cast("list[object]", value))
    if isinstance(value, dict):
        return all(
            isinstance(key, str) and _is_plain(item) for key, item in cast("dict[object, object]", value).items()
        )
    return value is None or isinstance(value, bool | int | float | str)


def source_of(values: Mapping[str, object]) -> str:
    """Return the Python that sets them."""
    return "\n".join(["# Parameters", *(f"{name} = {_literal(value)}" for name, value in values.items())])


def _literal(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, list):
        return f"[{', '.join(_literal(item) for item in cast('list[object]', value))}]"
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return "{" + ", ".join(f"{key!r}: {_literal(item)}" for key, item in items) + "}"
    return repr(value)


def has_tag(cell: Any, tag: str) -> bool:
    """Whether a notebook's cell has it."""
    tags: Any = cell.get("metadata", {}).get("tags", [])
    return isinstance(tags, list) and tag in tags


def declared(source: str) -> set[str] | None:
    """Return the names that a `parameters` cell sets; None when it is no plain Python."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return None
    names: set[str] = set()
    for statement in body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = list(statement.targets)
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        names |= {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    return names
