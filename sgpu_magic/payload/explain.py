"""Explains what can't be pickled: the path to the object, and the remedy.

The pickler knows the object at which it stopped; a bounded search from the value finds the path to it. If the
object was created during pickling there is no path; then dill may still find the attribute.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# objects of any type are traversed

from __future__ import annotations

import contextlib
import functools
import io
import sys
import time
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from sgpu_magic.formatting import format_ranks
from sgpu_magic.payload.call import FunctionCall, argument_name, name_of
from sgpu_magic.payload.namespace import bound_cells, only_in_notebook
from sgpu_magic.payload.parts import WHOLE_STATE, Missing, Part
from sgpu_magic.wire.option_text import OptionName, Text, TextWithOptions, text_of

_DILL_NODES = 2_000
_WHOLE = f"Take the whole from {WHOLE_STATE}"
_LONGEST_WALK_S = 1.0
_MOST_NODES = 300_000
_ATOMS = (
    *(str, bytes, bytearray, int, float, complex, bool, range),
    *(type(None), type(Ellipsis), types.CodeType, types.ModuleType),
)

# attributes that are not in `__dict__`
_PARTS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
}


class _Kind(msgspec.Struct, frozen=True):
    """The wording for one kind of culprit.

    Args:
        phrase: The object, with its article.
        noun: The noun for "drop the ... in __getstate__".
        advice: The first remedies; the first one begins the sentence.
        hides_inside: Report this object instead of the culprit inside it.
        returning: The first remedy where it can't be returned from a rank.
    """

    phrase: str
    noun: str
    advice: tuple[str, ...] = ("Create it inside {code}",)
    hides_inside: bool = True
    returning: str = "Return plain data instead"


# by module and class name; a class whose module is not loaded has no instances
_KINDS = {
    ("types", "GeneratorType"): _Kind("a generator", "generator", ("Make it a list", "create it inside {code}")),
    ("types", "AsyncGeneratorType"): _Kind("a generator", "generator", ("Make it a list", "create it inside {code}")),
    ("types", "CoroutineType"): _Kind("a coroutine", "coroutine", ("Await it in an earlier cell",)),
    ("asyncio", "Future"): _Kind("a running asyncio task", "task", ("Await it in an earlier cell",)),
    ("socket", "socket"): _Kind("a socket", "socket", ("Connect inside {code}",)),
    ("threading", "Thread"): _Kind("a thread", "thread", ("Start it inside {code}",)),
    ("torch.distributed._shard.sharded_tensor", "ShardedTensor"): _Kind(
        "one rank's part of a sharded tensor", "tensor", (_WHOLE,), returning=_WHOLE
    ),
    ("subprocess", "Popen"): _Kind("a running process", "process", ("Start it inside {code}",)),
}


def explain_name(
    chain: Sequence[str], values: Mapping[str, object], culprit: object, error: Exception
) -> TextWithOptions:
    """Return the message for a variable, or a function call, that can't be sent from the notebook.

    Args:
        chain: Names from one that the cell reads to the one that can't be pickled, each used by the one before.
        values: The values of these names. The first one is a `FunctionCall` if a function was called; its name is
            internal, so the message has the function's.
        culprit: The object at which pickling stopped.
        error: The exception that pickling raised.
    """
    name, first = chain[-1], values[chain[0]]
    called = name_of(first.function) if isinstance(first, FunctionCall) else None
    stays = only_in_notebook(culprit)
    if called is not None and len(chain) == 1:
        if stays:
            return text_of(f"the call of {called} needs what stays in the notebook: {stays}")
        what, advice, in_class = _describe(called, first, culprit, error)
        ways = [*(way.format(code=called) for way in advice), *in_class]
        return text_of(f"the call of {called} can't leave this process: {what}. ", _either(ways))
    links = chain if called is None else chain[1:]
    uses = f"{called or 'the cell'} uses " + ", which uses ".join(f"`{link}`" for link in links)
    if stays:
        keep_out = text_of("keep the name out with ", OptionName("exclude", name))
        return text_of(f"{uses}, which stays in the notebook: {stays} If the ranks don't reach it, ", keep_out, ".")
    what, advice, in_class = _describe(name, values[name], culprit, error)
    remedies: list[Text] = [*(way.format(code=called or "the cell") for way in advice), *in_class]
    # a class is shipped with its instances: excluding its name would not help
    out = next((link for link in reversed(chain) if not isinstance(values[link], type)), name)
    if called is None or out != chain[0]:
        remedies.append(text_of("keep the name out with ", OptionName("exclude", out)))
    return text_of(f"{uses}, which can't leave the notebook: {what}. ", _either(remedies))


def explain_result(obj: object, culprit: object, error: Exception) -> str:
    """Return the message for a result that can't be sent from its rank; arguments as for `explain_name`."""
    root, value = f"the {type(obj).__name__}", obj
    result = cast("dict[object, object]", obj) if isinstance(obj, dict) else {}
    if isinstance(names := result.get("names"), dict):
        parts = {**cast("dict[str, object]", names), "the cell's value": result.get("value")}
        ways = {part: held for part, held in parts.items() if find_way(held, culprit)[0] is not None}
        root, value = next(iter(ways.items()), cast("tuple[str, object]", ("the value", obj)))
    what, _, in_class = _describe(root, value, culprit, error)
    name = f"`{root}`" if root.isidentifier() else root
    remedies = _either([_kind_of(culprit).returning, *in_class])
    return f"{name} can't come back to the notebook: {what}. {remedies}"


def explain_parts(label: str, name: str, lacking: Missing, world_size: int) -> Text:
    """Return the message for a value that holds parts of some ranks only, and would be sent to other ranks too.

    Args:
        label: What can't be sent: `` `sd` ``.
        name: The name of the variable; "" for the arguments of a call.
        lacking: What is wrong with the parts in it.
        world_size: The number of ranks of the run.
    """
    part = lacking.part
    there = part.path if name and part.path else "a part of it"
    whose = format_ranks(lacking.has) if lacking.has else "an unknown rank"
    if part.selects:
        return (
            f"{label} can't go to the ranks: {there} is {part.kind} of {whose}, made for {lacking.of} ranks, and the "
            f"run's {world_size} ranks would all take the same items. Create it inside the cell, where each rank has "
            "its own number."
        )
    why = "every rank would take it for its own" if lacking.of == world_size else f"the run has {world_size} ranks"
    message = (
        f"{label} can't go to the ranks: {there} is {part.kind}, cut for {lacking.of} ranks, and the notebook has only "
        f"the part of {whose}: {why}. In the run that made it, take the whole from {WHOLE_STATE}, or from "
        "full_tensor() of a single tensor."
    )
    if not name:
        return message
    every_part = OptionName("out", f"{name}:all")
    return text_of(f"{message} Or bring every rank's part with ", every_part, f", and read {name}[rank] in the cell.")


def explain_part(name: str, value: object, part: Part) -> str:
    """Return the note for a variable that came back from one rank and is only that rank's part."""
    there = path_to(name, value, part.value)
    whose = "its rank" if part.rank is None else f"rank {part.rank}"
    if part.selects:
        return f"`{name}` belongs to {whose}: {there} is {part.kind} that selects one of {len(part.ranks)} parts"
    return (
        f"`{name}` came back as the part of {whose}: {there} is {part.kind} over {len(part.ranks)} ranks. Take the "
        f"whole from {WHOLE_STATE}, or from full_tensor() of a single tensor; {name}:all brings the parts of all ranks"
    )


def path_to(root: str, value: object, target: object) -> str:
    """Return the notation of an object inside a variable: `sd['weight']`; the variable alone if it isn't found."""
    steps, _ = find_way(value, target)
    return root if steps is None else _notation(root, steps)


def _notation(root: str, steps: Sequence[tuple[str, object]]) -> str:
    path = root
    for label, _ in steps[1:]:
        path = path + label if label[:1] in ".[" else label
    return path


def _either(remedies: Sequence[Text]) -> TextWithOptions:
    """Return the remedies as a sentence: `A.`, `A or B.`, `A, b, or c.`."""
    before_last = " or " if len(remedies) == 2 else ", or "
    parts: list[Text] = [remedies[0]]
    for remedy in remedies[1:-1]:
        parts += [", ", remedy]
    if len(remedies) > 1:
        parts += [before_last, remedies[-1]]
    return text_of(*parts, ".")


def _describe(root: str, value: object, culprit: object, error: Exception) -> tuple[str, Sequence[str], Sequence[str]]:
    """Return the clause that names the culprit, the remedies for its kind, and those for the class that holds it."""
    if isinstance(error.__cause__, RecursionError) or isinstance(error, RecursionError):
        return f"{root} is nested deeper than pickle can follow", ("Build it inside {code}",), ()
    steps, nodes = find_way(value, culprit)
    first_line = next(iter(str(error).strip().splitlines()), "")
    text = "" if _is_stock_message(error) else f" ({type(error).__name__}: {first_line})"
    if steps is None:
        attribute = _bad_attribute(value) if nodes < _DILL_NODES else None
        kind = _kind_of(culprit)
        held = f"{root}.{attribute}" if attribute else root
        return f"{held} holds {kind.phrase}{text}", kind.advice, ()
    for position, (_, step) in enumerate(steps):  # the outermost object with its own wording
        if (kind := _special(step)) is not None and kind.hides_inside:
            steps = steps[: position + 1]
            text = ""
            break
    target = steps[-1][1]
    kind = _kind_of(target)
    path = _notation(root, steps)
    plain = (dict, list, tuple, set, frozenset, types.FunctionType, functools.partial, type, FunctionCall)
    is_inside = steps[-1][0].startswith((".", "[")) and any(not isinstance(step, plain) for _, step in steps[:-1])
    in_class = [f"drop the {kind.noun} in __getstate__"] if is_inside else []
    return f"{path} is {kind.phrase}{text}", kind.advice, in_class


def _is_stock_message(error: Exception) -> bool:
    words = ("cannot pickle", "can't pickle", "cannot be pickled")
    return isinstance(error, TypeError) and any(word in str(error).lower() for word in words)


def _kind_of(obj: object) -> _Kind:
    special = _special(obj)
    if special is not None:
        return special
    cls = type(obj)
    name = cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}.{cls.__qualname__}"
    article = "an" if name.lstrip("_")[:1].lower() in "aeiou" else "a"
    return _Kind(f"{article} {name}", cls.__name__, hides_inside=False)


def _special(obj: object) -> _Kind | None:
    """Return the wording for a frequent culprit. Imports nothing: modules in use are in `sys.modules`."""
    cls = type(obj)
    module, name = cls.__module__ or "", cls.__name__
    package = module.partition(".")[0]
    if package == "_thread" and name in ("lock", "RLock"):
        return _Kind(f"a _thread.{name}", "lock", hides_inside=False)
    if isinstance(obj, io.IOBase) and not isinstance(obj, io.BytesIO | io.StringIO):
        file = getattr(obj, "name", None)
        named = f" ({file})" if isinstance(file, str) else ""
        return _Kind(f"an open file{named}", "file", ("Open it inside {code}",))
    for (home, class_name), kind in _KINDS.items():
        if isinstance(known := getattr(sys.modules.get(home), class_name, None), type) and isinstance(obj, known):
            return kind
    if package in ("sqlite3", "_sqlite3"):
        return _Kind(f"a SQLite {name.lower()}", name.lower(), ("Connect inside {code}",))
    if package == "torch" and name in ("Stream", "Event", "CUDAGraph"):
        return _Kind(f"a CUDA {name.removeprefix('CUDA').lower()}", name.lower())
    if package == "pyspark":
        remedy = "Collect what the cell needs first with toPandas()"
        return _Kind(f"Spark's {name}, which lives on the driver", name, (remedy,))
    if package == "mlflow":
        return _Kind("an MLflow client" if "Client" in name else f"MLflow's {name}", "client")
    return None


def _bad_attribute(value: object) -> str | None:
    """Return the first attribute of `value` that dill can't pickle.

    `dill.detect` is not used: it unpickles again, and creating and deleting copies has side effects in some classes
    (a widget closes).
    """
    import dill

    for name, held in list(getattr(value, "__dict__", {}).items()):
        try:
            dill.dumps(held)
        except Exception:  # noqa: BLE001  code of any class runs here, and another error is reported
            return str(name)
    return None


# ---------------------------------------------------------------- the path to the culprit


def find_way(value: object, culprit: object) -> tuple[list[tuple[str, object]] | None, int]:
    """Return the shortest path from `value` to `culprit` as (label, object) steps, and the number of nodes visited.

    The path is None if there is none, or none was found within the limits.
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
            # keeps the child alive, so that its id is not reused
            parents[id(child)] = (id(node), label, child)
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
    """Yield the objects that pickling `node` reaches, each with its notation. Runs no user code."""
    if isinstance(node, FunctionCall):
        yield name_of(node.function), node.function
        yield from ((argument_name(node.function, index), held) for index, held in enumerate(node.args))
        yield from node.kwargs.items()
        return
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
    elif parts := next((parts for kind, parts in _PARTS.items() if isinstance(node, kind)), ()):
        yield from ((f".{part}", getattr(node, part)) for part in parts)
    elif isinstance(node, type):
        if node.__module__ == "__main__":
            yield from ((f".{name}", held) for name, held in list(vars(node).items()))
            yield from ((base.__name__, base) for base in node.__bases__)
    elif type(node).__module__ == "numpy" and getattr(getattr(node, "dtype", None), "hasobject", False):
        yield from ((f"[{index}]", held) for index, held in enumerate(node.flat))
    if not isinstance(node, type | types.ModuleType):
        yield from _attributes(node)


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for index, held in bound_cells(function):
        yield f".<closure {function.__code__.co_freevars[index]}>", held
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
        # parts of a torch.nn.Module are written as attributes
        for group in (own.get("_modules"), own.get("_parameters"), own.get("_buffers"), own):
            if isinstance(group, dict):
                yield from ((f".{key}", held) for key, held in list(group.items()))
    for cls in type(node).__mro__:
        slots = vars(cls).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else tuple(slots):
            member = vars(cls).get(slot)
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):
                    yield f".{slot}", member.__get__(node, type(node))
    if type(node).__module__ == "__main__":
        yield type(node).__name__, type(node)


def _short(key: object) -> str:
    text = repr(key) if isinstance(key, str | int | float | bool | bytes | tuple) else f"<{type(key).__name__}>"
    return text if len(text) <= 40 else text[:37] + "..."
