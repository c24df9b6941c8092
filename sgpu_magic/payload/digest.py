"""Digests of values, to detect later whether they have changed.

A value is pickled as for the ranks, and the stream and its buffers are hashed instead of stored. All bytes are hashed:
if a change were missed, the ranks would compute with the old value.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# cloudpickle has no types

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any, cast

from blake3 import blake3

from sgpu_magic.payload.memory_digests import TRACKED_FROM, Hashed, MemoryDigests, digest_of
from sgpu_magic.payload.names import stored_names
from sgpu_magic.payload.pickler import NamespacePickler
from sgpu_magic.system import collector

_SHARED_KINDS = (list, dict, set, bytearray)


class Fingerprint:
    """The state of one value at the time of construction.

    Attributes:
        digest: Equal as long as the value is unchanged; None if it can't be pickled, or was not digested.
        needs: Names of the namespace that its functions and classes read.
        absent: Further names that they read, which the namespace does not have.
        stores: Names of the namespace that its functions set when they are called.
    """

    __slots__ = ("_parts", "_pickler", "_size", "absent", "digest", "needs", "stores")

    def __init__(
        self,
        value: object,
        namespace: dict[str, object],
        memory: MemoryDigests | None = None,
        hashed: Hashed | None = None,
        *,
        content: bool = True,
    ) -> None:
        """Examine `value`.

        Args:
            value: The value.
            namespace: The namespace that its functions belong to.
            memory: Digests the buffers; without it, every byte is hashed.
            hashed: Called with the number of bytes that were just hashed.
            content: Whether to digest it; otherwise only its names are found.
        """
        self.digest: bytes | None = None
        self.needs: tuple[str, ...] = ()
        self.absent: frozenset[str] = frozenset()
        self.stores = frozenset(_stores(value, namespace))
        self._parts: frozenset[object] | None = None
        stream = _Hashing(hashed if content else None)
        self._pickler = pickler = _dumped(value, namespace, stream)
        self._size = stream.size
        if pickler is None:
            return
        self.needs, self.absent = tuple(pickler.found), frozenset(pickler.absent)
        if not content:
            return
        views = [*stream.large, *pickler.buffers]
        digests = [digest_of(view, hashed) for view in views] if memory is None else memory.digests_of(views, hashed)
        for view, digest in zip(views, digests, strict=True):
            stream.hash.update(view.nbytes.to_bytes(8, "little") + digest)
        stream.large.clear()
        self.digest = stream.hash.digest()

    def shares_with(self, other: Fingerprint) -> bool:
        """Whether both values contain the same mutable object."""
        # a value of millions of objects is not searched for the parts of a number
        small, large = sorted((self, other), key=lambda each: each._size)
        return bool(small._found_parts()) and not small._found_parts().isdisjoint(large._found_parts())

    def forget_parts(self) -> None:
        """Release the references to the value's objects; `shares_with` returns False from now on."""
        self._pickler = None
        self._parts = frozenset()

    def _found_parts(self) -> frozenset[object]:
        if self._parts is None:
            self._parts = self._pickler.parts() if self._pickler is not None else frozenset()
        return self._parts


def _dumped(value: object, namespace: dict[str, object], stream: _Hashing) -> _Pickler | None:
    """Pickle a value into a stream and return the pickler; None if the value can't be pickled."""
    pickler = _Pickler(cast("Any", stream), namespace)
    try:
        with collector.paused():
            pickler.dump(value)
    except Exception:  # noqa: BLE001  __reduce__ and __getstate__ of any class run here; packing reports it better
        return None
    return pickler


class _Hashing:
    """A stream that keeps only its hash.

    Args:
        hashed: Called with the number of bytes that were just hashed.

    Attributes:
        size: The number of bytes written.
        hash: The hash of what was written, without `large`.
        large: Large `bytes` objects, which the pickler passes on without a copy, to be hashed as buffers are.
    """

    def __init__(self, hashed: Hashed | None) -> None:
        self.size = 0
        self.hash = blake3()
        self.large: list[memoryview] = []
        self._hashed = hashed

    def write(self, data: Any) -> int:
        self.size += len(data)
        if isinstance(data, bytes) and len(data) >= TRACKED_FROM:
            self.large.append(memoryview(data))
        else:
            self.hash.update(data)
            if self._hashed is not None:
                self._hashed(len(data))
        return len(data)


class _Pickler(NamespacePickler):
    """Also finds the mutable parts of the value."""

    def parts(self) -> frozenset[object]:
        """The mutable parts of the value, by identity."""
        numpy: Any = sys.modules.get("numpy")
        kinds = _SHARED_KINDS if numpy is None else (*_SHARED_KINDS, numpy.ndarray)
        with collector.paused():
            # the memo has millions of objects if the value is a long list of texts
            memo: dict[int, tuple[int, object]] = cast("Any", self).memo.copy()
            visited = [obj for _, obj in memo.values() if not isinstance(obj, str | bytes | tuple)]
        # objects that belong to a shared class or function do not connect two values
        common = {id(part) for obj in visited for part in _of_definition(obj)}
        found: set[object] = {
            id(obj) for obj in visited if isinstance(obj, kinds) and not _is_empty(obj) and id(obj) not in common
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
