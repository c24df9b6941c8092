"""Functions that torch has compiled in the notebook: sent as what they wrap, and compiled again where they arrive.

What `torch.compile` returns holds the compiler with its caches and locks. It is taken apart into the function and the
arguments of `torch.compile`. What `torch.jit` has scripted or traced is sent in torch's own format.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch is only accessed through `sys.modules`, without types

from __future__ import annotations

import io
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

# attributes with which a wrapper refers to the wrapped callable, depending on torch's version
_INNER = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")
_MOST_WRAPPERS = 20


def is_compiled(function: types.FunctionType) -> bool:
    """Whether it is what `torch.compile` returns for a function."""
    return "_torchdynamo_orig_callable" in vars(function) and "self" in function.__code__.co_freevars


def is_scripted(obj: object) -> bool:
    """Whether it is a function or a module of `torch.jit`."""
    torch: Any = sys.modules.get("torch")
    jit = getattr(torch, "jit", None)
    return jit is not None and isinstance(obj, jit.ScriptFunction | jit.ScriptModule)


def reduce_compiled(function: types.FunctionType) -> tuple[Callable[..., object], tuple[object, ...]]:
    """Return the reduction of what `torch.compile` returned for a function."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    context: Any = cells["self"].cell_contents
    if not hasattr(context, "callback") or type(context).__name__ != "OptimizeContext":
        # `torch.compiler.disable` and similar functions
        return compile_again, (vars(function)["_torchdynamo_orig_callable"], None)
    backend: Any = context.callback
    for _ in range(_MOST_WRAPPERS):
        inner = next((getattr(backend, name) for name in _INNER if getattr(backend, name, None) is not None), None)
        if inner is None:
            break
        backend = inner
    arguments: dict[str, Any] = {
        "fullgraph": bool(getattr(context, "fullgraph", None) or getattr(context, "error_on_graph_break", None)),
        "dynamic": getattr(context, "_dynamic", getattr(context, "dynamic", None)),
    }
    if hasattr(backend, "config"):
        # inductor's backend, whose config contains the options of its mode
        arguments |= {"backend": "inductor", "options": dict(backend.config) or None, "dynamic": backend.dynamic}
    elif hasattr(backend, "compiler_fn"):
        name = getattr(backend, "compiler_name", None)
        is_listed = isinstance(name, str) and name in sys.modules["torch"]._dynamo.list_backends(exclude_tags=())
        arguments |= {"backend": name if is_listed else backend.compiler_fn, **backend.kwargs}
    else:
        arguments["backend"] = backend
    return compile_again, (vars(function)["_torchdynamo_orig_callable"], arguments)


def compile_again(function: Callable[..., object], arguments: dict[str, Any] | None) -> object:
    """Return the compiled function; uncompiled if `arguments` is None."""
    if arguments is None:
        return function
    torch: Any = __import__("torch")
    return torch.compile(function, **arguments)


def reduce_scripted(obj: Any) -> tuple[Callable[..., object], tuple[object, ...]]:
    """Return the reduction of a scripted or traced function or module."""
    return load_scripted, (obj.save_to_buffer(),)


def load_scripted(data: bytes) -> object:
    torch: Any = __import__("torch")
    with warnings.catch_warnings():
        # torch.jit's deprecation warning was already shown where it was used
        warnings.simplefilter("ignore")
        return torch.jit.load(io.BytesIO(data))
