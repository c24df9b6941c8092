"""Digests of values, to detect later whether they have changed.

A value is pickled as for the ranks, and the stream and its buffers are digested instead of stored. If the buffers
exceed 64 MB in total, only their addresses, the tensors' version counters and sampled pages are digested: a change of a
few elements by numpy between those pages is not detected.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# cloudpickle has no types

from __future__ import annotations

import hashlib
import io
import sys
import types
from collections.abc import Iterator
from typing import Any, cast

from sgpu_magic.payload.buffers import address_of
from sgpu_magic.payload.names import stored_names
from sgpu_magic.payload.pickler import NamespacePickler
from sgpu_magic.payload.unpack import collector_paused

WHOLE_BYTES = 64_000_000
"""Up to this size, every byte is digested."""

_PAGE = 4096
_PAGES = 256
_SHARED_KINDS = (list, dict, set, bytearray)


class Fingerprint:
    """The state of one value at the time of construction.

    Attributes:
        digest: Equal as long as the value is unchanged; None if it can't be pickled.
        needs: Names of the namespace that its functions and classes read.
        stores: Names of the namespace that its functions set when they are called.
    """

    __slots__ = ("_pickler", "digest", "needs", "stores")

    def __init__(self, value: object, namespace: dict[str, object]) -> None:
        """Digest `value`, whose functions belong to `namespace`."""
        self.digest: bytes | None = None
        self.needs: tuple[str, ...] = ()
        self.stores = frozenset(_stores(value, namespace))
        self._pickler: _Pickler | None = None
        stream = _Digesting()
        pickler = _Pickler(cast("Any", stream), namespace)
        try:
            with collector_paused():
                pickler.dump(value)
        except _TooLong:
            # beyond the limit, the object's identity stands in for its content
            stream.hash.update(f"{id(value)}".encode())
        except Exception:  # noqa: BLE001  __reduce__ and __getstate__ of any class run here; packing reports it better
            return
        _take_buffers(stream.hash, pickler.buffers, pickler.versions)
        self.digest = stream.hash.digest()
        self.needs = tuple(pickler.found)
        self._pickler = pickler

    def shares_with(self, other: Fingerprint) -> bool:
        """Whether both values contain the same mutable object."""
        return not self._parts().isdisjoint(other._parts())

    def forget_parts(self) -> None:
        """Release the references to the value's objects; `shares_with` returns False from now on."""
        self._pickler = None

    def _parts(self) -> frozenset[object]:
        return self._pickler.parts() if self._pickler is not None else frozenset()


class _TooLong(Exception):
    """The stream exceeds the size that is digested."""


class _Digesting:
    """A stream that keeps only its digest."""

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
    """Also records the version counters of tensors, which count in-place changes.

    Attributes:
        versions: One number per tensor, in order.
    """

    def __init__(self, stream: io.BytesIO, namespace: dict[str, object]) -> None:
        super().__init__(stream, namespace)
        self.versions: list[int] = []
        self._tensor: Any = getattr(sys.modules.get("torch"), "Tensor", None)

    def reducer_override(self, obj: Any) -> Any:
        if self._tensor is not None and isinstance(obj, self._tensor):
            try:
                self.versions.append(obj._version)
            except RuntimeError:
                # an inference tensor has no version counter
                self.versions.append(-1)
        return super().reducer_override(obj)

    def parts(self) -> frozenset[object]:
        """The mutable parts of the value, by identity."""
        memo: dict[int, tuple[int, object]] = cast("Any", self).memo.copy()
        numpy: Any = sys.modules.get("numpy")
        kinds = _SHARED_KINDS if numpy is None else (*_SHARED_KINDS, numpy.ndarray)
        # objects that belong to a shared class or function do not connect two values
        common = {id(part) for _, obj in memo.values() for part in _of_definition(obj)}
        found: set[object] = {
            key for key, (_, obj) in memo.items() if isinstance(obj, kinds) and not _is_empty(obj) and key not in common
        }
        return frozenset(found.union(self._storages))


def _is_empty(obj: Any) -> bool:
    """Whether an object is empty; empty objects may be shared constants."""
    return not (obj.nbytes if hasattr(obj, "nbytes") else len(obj))


def _of_definition(obj: object) -> Iterator[object]:
    """Yield objects that belong to a function or class itself, not to the values that it creates."""
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
    """Yield the names that the value's functions declare `global` and set."""
    if isinstance(value, types.FunctionType):
        if value.__globals__ is namespace:
            yield from stored_names(value.__code__, top=False)
    elif isinstance(value, type) and value.__module__ == namespace.get("__name__"):
        for part in vars(value).values():
            function = getattr(part, "__func__", part)
            if isinstance(function, types.FunctionType):
                yield from _stores(function, namespace)
