"""Describes numpy arrays, and DataFrames, Series and indexes of pandas, without running the user's code.

The user may have subclassed each of them, and pandas stores arrays of other libraries in its columns and indexes. An
attribute is read only where its class is known to store it.
"""

# pandas is only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import sys
from typing import Any

from sgpu_magic.worker.cell.variable_details import Details, instance_dict, library_class
from sgpu_magic.worker.process.user_code import slot

_INDEXES = (
    "Index", "RangeIndex", "MultiIndex", "CategoricalIndex", "DatetimeIndex", "TimedeltaIndex", "PeriodIndex",
    "IntervalIndex",
)  # fmt: skip


def array_details(base: type, array: Any) -> Details:
    """Describe a numpy array."""
    shape, dtype, size = slot(base, "shape")(array), slot(base, "dtype")(array), slot(base, "nbytes")(array)
    return Details(shape=shape, dtype=_numpy_dtype(dtype), device="cpu", size_bytes=size)


def _numpy_dtype(dtype: Any) -> str:
    """Return a dtype as text. That of a structured one would contain its fields' names, which may be user objects."""
    return "structured" if dtype.names is not None else str(dtype)


def frame_details(base: type, frame: object) -> Details:
    """Describe a DataFrame or Series; the size is that of the columns, without the index."""
    manager = instance_dict(base, frame)["_mgr"]
    lengths = [_index_length(axis) for axis in reversed(manager.axes)]
    columns = [block.values for block in manager.blocks]
    sizes = [_column_bytes(column) for column in columns]
    known = [size for size in sizes if size is not None]
    return Details(
        shape=tuple(length for length in lengths if length is not None) if None not in lengths else None,
        dtype=_column_dtype(columns[0]) if len(lengths) == 1 else "",
        size_bytes=sum(known) if len(known) == len(sizes) else None,
    )


def index_details(base: type, index: object) -> Details:
    """Describe a pandas index by its length."""
    length = _index_length(index)
    return Details(shape=None if length is None else (length,))


def _index_length(index: Any) -> int | None:
    """Return an index's length; None if its class or the array below it is not pandas' or numpy's own."""
    kind = type(index)
    if not any(kind is library_class("pandas", name) for name in _INDEXES):
        return None
    if kind is library_class("pandas", "RangeIndex"):
        return len(index._range)
    if kind is library_class("pandas", "MultiIndex"):
        return len(index.codes[0])
    return len(index._data) if _is_known_array(index._data) else None


def _column_bytes(values: Any) -> int | None:
    if not _is_known_array(values):
        return None
    # the size of the categories is left out, because they may be an array of the user's class
    is_categorical = type(values) is library_class("pandas.arrays", "Categorical")
    return values.codes.nbytes if is_categorical else values.nbytes


def _column_dtype(values: Any) -> str:
    if not _is_known_array(values):
        return ""
    is_numpy = type(values) is library_class("numpy", "ndarray")
    return _numpy_dtype(values.dtype) if is_numpy else str(values.dtype)


def _is_known_array(values: object) -> bool:
    """Return whether the class of an array is numpy's or pandas' own."""
    kind = type(values)
    arrays = sys.modules["pandas.arrays"].__dict__.values()
    return kind is library_class("numpy", "ndarray") or any(kind is each for each in arrays)
