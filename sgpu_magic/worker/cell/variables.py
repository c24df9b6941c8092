"""Describes a rank's variables for `%sgpu_who` without running the user's code.

`isinstance`, `len`, `getattr` and even `type(x).__name__` may call methods that the value's class or metaclass
defines. Types are therefore compared as they are, and attributes are read with the descriptors of builtin and library
base classes. No tensor is read, copied or synchronised: shape, dtype and device are stored on the host.
"""

# torch and pandas are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

import msgspec
import torch
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]

from sgpu_magic.formatting import clipped
from sgpu_magic.wire.run import RankAnswer, Variable
from sgpu_magic.worker.process.user_code import encodable, name_of, slot, text_of

MOST_VARIABLES = 500
"""Variables in one answer."""

_NAME_CHARS = 100
_TYPE_CHARS = 60
_DTYPE_CHARS = 40
# the wire's integers have 64 bits
_MOST_BYTES = 2**63 - 1
_GLOB = frozenset("*?[")
_MIXED = "mixed"
_SIZED = (list, dict, tuple, set, frozenset, str, bytes, bytearray)
_OF_BYTES = (bytes, bytearray)
_mro_of = slot(type, "__mro__")
_namespace_of = slot(type, "__dict__")
_tensor_base = torch._C.TensorBase  # pyright: ignore[reportPrivateUsage]
_shape_of = slot(_tensor_base, "shape")
_dtype_of = slot(_tensor_base, "dtype")
_device_of = slot(_tensor_base, "device")
_layout_of = slot(_tensor_base, "layout")
_DISPATCH = "__torch_dispatch__"
_DTENSOR = ("torch.distributed.tensor", "DTensor")
# torch's own classes with `__torch_dispatch__` that store shape, dtype and device as a plain tensor does
_STORING = (_DTENSOR, ("torch.distributed._functional_collectives", "AsyncCollectiveTensor"))
_INDEXES = (
    "Index", "RangeIndex", "MultiIndex", "CategoricalIndex", "DatetimeIndex", "TimedeltaIndex", "PeriodIndex",
    "IntervalIndex",
)  # fmt: skip
# a value may be half-built, or of another version of its library
_UNREADABLE = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def describe(namespace: dict[str, Any], ordinary: Iterable[str], patterns: Sequence[str]) -> RankAnswer:
    """Describe the variables that are asked for, sorted by name, at most `MOST_VARIABLES`.

    Args:
        namespace: The rank's namespace.
        ordinary: The names that cells have set or that were shipped.
        patterns: Names, or patterns as in a shell: `loss*`. Without any, ordinary names are described that do not begin
            with `_` and that are no modules. A pattern that begins with `_` adds names that do, and a whole name adds
            anything.
    """
    found = sorted(_asked_for(namespace, [name for name in ordinary if type(name) is str], patterns))
    kept = found[:MOST_VARIABLES]
    return RankAnswer(
        variables=tuple(describe_variable(name, namespace[name]) for name in kept), left_out=len(found) - len(kept)
    )


def _asked_for(namespace: dict[str, Any], ordinary: Iterable[str], patterns: Sequence[str]) -> set[str]:
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
    """Describe one variable by its type, and by what builtin and library classes store of its shape and size."""
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
        size_bytes=size if size is not None and size <= _MOST_BYTES else None,
    )


def _text(text: object, most: int) -> str:
    return clipped(encodable(text_of(text) or "?"), most) if text != "" else ""


class _Details(msgspec.Struct, frozen=True):
    """What is known of a value beside its type; fields as in `Variable`."""

    shape: tuple[int, ...] | None = None
    length: int | None = None
    dtype: str = ""
    device: str = ""
    size_bytes: int | None = None


def _details(kind: type, value: Any) -> _Details:
    for sized in _SIZED:
        if kind is sized:
            length = sized.__len__(value)
            return _Details(length=length, size_bytes=length if sized in _OF_BYTES else None)
    if issubclass(kind, torch.Tensor):
        return _tensor(kind, value)
    if issubclass(kind, torch.nn.Module):
        return _module(value)
    for module, name, details in _LIBRARIES:
        if (base := _library_class(module, name)) is not None and issubclass(kind, base):
            return details(base, value)
    return _Details()


def _library_class(module: str, name: str) -> type | None:
    """Return a class of a library if the library is imported."""
    loaded = sys.modules.get(module)
    found = loaded.__dict__.get(name) if type(loaded) is ModuleType else None
    return found if issubclass(type(found), type) else None


def _instance_dict(base: type, value: object) -> dict[str, Any]:
    """Return an instance's attributes; a property named `__dict__` of its own class is not called."""
    owner = next(each for each in _mro_of(base) if "__dict__" in _namespace_of(each))
    return slot(owner, "__dict__")(value)


# ---------------------------------------------------------------- torch


def _tensor(kind: type, tensor: torch.Tensor) -> _Details:
    if not _stores_shape(kind):
        return _Details()
    # `__torch_function__` of subclasses and modes would be called by the descriptors too
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        dtype, device, layout = _dtype_of(tensor), _device_of(tensor), _layout_of(tensor)
        shape = _plain_shape(_shape_of(tensor))
    size: int | None = None
    if (dtensor := _library_class(*_DTENSOR)) is not None and issubclass(kind, dtensor):
        local = slot(dtensor, "_local_tensor")(tensor)
        size = _tensor(type(local), local).size_bytes if issubclass(type(local), torch.Tensor) else None
    elif shape is not None and layout is torch.strided and device.type != "meta":
        size = math.prod(shape) * dtype.itemsize
    return _Details(shape=shape, dtype=str(dtype).removeprefix("torch."), device=str(device), size_bytes=size)


def _stores_shape(kind: type) -> bool:
    """Whether the shape, dtype and device of tensors of this class are stored.

    A class with `__torch_dispatch__` may compute them in Python, and an uninitialised parameter has none.
    """
    known = [_library_class(*name) for name in _STORING]
    for base in _mro_of(kind):
        if base is torch.Tensor:
            break
        if base is UninitializedTensorMixin:
            return False
        if _DISPATCH in _namespace_of(base) and not any(base is each for each in known):
            return False
    return True


def _plain_shape(shape: Iterable[object]) -> tuple[int, ...] | None:
    """Return a shape of numbers; None if it has symbols, as while a model is traced."""
    sizes = tuple(size for size in shape)
    return sizes if all(type(size) is int for size in sizes) else None  # pyright: ignore[reportReturnType]


def _module(module: torch.nn.Module) -> _Details:
    """Return the dtype, device and size of a module's parameters and buffers."""
    found = [_tensor(type(tensor), tensor) for tensor in _tensors_of(module)]
    sizes = [tensor.size_bytes for tensor in found]
    known = [size for size in sizes if size is not None]
    return _Details(
        dtype=_common(tensor.dtype for tensor in found),
        device=_common(tensor.device for tensor in found),
        size_bytes=sum(known) if known and len(known) == len(sizes) else None,
    )


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield each parameter and buffer of a module and of the modules in it once."""
    seen: set[int] = {id(module)}
    waiting: list[object] = [module]
    while waiting:
        attributes = _instance_dict(torch.nn.Module, waiting.pop())
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
                    waiting.append(member)


def _common(texts: Iterable[str]) -> str:
    """Return the one text among these that is not empty, "" for none and `mixed` for several."""
    different = {text for text in texts if text}
    if len(different) > 1:
        return _MIXED
    return next(iter(different), "")


# ---------------------------------------------------------------- numpy and pandas


def _array(base: type, array: Any) -> _Details:
    shape, dtype, size = slot(base, "shape")(array), slot(base, "dtype")(array), slot(base, "nbytes")(array)
    return _Details(shape=shape, dtype=_numpy_dtype(dtype), device="cpu", size_bytes=size)


def _numpy_dtype(dtype: Any) -> str:
    """Return a dtype as text. That of a structured one has its fields' names, which may be the user's objects."""
    return "structured" if dtype.names is not None else str(dtype)


def _frame(base: type, frame: object) -> _Details:
    """Describe a DataFrame or Series of any subclass; its size is that of the columns."""
    manager = _instance_dict(base, frame)["_mgr"]
    lengths = [_index_length(axis) for axis in reversed(manager.axes)]
    columns = [block.values for block in manager.blocks]
    sizes = [_column_bytes(column) for column in columns]
    known = [size for size in sizes if size is not None]
    return _Details(
        shape=tuple(length for length in lengths if length is not None) if None not in lengths else None,
        dtype=_column_dtype(columns[0]) if len(lengths) == 1 else "",
        size_bytes=sum(known) if len(known) == len(sizes) else None,
    )


def _index(base: type, index: object) -> _Details:
    length = _index_length(index)
    return _Details(shape=None if length is None else (length,))


def _index_length(index: Any) -> int | None:
    """Return an index's length; None for a subclass of the user's, or one over an array of the user's."""
    kind = type(index)
    if not any(kind is _library_class("pandas", name) for name in _INDEXES):
        return None
    if kind is _library_class("pandas", "RangeIndex"):
        return len(index._range)
    if kind is _library_class("pandas", "MultiIndex"):
        return len(index.codes[0])
    return len(index._data) if _is_known_array(index._data) else None


def _column_bytes(values: Any) -> int | None:
    if not _is_known_array(values):
        return None
    # its categories may be an array of the user's
    is_categorical = type(values) is _library_class("pandas.arrays", "Categorical")
    return values.codes.nbytes if is_categorical else values.nbytes


def _column_dtype(values: Any) -> str:
    if not _is_known_array(values):
        return ""
    is_numpy = type(values) is _library_class("numpy", "ndarray")
    return _numpy_dtype(values.dtype) if is_numpy else str(values.dtype)


def _is_known_array(values: object) -> bool:
    """Whether this is an array of numpy's or pandas' own."""
    kind = type(values)
    arrays = sys.modules["pandas.arrays"].__dict__.values()
    return kind is _library_class("numpy", "ndarray") or any(kind is each for each in arrays)


_LIBRARIES: tuple[tuple[str, str, Callable[[type, Any], _Details]], ...] = (
    ("numpy", "ndarray", _array),
    ("pandas", "DataFrame", _frame),
    ("pandas", "Series", _frame),
    ("pandas", "Index", _index),
)
