"""Packs objects into a pickle stream and its out-of-band buffers."""

# pyright: reportUnknownMemberType=false
# cloudpickle has no types

from __future__ import annotations

import io
import secrets
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from sgpu_magic.errors import SerializationError
from sgpu_magic.payload import explain
from sgpu_magic.payload.buffers import LARGE_BYTES, write_packed
from sgpu_magic.payload.namespace import is_ipythons, loaded_names
from sgpu_magic.payload.parts import Part
from sgpu_magic.payload.pickler import NamespacePickler
from sgpu_magic.payload.unpack import compute_mac
from sgpu_magic.system import collector
from sgpu_magic.wire.attachments import PackedLayout

_ALIGNMENT = 64
# the usual page size: a large buffer can be mapped from a file that has only its bytes; with larger pages it is copied
_LARGE_ALIGNMENT = 4096
# names that depend on each other while they are rebuilt can't always be ordered
_MOST_TRIES = 3


class Packed(msgspec.Struct, frozen=True):
    """Packed objects, not yet copied anywhere: `buffers` are views of the notebook's own memory.

    Args:
        pickle: The pickle stream.
        buffers: Flat views (format `B`) of the out-of-band buffers, in order.
        layout: The offsets of stream and buffers in the packed bytes.
        names: Names that are set on the receiving side; empty for `pack_object`.
        sizes: Size by name in bytes, pickle and buffers; an object with several names counts for the first.
        total_bytes: Total size of the packed bytes.
        files: File names of the packed functions' code, `<ipython-input-...>` or real ones.
        modules: Modules that the receiver imports, each with the first of its names that was pickled; "" for the
            module itself.
        parts: By name (as "" for `pack_object`), the parts of single ranks that its value holds.
    """

    pickle: bytes
    buffers: list[memoryview]
    layout: PackedLayout
    names: tuple[str, ...]
    sizes: dict[str, int]
    total_bytes: int
    files: tuple[str, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    parts: dict[str, list[Part]] = {}

    def to_bytes(self) -> bytes:
        """Return the packed bytes as one bytes object, in the order of `layout`."""
        target = bytearray(self.total_bytes)
        write_packed(self, memoryview(target))
        return bytes(target)


def pack_namespace(
    names: dict[str, object],
    namespace: dict[str, object],
    key: bytes,
    *,
    exclude: frozenset[str] = frozenset(),
    submodules: Iterable[str] = (),
) -> Packed:
    """Pack values by name, and with them every name that their functions and classes read.

    Args:
        names: The values that the cell reads, by name.
        namespace: The notebook's namespace: the globals of its functions.
        key: The run's key.
        exclude: Names that are never packed, even if a function reads them.
        submodules: Names of loaded modules that the receiver imports too.

    Raises:
        SerializationError: A value can't be pickled; the message has the path to the culprit and the remedy.
    """
    values = {name: value for name, value in names.items() if name not in exclude}
    modules = tuple(sys.modules[name] for name in submodules if name in sys.modules)
    order = _in_order(values, lambda name: _names_needed(values.get(name, namespace.get(name)), namespace))
    with collector.paused():
        packing = _Packing(namespace, exclude, values, order, modules)
        for _ in range(_MOST_TRIES - 1):
            needs = packing.needs
            better = _in_order(needs, lambda name, needs=needs: needs.get(name, {}))
            if better == packing.done or not packing.has_late_names():
                break
            packing = _Packing(namespace, exclude, values, better, modules)
    return _packed(packing.pickler, key, tuple(packing.done), packing.sizes, packing.parts)


class _Bounded(io.BytesIO):
    """A stream of at most `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self._left = most_bytes

    def write(self, data: Any, /) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise SerializationError("the object exceeds the size limit.")
        return super().write(data)


def pack_object(obj: object, namespace: dict[str, object], key: bytes, *, most_bytes: int | None = None) -> Packed:
    """Pack one value, for results and exceptions: functions carry their globals by name only.

    Args:
        obj: The value. For `{"names": {...}, "value": ...}`, messages name the part concerned.
        namespace: Functions with these globals are bound to the receiver's namespace.
        key: The run's key.
        most_bytes: The maximum size of the stream; a larger object fails early, without naming the culprit.

    Raises:
        SerializationError: The value can't be pickled; the message has the path to the culprit and the remedy.
    """
    stream = io.BytesIO() if most_bytes is None else _Bounded(most_bytes)
    pickler = NamespacePickler(stream, namespace, returning=True)
    try:
        with collector.paused():
            pickler.dump(obj)
    except Exception as error:  # __reduce__ and __getstate__ of any class run here
        if most_bytes is not None:
            raise
        raise SerializationError(explain.explain_result(obj, pickler.last, error)) from error
    return _packed(pickler, key, (), {}, {"": pickler.rank_parts} if pickler.rank_parts else {})


@dataclass(eq=False)
class _Packing:
    """One attempt to pack a namespace: names in the given order, then the names that they turn out to need.

    Args:
        namespace: The notebook's namespace.
        exclude: Names that are never packed.
        requested: The requested values, by name.
        order: The names to pack first, in order.
        modules: Modules that the receiver imports.

    Attributes:
        pickler: The pickler, with the stream and the buffers.
        done: The packed names, in order.
        needs: By name, the other names that its value needs.
        sizes: As in `Packed`.
        parts: As in `Packed`.
    """

    namespace: dict[str, object]
    exclude: frozenset[str]
    requested: dict[str, object]
    order: Iterable[str]
    modules: tuple[types.ModuleType, ...]

    def __post_init__(self) -> None:
        self.done: list[str] = []
        self.needs: dict[str, dict[str, None]] = {}
        self._values = dict(self.requested)
        self.sizes: dict[str, int] = {}
        self.parts: dict[str, list[Part]] = {}
        self.pickler = NamespacePickler(io.BytesIO(), self.namespace)
        waiting = dict.fromkeys([*self.order, *self.requested])
        while waiting:
            name = next(iter(waiting))
            del waiting[name]
            if name not in self._values:
                if not self._is_shippable(name):
                    continue
                self._values[name] = self.namespace[name]
            waiting.update(dict.fromkeys(new for new in self._dump(name) if new not in self.sizes))
        self.pickler.dump(self.modules)

    def _is_shippable(self, name: str) -> bool:
        if name not in self.namespace or name in self.exclude:
            return False
        return not is_ipythons(name, self.namespace[name])

    def _dump(self, name: str) -> dict[str, None]:
        pickler, value = self.pickler, self._values[name]
        begin, first_buffer = pickler.stream.tell(), len(pickler.buffers)
        pickler.found, pickler.rank_parts = {}, []
        pickler.dump(name)
        try:
            pickler.dump(value)
        except Exception as error:  # __reduce__ and __getstate__ of any class run here
            chain = self._chain(name)
            values = {link: self._values.get(link, self.namespace.get(link)) for link in chain}
            raise SerializationError(explain.explain_name(chain, values, pickler.last, error)) from error
        self.sizes[name] = pickler.stream.tell() - begin + sum(view.nbytes for view in pickler.buffers[first_buffer:])
        self.done.append(name)
        if pickler.rank_parts:
            first, *others = pickler.rank_parts
            first = msgspec.structs.replace(first, path=explain.path_to(name, value, first.value))
            self.parts[name] = [first, *others]
        found = {n: None for n in pickler.found if n != name and (n in self._values or self._is_shippable(n))}
        self.needs[name] = found
        return found

    def _chain(self, target: str) -> list[str]:
        """Return the shortest chain of names, each needing the next, from a requested one to `target`."""
        ways: dict[str, list[str]] = {name: [name] for name in self.requested}
        waiting = list(self.requested)
        while waiting and target not in ways:
            name = waiting.pop(0)
            value = self._values.get(name, self.namespace.get(name))
            for needed in self.needs.get(name, _names_needed(value, self.namespace)):
                if needed not in ways:
                    ways[needed] = [*ways[name], needed]
                    waiting.append(needed)
        return ways.get(target, [target])

    def has_late_names(self) -> bool:
        """Whether rebuilding a value could run a function before the names that it reads are set."""
        at = {name: index for index, name in enumerate(self.done)}
        return any(
            at[needed] > at[name]
            for name, needed_names in self.needs.items()
            if not isinstance(self._values[name], types.FunctionType)
            for needed in needed_names
        )


def _packed(
    pickler: NamespacePickler,
    key: bytes,
    names: tuple[str, ...],
    sizes: dict[str, int],
    parts: dict[str, list[Part]],
) -> Packed:
    stream = pickler.stream.getvalue()
    end = len(stream)
    table: list[tuple[int, int]] = []
    after_large = False
    for view in pickler.buffers:
        is_large = view.nbytes >= LARGE_BYTES
        alignment = _LARGE_ALIGNMENT if is_large or after_large else _ALIGNMENT
        after_large = is_large
        offset = -(-end // alignment) * alignment
        table.append((offset, view.nbytes))
        end = offset + view.nbytes
    keys = tuple(table)
    layout = PackedLayout(pickle_size=len(stream), buffers=keys, mac=compute_mac(key, stream, keys))
    files, modules = tuple(pickler.files), tuple(pickler.modules.items())
    return Packed(stream, pickler.buffers, layout, names, sizes, end, files, modules, parts)


def _in_order(names: Iterable[str], needs: Callable[[str], Iterable[str]]) -> list[str]:
    """Return `names` and the names that they need, in topological order as far as possible."""
    ordered: dict[str, None] = {}
    seen: set[str] = set()
    for root in names:
        stack = [(root, False)]
        while stack:
            name, is_ready = stack.pop()
            if is_ready:
                ordered[name] = None
            elif name not in seen:
                seen.add(name)
                stack.append((name, True))
                stack.extend((needed, False) for needed in reversed(list(needs(name))))
    return list(ordered)


def _names_needed(value: object, namespace: dict[str, object]) -> list[str]:
    """Return the names that `value` certainly needs, without pickling it: for a good initial order."""
    if isinstance(value, types.FunctionType):
        names = loaded_names(value.__code__) if value.__globals__ is namespace else {}
        return [name for name in names if name in namespace]
    cls = value if isinstance(value, type) else type(value)
    own = [base for base in cls.__mro__ if base.__module__ == namespace.get("__name__")]
    needed: dict[str, None] = {}
    for base in own:
        if base is not value and base.__name__ in namespace:
            needed[base.__name__] = None
        for part in vars(base).values():
            function = getattr(part, "__func__", None) or getattr(part, "fget", None) or part
            if isinstance(function, types.FunctionType):
                needed.update(dict.fromkeys(_names_needed(function, namespace)))
    return list(needed)


def new_key() -> bytes:
    """Return a new key for one run, with which packed bytes are authenticated before they are unpacked."""
    return secrets.token_bytes(32)
