"""Scalars among a run's arguments and variables, as text: for whoever compares runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from sgpu_magic.packages.secrets import is_secret
from sgpu_magic.payload.call import RankValue

_MOST = 100
_LONGEST_TEXT = 250

Parameters = tuple[tuple[str, str], ...]


def scalars(values: Mapping[str, object]) -> Parameters:
    """Return the numbers, truth values and short texts among `values`, as text; what looks like a secret is left out.

    Args:
        values: By name.
    """
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        # their subclasses may print themselves in any way
        if type(value) not in (int, float, bool, str) or name.startswith("_"):
            continue
        text = value if isinstance(value, str) else _number(value)
        if text is not None and 0 < len(text) <= _LONGEST_TEXT and not is_secret(name, text):
            found.append((name, text))
            if len(found) == _MOST:
                break
    return tuple(found)


def arguments(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return a call's arguments by the names of the function's parameters; what each rank fills in is left out."""
    try:
        bound = inspect.signature(function).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        # C code that does not tell
        return dict(kwargs)
    found: dict[str, object] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            found.update((f"{name}[{index}]", item) for index, item in enumerate(value))
        else:
            found[name] = value
    return {name: value for name, value in found.items() if not isinstance(value, RankValue)}


def _number(value: object) -> str | None:
    try:
        return repr(value)
    except ValueError:
        # an int of more digits than Python writes
        return None
