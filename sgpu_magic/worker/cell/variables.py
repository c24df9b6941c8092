"""Describes a rank's variables for `%sgpu_who` without running the user's code.

`isinstance`, `len`, `getattr` and even `type(x).__name__` may call methods that the value's class or metaclass
defines. Types are therefore compared as they are, and attributes are read with the descriptors of builtin and library
base classes. No tensor is read, copied or synchronised: shape, dtype and device are stored on the host.
"""

# torch is only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

import msgspec
import torch
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]

from sgpu_magic.formatting import clipped
from sgpu_magic.wire.run import RankAnswer, Variable
from sgpu_magic.worker.cell.array_details import array_details, frame_details, index_details
from sgpu_magic.worker.cell.variable_details import Details, instance_dict, library_class, mro_of, namespace_of
from sgpu_magic.worker.process.user_code import encodable, name_of, slot, text_of

MOST_VARIABLES = 500
"""Maximum number of variables in an answer."""

_NAME_CHARS = 100
_TYPE_CHARS = 60
_DTYPE_CHARS = 40
# integers in messages have 64 bits
_MAX_BYTES = 2**63 - 1
_GLOB = frozenset("*?[")
_MIXED = "mixed"
_SIZED = (list, dict, tuple, set, frozenset, str, bytes, bytearray)
_BYTE_STRINGS = (bytes, bytearray)
_tensor_base = torch._C.TensorBase  # pyright: ignore[reportPrivateUsage]
_shape_of = slot(_tensor_base, "shape")
_dtype_of = slot(_tensor_base, "dtype")
_device_of = slot(_tensor_base, "device")
_layout_of = slot(_tensor_base, "layout")
_DISPATCH = "__torch_dispatch__"
_DTENSOR = ("torch.distributed.tensor", "DTensor")
# torch's own classes with `__torch_dispatch__` that store shape, dtype and device like a plain tensor
_STORING_CLASSES = (_DTENSOR, ("torch.distributed._functional_collectives", "AsyncCollectiveTensor"))
_LIBRARY_DETAILS: tuple[tuple[str, str, Callable[[type, Any], Details]], ...] = (
    ("numpy", "ndarray", array_details),
    ("pandas", "DataFrame", frame_details),
    ("pandas", "Series", frame_details),
    ("pandas", "Index", index_details),
)
# a value may be incompletely initialized, or of another version of its library
_UNREADABLE = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def describe(namespace: dict[str, Any], ordinary: Iterable[str], patterns: Sequence[str]) -> RankAnswer:
    """Describe the requested variables, sorted by name, at most `MOST_VARIABLES`.

    Args:
        namespace: The rank's namespace.
        ordinary: The names that cells have set or that were shipped.
        patterns: Names, or shell patterns such as `loss*`. Without any, the ordinary names are described, except
            modules and names that begin with `_`. Such names need a pattern that begins with `_`; a full name selects
            any variable.
    """
    found = sorted(_requested_names(namespace, [name for name in ordinary if type(name) is str], patterns))
    selected = found[:MOST_VARIABLES]
    return RankAnswer(
        variables=tuple(describe_variable(name, namespace[name]) for name in selected),
        left_out=len(found) - len(selected),
    )


def _requested_names(namespace: dict[str, Any], ordinary: Iterable[str], patterns: Sequence[str]) -> set[str]:
    globs = [pattern for pattern in patterns if not _GLOB.isdisjoint(pattern)]
    names = {pattern for pattern in patterns if pattern in namespace}
    if not patterns:
        globs = ["*"]
    for name in ordinary:
        if issubclass(type(namespace[name]), ModuleType):
            continue
        if any(fnmatchcase(name, glob) for glob in globs if glob.startswith("_") or not name.startswith("_")):
            names.add(name)
    return names


def describe_variable(name: str, value: object) -> Variable:
    """Describe a variable by its type, and by the shape and size that builtin and library classes store."""
    kind = type(value)
    plain = Variable(name=_text(name, _NAME_CHARS), type=_text(name_of(kind), _TYPE_CHARS))
    try:
        found = _details(kind, value)
    except _UNREADABLE:
        return plain
    size = found.size_bytes
    return msgspec.structs.replace(
        plain,
        shape=found.shape,
        length=found.length,
        dtype=_text(found.dtype, _DTYPE_CHARS),
        device=found.device,
        size_bytes=size if size is not None and size <= _MAX_BYTES else None,
    )


def _text(text: object, most: int) -> str:
    return clipped(encodable(text_of(text) or "?"), most) if text != "" else ""


def _details(kind: type, value: Any) -> Details:
    for sized in _SIZED:
        if kind is sized:
            length = sized.__len__(value)
            return Details(length=length, size_bytes=length if sized in _BYTE_STRINGS else None)
    if issubclass(kind, torch.Tensor):
        return _tensor(kind, value)
    if issubclass(kind, torch.nn.Module):
        return _module(value)
    for module, name, details in _LIBRARY_DETAILS:
        if (base := library_class(module, name)) is not None and issubclass(kind, base):
            return details(base, value)
    return Details()


# ---------------------------------------------------------------- torch


def _tensor(kind: type, tensor: torch.Tensor) -> Details:
    if not _stores_shape(kind):
        return Details()
    # the descriptors would also call `__torch_function__` of subclasses and modes
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        dtype, device, layout = _dtype_of(tensor), _device_of(tensor), _layout_of(tensor)
        shape = _plain_shape(_shape_of(tensor))
    size: int | None = None
    if (dtensor := library_class(*_DTENSOR)) is not None and issubclass(kind, dtensor):
        local = slot(dtensor, "_local_tensor")(tensor)
        size = _tensor(type(local), local).size_bytes if issubclass(type(local), torch.Tensor) else None
    elif shape is not None and layout is torch.strided and device.type != "meta":
        size = math.prod(shape) * dtype.itemsize
    return Details(shape=shape, dtype=str(dtype).removeprefix("torch."), device=str(device), size_bytes=size)


def _stores_shape(kind: type) -> bool:
    """Return whether tensors of this class store their shape, dtype and device.

    A class with `__torch_dispatch__` may compute them in Python, and an uninitialised parameter has none.
    """
    known = [library_class(*name) for name in _STORING_CLASSES]
    for base in mro_of(kind):
        if base is torch.Tensor:
            break
        if base is UninitializedTensorMixin:
            return False
        if _DISPATCH in namespace_of(base) and not any(base is each for each in known):
            return False
    return True


def _plain_shape(shape: Iterable[object]) -> tuple[int, ...] | None:
    """Return a shape of numbers; None if it has symbols, as during tracing of a model."""
    sizes = tuple(size for size in shape)
    return sizes if all(type(size) is int for size in sizes) else None  # pyright: ignore[reportReturnType]


def _module(module: torch.nn.Module) -> Details:
    """Return the dtype, device and size of a module's parameters and buffers."""
    found = [_tensor(type(tensor), tensor) for tensor in _tensors_of(module)]
    sizes = [tensor.size_bytes for tensor in found]
    known = [size for size in sizes if size is not None]
    return Details(
        dtype=_common(tensor.dtype for tensor in found),
        device=_common(tensor.device for tensor in found),
        size_bytes=sum(known) if known and len(known) == len(sizes) else None,
    )


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield each parameter and buffer of a module and of the modules in it once."""
    seen: set[int] = {id(module)}
    pending: list[object] = [module]
    while pending:
        attributes = instance_dict(torch.nn.Module, pending.pop())
        for registry in ("_parameters", "_buffers", "_modules"):
            registered: Any = attributes.get(registry)
            members: Iterable[Any] = dict.values(registered) if issubclass(type(registered), dict) else ()
            for member in members:
                if id(member) in seen:
                    continue
                seen.add(id(member))
                if issubclass(type(member), torch.Tensor):
                    yield member
                elif issubclass(type(member), torch.nn.Module):
                    pending.append(member)


def _common(texts: Iterable[str]) -> str:
    """Return the text that all non-empty texts have in common, `mixed` if they differ, "" if there is none."""
    different = {text for text in texts if text}
    if len(different) > 1:
        return _MIXED
    return next(iter(different), "")
