"""Packs a function call: checks the arguments, and packs the function with them."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from msgspec.structs import replace

from sgpu_magic.errors import UsageError
from sgpu_magic.options.option_records import RunOptions
from sgpu_magic.payload.call import RANK_NAMES, FunctionCall, RankValue, name_of
from sgpu_magic.runs.kernel_context import KernelContext
from sgpu_magic.runs.notebook import cell_number
from sgpu_magic.runs.submit.spec import PackedCode, pack, scalars
from sgpu_magic.wire.base import RunKind
from sgpu_magic.wire.run import CellSource, OutputName

CALL_NAME = "__sgpu_call__"
RESULT_NAME = "__sgpu_result__"

_BODY = f"{RESULT_NAME} = {CALL_NAME}()\n"


def pack_call(
    context: KernelContext, call: FunctionCall, options: RunOptions, *, stay: frozenset[str] = frozenset()
) -> PackedCode:
    """Check a call's arguments and pack the call. Starts nothing.

    Functions and classes of the notebook or script are pickled by value, with the names that they read; those of
    importable modules are pickled by reference.

    Args:
        context: The kernel's context.
        call: The function that every rank calls, with its arguments.
        options: The options; `exclude` and `ray` are used.
        stay: Names that the function reads and that the ranks already have.

    Raises:
        TypeError: The arguments do not match the function's signature.
        UsageError: The function is not callable.
        SerializationError: The function or an argument can't be pickled.
    """
    begin = time.perf_counter()
    function, name = call.function, name_of(call.function)
    if not callable(function):
        raise UsageError(f"{name} is not callable: give a function or another callable.")
    sent = FunctionCall(by_reference(function), *bind(call))
    code = pack(
        context,
        RunKind.CALL,
        name,
        CellSource(body=_BODY, execution_count=cell_number(context.shell)),
        {CALL_NAME: sent},
        begin=begin,
        # the driver of a Ray cluster runs in rank 0 only
        outputs=(OutputName(RESULT_NAME, all_ranks=not options.ray),),
        exclude=stay.union(options.exclude),
    )
    names = [label for label in code.packed.names if label != CALL_NAME]
    if name not in names:
        names.insert(0, name)
    arguments_label = "its arguments" if call.args or call.kwargs else name
    if arguments_label != name:
        names.append(arguments_label)
    shipped = replace(
        code.shipped,
        names=tuple(names),
        sizes=tuple((arguments_label if label == CALL_NAME else label, size) for label, size in code.shipped.sizes),
    )
    return replace(code, shipped=shipped, parameters=scalars(arguments(call)))


def by_reference(function: Callable[..., object]) -> Callable[..., object]:
    """Return the object to pickle for `function`.

    The module of a decorated function has the decorator's object under the function's name, so the function itself
    can't be pickled by reference. The decorator's object is pickled instead, and yields its function on the rank.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ == "__main__":
        return function
    found: object = module
    for part in getattr(function, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    if found is not function and callable(found) and getattr(found, "__sgpu_function__", None) is function:
        return found
    return function


# ---------------------------------------------------------------- arguments


def bind(call: FunctionCall) -> tuple[tuple[object, ...], dict[str, object]]:
    """Bind a call's arguments, with placeholders that each rank fills in: `rank`, `local_rank`, `world_size`, `device`.

    A parameter of such a name is filled in if the caller omits it and it has no default.

    Raises:
        TypeError: The arguments do not match the signature; with Python's usual message.
    """
    try:
        signature = inspect.signature(call.function)
    except (TypeError, ValueError):
        # C code without a signature
        return call.args, call.kwargs
    try:
        bound = signature.bind_partial(*call.args, **call.kwargs)
    except TypeError as error:
        _refuse(call, signature, (), error)
    filled = [
        name
        for name, parameter in signature.parameters.items()
        if name in RANK_NAMES
        and name not in bound.arguments
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    bound.arguments.update({name: RankValue(name) for name in filled})
    try:
        signature.bind(*bound.args, **bound.kwargs)
    except TypeError as error:
        _refuse(call, signature, filled, error)
    return bound.args, bound.kwargs


def arguments(call: FunctionCall) -> dict[str, object]:
    """Return a call's arguments by parameter name, without those that each rank fills in."""
    try:
        bound = inspect.signature(call.function).bind_partial(*call.args, **call.kwargs)
    except (TypeError, ValueError):
        # C code without a signature
        return call.kwargs
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


def _refuse(call: FunctionCall, signature: inspect.Signature, filled: Iterable[str], error: TypeError) -> NoReturn:
    """Raise the TypeError of a real call with this signature, because the messages of `inspect` differ."""
    name = name_of(call.function)
    refusal = TypeError(f"{name}() {error}")
    parameters = [
        parameter.replace(
            default=parameter.empty if parameter.default is parameter.empty else None, annotation=parameter.empty
        )
        for parameter in signature.parameters.values()
    ]
    head = signature.replace(parameters=parameters, return_annotation=signature.empty)
    namespace: dict[str, Any] = {}
    try:
        exec(f"def like{head}: pass", namespace)
        namespace["like"].__qualname__ = getattr(call.function, "__qualname__", name)
        namespace["like"](*call.args, **{**dict.fromkeys(filled), **call.kwargs})
    except SyntaxError:
        # a signature that no `def` could have
        pass
    except TypeError as usual:
        refusal = TypeError(*usual.args)
    if call.args and not signature.parameters.keys().isdisjoint(RANK_NAMES):
        refusal.add_note(
            "Parameters named rank, local_rank, world_size and device are filled in by each rank when they are left "
            "out: give the arguments after them by keyword."
        )
    raise refusal from None
