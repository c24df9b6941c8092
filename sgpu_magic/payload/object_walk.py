"""The way from a value to an object inside it, as one writes it: `loader.dataset._lock`, `d['k'][3]`."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# anything at all is walked through

from __future__ import annotations

import functools
import time
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

_LONGEST_WALK_S = 1.0
_MOST_NODES = 300_000
_ATOMS = (
    *(str, bytes, bytearray, int, float, complex, bool, range),
    *(type(None), type(Ellipsis), types.CodeType, types.ModuleType),
)


def find_way(value: object, culprit: object) -> tuple[list[tuple[str, object]] | None, int]:
    """Return the shortest way from `value` to `culprit` as (label, object) steps, and the number of nodes.

    The way is None when there is none, or none was found within the limits.
    """
    parents: dict[int, tuple[int, str, object]] = {id(value): (0, "", value)}
    queue: deque[object] = deque([value])
    deadline = time.monotonic() + _LONGEST_WALK_S
    if value is culprit:
        return [("", value)], 1
    looked_at = 0
    while queue:
        node = queue.popleft()
        for label, child in _children(node):
            looked_at += 1
            if looked_at % 1024 == 0 and (time.monotonic() > deadline or len(parents) > _MOST_NODES):
                return None, len(parents)
            if isinstance(child, _ATOMS) or id(child) in parents:
                continue
            parents[id(child)] = (
                id(node),
                label,
                child,
            )  # keeps the child alive, so that its id stays its own
            if child is culprit:
                return _way(parents, id(child)), len(parents)
            queue.append(child)
    return None, len(parents)


def _way(parents: dict[int, tuple[int, str, object]], at: int) -> list[tuple[str, object]]:
    steps: list[tuple[str, object]] = []
    while at:
        at, label, node = parents[at]
        steps.append((label, node))
    return steps[::-1]


def _children(node: Any) -> Iterator[tuple[str, object]]:
    """Yield what pickling `node` reaches, each with how one writes it. Runs no code of the user's."""
    if isinstance(node, dict):
        for key, held in list(node.items()):
            yield f"[{_short(key)}]", held
            yield f".<key {_short(key)}>", key
    elif isinstance(node, list | tuple | deque):
        for index, held in enumerate(list(node)):
            yield f"[{index}]", held
    elif isinstance(node, set | frozenset):
        for held in list(node):
            yield ".<item>", held
    elif isinstance(node, types.FunctionType):
        yield from _function_parts(node)
    elif isinstance(node, types.MethodType):
        yield ".__self__", node.__self__
        yield ".__func__", node.__func__
    elif isinstance(node, functools.partial):
        yield ".func", node.func
        yield ".args", node.args
        yield ".keywords", node.keywords
    elif isinstance(node, staticmethod | classmethod):
        yield ".__func__", node.__func__
    elif isinstance(node, property):
        yield from ((f".{part}", getattr(node, part)) for part in ("fget", "fset", "fdel"))
    elif isinstance(node, type):
        if node.__module__ == "__main__":
            yield from ((f".{name}", held) for name, held in list(vars(node).items()))
            yield from ((base.__name__, base) for base in node.__bases__)
    elif type(node).__module__ == "numpy" and getattr(getattr(node, "dtype", None), "hasobject", False):
        yield from ((f"[{index}]", held) for index, held in enumerate(node.flat))
    if not isinstance(node, type | types.ModuleType):
        yield from _attributes(node)


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f".<closure {name}>", cell.cell_contents
        except ValueError:
            continue
    defaults = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    for index, held in enumerate(defaults):
        yield f".<default {names[len(names) - len(defaults) + index]}>", held
    for name, held in (function.__kwdefaults__ or {}).items():
        yield f".<default {name}>", held


def _attributes(node: Any) -> Iterator[tuple[str, object]]:
    try:
        own = object.__getattribute__(node, "__dict__")
    except AttributeError:
        own = {}
    if isinstance(own, dict):
        for group in ("_modules", "_parameters", "_buffers"):  # written as torch.nn.Module shows them
            held_group = own.get(group)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            if isinstance(held_group, dict):
                yield from ((f".{key}", held) for key, held in list(held_group.items()))  # pyright: ignore
        yield from ((f".{key}", held) for key, held in list(own.items()))  # pyright: ignore
    for cls in type(node).__mro__:
        slots = vars(cls).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else tuple(slots):
            member = vars(cls).get(slot)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield f".{slot}", member.__get__(node, type(node))
                except AttributeError:
                    continue
    if type(node).__module__ == "__main__":
        yield type(node).__name__, type(node)


def _short(key: object) -> str:
    text = repr(key) if isinstance(key, str | int | float | bool | bytes | tuple) else f"<{type(key).__name__}>"
    return text if len(text) <= 40 else text[:37] + "..."
