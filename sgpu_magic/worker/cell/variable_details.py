"""The description of a variable's value, and the library classes and attributes that it is read from.

Nothing here runs code of the value's class: see `sgpu_magic.worker.cell.variables`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import msgspec

from sgpu_magic.worker.process.user_code import slot

mro_of = slot(type, "__mro__")
namespace_of = slot(type, "__dict__")


class Details(msgspec.Struct, frozen=True):
    """A value's shape, length, dtype, device and size, as far as they are known; fields as in `Variable`."""

    shape: tuple[int, ...] | None = None
    length: int | None = None
    dtype: str = ""
    device: str = ""
    size_bytes: int | None = None


def library_class(module: str, name: str) -> type | None:
    """Return a class of a library if the library is imported."""
    loaded = sys.modules.get(module)
    found = loaded.__dict__.get(name) if type(loaded) is ModuleType else None
    return found if issubclass(type(found), type) else None


def instance_dict(base: type, value: object) -> dict[str, Any]:
    """Return an instance's attributes; a property named `__dict__` of its own class is not called."""
    owner = next(each for each in mro_of(base) if "__dict__" in namespace_of(each))
    return slot(owner, "__dict__")(value)
