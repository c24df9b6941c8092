"""What a value looks like now, so that later it can be told whether it has changed since.

A value is pickled as for the ranks, and the stream and its buffers are digested instead of kept. Buffers above
64 MB together are told by where they lie, by the tensors' own count of changes and by pages here and there: a change
of a few elements by numpy between those pages is not seen.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# cloudpickle has no types

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Iterator
from typing import Any, cast

from sgpu_magic.payload.buffers import address_of
from sgpu_magic.payload.names import stored_names
from sgpu_magic.payload.pickler import NamespacePickler
from sgpu_magic.payload.unpack import collector_paused

WHOLE_BYTES = 64_000_000
"""Up to here every byte counts."""

_PAGE = 4096
_PAGES = 256
_SHARED_KINDS = (list, dict, set, bytearray)


class Fingerprint:
    """One value as it is now.

    Attributes:
        digest: Equal for a value that has not changed, None for one that can't be pickled.
        needs: Names of the namespace that its functions and classes read.
        stores: Names of the namespace that its functions set when they are called.
    """

    __slots__ = ("_pickler", "digest", "needs", "stores")

    def __init__(self, value: object, namespace: dict[str, object]) -> None:
        """Look at `value`, whose functions belong to `namespace`."""
        self.digest: bytes | None = None
        self.needs: tuple[str, ...] = ()
        self.stores = frozenset(_stores(value, namespace))
        self._pickler: _Pickler | None = None
        stream = _Digesting()
        buffers: list[memoryview] = []
        pickler = _Pickler(stream, namespace, buffers)
        try:
            with collector_paused():
                pickler.dump(value)
        except _TooLong:
            # what is beyond is told by where the object lies
            stream.hash.update(f"{id(value)}".encode())
        except Exception:  # noqa: BLE001  __reduce__ and __getstate__ of any class run here, and packing says it better
            return
        _take_buffers(stream.hash, buffers, pickler.versions)
        self.digest = stream.hash.digest()
        self.needs = tuple(pickler.found)
        self._pickler = pickler

    def shares_with(self, other: Fingerprint) -> bool:
        """Whether an object that can be changed belongs to both values."""
        return not self._parts().isdisjoint(other._parts())

    def forget_parts(self) -> None:
        """Let go of the values' objects; `shares_with` is not asked any more."""
        self._pickler = None

    def _parts(self) -> frozenset[object]:
        return self._pickler.parts() if self._pickler is not None else frozenset()


class _TooLong(Exception):
    """The stream has more bytes than are looked at."""


class _Digesting:
    """Takes a stream and keeps its digest."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self._size = 0

    def write(self, data: Any) -> int:
        self.hash.update(data)
        self._size += len(data)
        if self._size > WHOLE_BYTES:
            raise _TooLong
        return len(data)


class _Pickler(NamespacePickler):
    """Also notes how often each tensor was changed in place.

    Attributes:
        versions: One number by tensor, in order.
    """

    def __init__(self, stream: _Digesting, namespace: dict[str, object], buffers: list[memoryview]) -> None:
        super().__init__(cast("Any", stream), namespace, buffers)
        self.versions: list[int] = []
        self._tensor: Any = getattr(sys.modules.get("torch"), "Tensor", None)

    def reducer_override(self, obj: Any) -> Any:
        if self._tensor is not None and isinstance(obj, self._tensor):
            try:
                self.versions.append(obj._version)
            except RuntimeError:
                # an inference tensor counts nothing
                self.versions.append(-1)
        return super().reducer_override(obj)

    def parts(self) -> frozenset[object]:
        """What of the value can be changed in place, by identity."""
        memo: dict[int, tuple[int, object]] = cast("Any", self).memo.copy()
        numpy: Any = sys.modules.get("numpy")
        kinds = _SHARED_KINDS if numpy is None else (*_SHARED_KINDS, numpy.ndarray)
        # two objects of one class are not one because the class has a list
        common = {id(part) for _, obj in memo.values() for part in _of_definition(obj)}
        found: set[object] = {
            key for key, (_, obj) in memo.items() if isinstance(obj, kinds) and not _is_empty(obj) and key not in common
        }
        return frozenset(found.union(self._storages))


def _is_empty(obj: Any) -> bool:
    """Of an object that holds nothing there may be one for everybody."""
    return not (obj.nbytes if hasattr(obj, "nbytes") else len(obj))


def _of_definition(obj: object) -> Iterator[object]:
    """Yield what belongs to a function or a class and not to the values made by it."""
    if isinstance(obj, types.FunctionType):
        yield from (obj.__annotations__, obj.__dict__)
        yield from obj.__defaults__ or ()
        yield from (obj.__kwdefaults__ or {}).values()
    elif isinstance(obj, type):
        yield from vars(obj).values()


def _take_buffers(digest: hashlib.blake2b, buffers: list[memoryview], versions: list[int]) -> None:
    if sum(view.nbytes for view in buffers) <= WHOLE_BYTES:
        for view in buffers:
            digest.update(view)
        return
    digest.update(repr(versions).encode())
    for view in buffers:
        digest.update(f"{address_of(view)} {view.nbytes}".encode())
        for page in _pages(view):
            digest.update(page)


def _pages(view: memoryview) -> Iterator[memoryview]:
    if view.nbytes <= _PAGE * _PAGES:
        yield view
        return
    step = (view.nbytes - _PAGE) / (_PAGES - 1)
    for index in range(_PAGES):
        begin = int(index * step)
        yield view[begin : begin + _PAGE]


def _stores(value: object, namespace: dict[str, object]) -> Iterator[str]:
    """Yield the names that the value's own functions declare `global` and set."""
    if isinstance(value, types.FunctionType):
        if value.__globals__ is namespace:
            names: set[str] = set()
            stored_names(value.__code__, names, top=False)
            yield from names
    elif isinstance(value, type) and value.__module__ == namespace.get("__name__"):
        for part in vars(value).values():
            function = getattr(part, "__func__", part)
            if isinstance(function, types.FunctionType):
                yield from _stores(function, namespace)
