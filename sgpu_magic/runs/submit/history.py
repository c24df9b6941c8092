"""The notebook's inputs and results that are sent with a cell."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from sgpu_magic.client.result import RunResult
from sgpu_magic.payload.namespace import only_in_notebook

# these names change with every cell of the notebook, so they are sent each time; results of runs stay in the notebook,
# since on the ranks, the same names have the values of the last cell there
_RESULT = re.compile(r"_{1,3}|_\d+")
_INPUT = re.compile(r"_i{1,3}|_i\d+")
_RESULTS = frozenset({"Out", "_oh"})
_USE = re.compile(r"\b(?:Out|_oh)\b(?:\s*\[\s*(\d+)\s*\])?")
_INPUTS = frozenset({"In", "_ih"})


def _stays(value: object) -> bool:
    """Whether the value is one of this package's handles, such as the session that `%sgpu_connect` returns."""
    return isinstance(value, RunResult) or bool(only_in_notebook(value))


def history(
    names: Iterable[str], source: str, namespace: Mapping[str, object], exclude: Collection[str] = ()
) -> dict[str, object]:
    """Return the values to send for the names in which IPython keeps inputs and results.

    Args:
        names: Names that the cell reads.
        source: The cell. If it reads results by number only, as `Out[3]`, no others are sent.
        namespace: The notebook's namespace.
        exclude: Names that are not sent.
    """
    found: dict[str, object] = {}
    for name in names:
        if name in exclude or name not in namespace:
            continue
        value = namespace[name]
        if name in _RESULTS and isinstance(value, dict):
            outputs = cast("dict[Any, object]", value)
            uses: list[str] = _USE.findall(source)
            found[name] = {
                number: each
                for number, each in outputs.items()
                if not _stays(each) and ("" in uses or str(number) in uses)
            }
        elif name in _INPUTS and isinstance(value, list):
            found[name] = list(cast("list[object]", value))
        elif _INPUT.fullmatch(name) or (_RESULT.fullmatch(name) and not _stays(value)):
            found[name] = value
    return found
