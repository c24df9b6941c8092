"""A cloudpickle pickler that binds functions to the receiver's namespace and pickles tensors out of band."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# cloudpickle has no types

from __future__ import annotations

import functools
import io
import operator
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, cast

import cloudpickle
from cloudpickle import cloudpickle as cloudpickle_impl

from sgpu_magic.payload import compiled, parts, tensors, typing_objects, unpack
from sgpu_magic.payload.namespace import bound_cells, loaded_names

# smaller buffers stay in the pickle stream: a table entry and alignment would cost more
_SMALLEST_BUFFER = 4096
_cloudpickle: Any = cloudpickle_impl
_LRU_TYPE = type(functools.lru_cache(lambda: None))
_DISPATCH_CODE = cast("types.FunctionType", functools.singledispatch(lambda: None)).__code__
_NO_FILE = "<dynamic-code>"
_STANDARD_STREAMS = ("stdin", "stdout", "stderr")
_FUNCTION_SLOTS = ("__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__")


class _NamespaceRef:
    """The notebook's namespace in the stream."""

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack.current_namespace, ()


class _CellRef:
    """One closure cell in the stream, so that functions that share it still share it afterwards."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack.make_cell, ()


class NamespacePickler(cloudpickle.Pickler):
    """Pickles values of one namespace. Several `dump` calls share the memo, so shared objects stay shared.

    Args:
        stream: The output stream.
        namespace: Functions with these globals get the receiver's namespace instead of a copy.
        returning: The values are sent back to the process that their classes came from.

    Attributes:
        stream: The output stream.
        buffers: The out-of-band buffers so far, in order.
        found: Names of the namespace that the functions and classes pickled so far need; the caller empties it.
        absent: Names that the functions read and that the namespace does not have; builtins are among them.
        files: File names of the functions' code.
        modules: Modules that the receiver has to import, each with the first of its names that was pickled.
        rank_parts: Values that are one rank's part of something larger; the caller empties it.
        last: The object visited last: the culprit if pickling failed.
    """

    def __init__(self, stream: io.BytesIO, namespace: dict[str, object], *, returning: bool = False) -> None:
        self.stream = stream
        self.buffers: list[memoryview] = []
        super().__init__(stream, protocol=5, buffer_callback=functools.partial(_is_in_band, self.buffers))
        self._namespace = namespace
        self._namespace_ref = _NamespaceRef()
        self._returning = returning
        self._cells: dict[int, _CellRef] = {}
        self._storages: dict[tuple[str, int], tensors.StorageRef] = {}
        self._torch = sys.modules.get("torch")
        self._numpy = sys.modules.get("numpy")
        self._by_type: dict[type[object], Callable[[NamespacePickler, Any], Any] | None] = {}
        self.found: dict[str, None] = {}
        self.absent: set[str] = set()
        self.files: dict[str, None] = {}
        self.modules: dict[str, str] = {}
        self.rank_parts: list[parts.Part] = []
        self.last: object = None

    def reducer_override(self, obj: Any) -> Any:
        self.last = obj
        kind = cast("type[object]", type(obj))
        try:
            reduce = self._by_type[kind]
        except KeyError:
            reduce = self._by_type[kind] = self._reducer_for(obj)
        return NotImplemented if reduce is None else reduce(self, obj)

    def _reducer_for(self, obj: object) -> Callable[[NamespacePickler, Any], Any] | None:
        """Return the reducer for all objects of this type, None to use pickle's default or the dispatch table.

        The reducers are unbound functions: bound ones would form a reference cycle that keeps the buffers in memory.
        """
        known: dict[type[object], Callable[[NamespacePickler, Any], Any]] = {
            types.FunctionType: NamespacePickler._reduce_function,
            types.CodeType: NamespacePickler._reduce_code,
            type: NamespacePickler._reduce_class,
            types.BuiltinFunctionType: NamespacePickler._reduce_builtin,
            types.ModuleType: NamespacePickler._reduce_module,
            _LRU_TYPE: NamespacePickler._reduce_lru_cache,
            io.IOBase: NamespacePickler._reduce_stream,
            memoryview: NamespacePickler._reduce_memoryview,
        }
        for kind, reduce in known.items():
            if isinstance(obj, kind):
                return reduce
        if typing_objects.is_one(obj):
            return NamespacePickler._reduce_typing_object
        if type(obj) is functools.cached_property:
            return NamespacePickler._reduce_cached_property
        if self._torch is not None and type(obj) is self._torch.Tensor:
            return NamespacePickler._reduce_tensor
        if self._torch is not None and tensors.is_storage(self._torch, obj):
            return NamespacePickler._reduce_storage
        if self._torch is not None and compiled.is_scripted(obj):
            return NamespacePickler._reduce_scripted
        if self._numpy is not None and isinstance(obj, self._numpy.ndarray):
            return NamespacePickler._reduce_array
        random: Any = sys.modules.get("numpy.random")
        if random is not None and isinstance(obj, random.BitGenerator | random.Generator | random.RandomState):
            return NamespacePickler._reduce_random
        return None if self._torch is None else self._reducer_of_part(obj)

    def _reduce_tensor(self, tensor: Any) -> Any:
        return tensors.reduce_tensor(self._torch, tensor)

    def _reduce_scripted(self, obj: Any) -> Any:
        return compiled.reduce_scripted(obj)

    def _reduce_storage(self, storage: Any) -> Any:
        return tensors.reduce_storage(self._torch, storage, self._storages)

    @staticmethod
    def _reducer_of_part(obj: object) -> Callable[[NamespacePickler, Any], Any] | None:
        if parts.is_dtensor(obj):
            return NamespacePickler._reduce_dtensor
        if parts.is_mesh(obj):
            return NamespacePickler._reduce_mesh
        if parts.is_sharded_tensor(obj):
            return NamespacePickler._reduce_sharded_tensor
        return NamespacePickler._reduce_selection if parts.is_selection(obj) else None

    def _reduce_dtensor(self, tensor: Any) -> Any:
        part = parts.part_of(tensor)
        if part is None:
            return NotImplemented
        self.rank_parts.append(part)
        if self._returning:
            return NotImplemented
        make, arguments = tensor.__reduce_ex__(5)
        return parts.rebuild, (part.kind, part.rank, make, *arguments)

    def _reduce_selection(self, selection: Any) -> Any:
        part = parts.part_of(selection)
        if part is not None:
            self.rank_parts.append(part)
        return NotImplemented

    def _reduce_mesh(self, mesh: Any) -> Any:
        return parts.reduce_mesh(mesh)

    def _reduce_sharded_tensor(self, tensor: Any) -> Any:
        # its __setstate__ needs the process group of the rank that made it
        raise TypeError(f"cannot pickle '{type(tensor).__name__}' object")

    def _reduce_function(self, function: types.FunctionType) -> Any:
        if function.__globals__ is not self._namespace:
            if function.__code__ is _DISPATCH_CODE and function.__module__ == self._namespace.get("__name__"):
                self._note(function)
                return unpack.make_singledispatch, (list(cast("Any", function).registry.items()),)
            if compiled.is_compiled(function) and _cloudpickle._lookup_module_and_qualname(function) is None:
                self._note(function)
                return compiled.reduce_compiled(function)
            reduced = super().reducer_override(function)
            if reduced is NotImplemented:
                self.modules.setdefault(function.__module__ or "", function.__qualname__)
            return reduced
        code = function.__code__
        loaded = loaded_names(code)
        names = [name for name in loaded if name in self._namespace]
        self.found.update(dict.fromkeys(names))
        self.absent.update(name for name in loaded if name not in self._namespace)
        self._note(function)
        self.files[code.co_filename] = None
        cells = function.__closure__
        contents = dict(bound_cells(function))
        slots = {name: getattr(function, name) for name in _FUNCTION_SLOTS}
        slots["__annotations__"] = function.__annotations__
        if getattr(function, "__type_params__", ()):
            slots["__type_params__"] = cast("Any", function).__type_params__
        reached = [*(self._namespace[name] for name in names), *contents.values()]
        find_submodules: Callable[..., list[object]] = _cloudpickle._find_imported_submodules
        state = (dict(function.__dict__), slots, contents, find_submodules(code, reached))
        refs = None if cells is None else tuple(self._cells.setdefault(id(cell), _CellRef(cell)) for cell in cells)
        arguments = (code, self._namespace_ref, refs)
        return unpack.make_function, arguments, state, None, None, unpack.set_function_state

    def _reduce_code(self, code: types.CodeType) -> Any:
        """Keep the file name, by which tracebacks find the cell; cloudpickle 3.1.3 and newer drop it."""
        make, arguments = _cloudpickle._code_reduce(code)
        return make, tuple(code.co_filename if part == _NO_FILE else part for part in arguments)

    def _reduce_class(self, cls: type) -> Any:
        reduced = super().reducer_override(cls)
        if not isinstance(reduced, tuple) or len(reduced) != 6:
            # by reference
            self.modules.setdefault(cls.__module__, cls.__qualname__)
            return reduced
        generic: Any = vars(cls).get("__pydantic_generic_metadata__")
        if generic and generic.get("origin") is not None:
            # pydantic keeps one class for each of a model's arguments, and finds it by them
            return operator.getitem, (generic["origin"], generic["args"])
        self._note(cls)
        make, arguments, state = reduced[:3]
        if make is _cloudpickle._make_skeleton_class:
            make = unpack.make_class
        if not self._returning:
            unpack.known_classes.add(cls)
            return make, arguments, *reduced[2:]
        return unpack.find_or_make_class, (make, *arguments), state, None, None, unpack.set_class_state

    def _reduce_builtin(self, function: types.BuiltinFunctionType) -> Any:
        module = function.__module__
        # a bound method is pickled with its object
        if module and isinstance(function.__self__, types.ModuleType):
            self.modules.setdefault(module, function.__qualname__)
        return NotImplemented

    def _reduce_module(self, module: types.ModuleType) -> Any:
        if sys.modules.get(module.__name__) is module:
            self.modules.setdefault(module.__name__, "")
        return NotImplemented

    def _note(self, obj: type | types.FunctionType) -> None:
        """Ship a top-level function or class under its name too: code on a rank may pickle it by reference."""
        self._note_name(obj, obj.__qualname__)

    def _note_name(self, obj: object, qualname: str) -> None:
        head, *rest = qualname.split(".")
        found: object = self._namespace.get(head)
        for part in rest:
            found = vars(found).get(part) if isinstance(found, type) else None
        if found is obj:
            self.found[head] = None

    def _reduce_typing_object(self, obj: Any) -> Any:
        if _cloudpickle._lookup_module_and_qualname(obj, name=obj.__name__) is not None:
            return NotImplemented
        self._note_name(obj, obj.__name__)
        return typing_objects.reduce(obj, _tracker_id(obj))

    def _reduce_lru_cache(self, cached: Any) -> Any:
        wrapped = cached.__wrapped__
        if getattr(wrapped, "__globals__", None) is not self._namespace:
            return NotImplemented
        # its default reduction refers to __main__, which may lack it
        options = cached.cache_parameters()
        self._note(cached)
        return unpack.make_lru_cache, (wrapped, options["maxsize"], options["typed"])

    def _reduce_cached_property(self, cached: Any) -> Any:
        # before Python 3.12 it contains a lock
        return functools.cached_property, (cached.func,), {"attrname": cached.attrname}

    def _reduce_array(self, array: Any) -> Any:
        """Pickle an array as its bytes, out of band, by a function that does not depend on NumPy's version.

        NumPy would copy arrays of dates, non-contiguous and memory-mapped ones into the stream, and names a private
        function that NumPy 1 does not have.
        """
        numpy: Any = self._numpy
        if type(array) not in (numpy.ndarray, numpy.memmap) or array.dtype.hasobject or not array.dtype.itemsize:
            return NotImplemented
        is_contiguous = array.flags.c_contiguous or array.flags.f_contiguous
        plain = numpy.asarray(array) if is_contiguous else numpy.ascontiguousarray(array)
        order = "C" if plain.flags.c_contiguous else "F"
        # dates and the types of other packages have no buffer interface
        data = (plain if order == "C" else plain.T).reshape(-1).view(numpy.uint8)
        return unpack.array_of, (pickle.PickleBuffer(data), plain.dtype, plain.shape, order)

    def _reduce_random(self, generator: Any) -> Any:
        """Pickle NumPy's generators as seed and state: what NumPy 2 pickles of them can't be read by NumPy 1."""
        random: Any = sys.modules["numpy.random"]
        kind: Any = type(generator)
        if getattr(random, kind.__name__, None) is not kind:
            return NotImplemented
        if kind is random.Generator:
            return kind, (generator.bit_generator,)
        if kind is random.RandomState:
            state = generator.get_state(legacy=False)
            return unpack.random_of, ("RandomState", generator._bit_generator, state)
        return unpack.random_of, (kind.__name__, generator.seed_seq, generator.state)

    def _reduce_memoryview(self, view: memoryview) -> Any:
        if not view.c_contiguous or view.ndim == 0:
            return NotImplemented
        return unpack.make_memoryview, (pickle.PickleBuffer(view), view.format, view.shape, view.readonly)

    def _reduce_stream(self, stream: io.IOBase) -> Any:
        for name in _STANDARD_STREAMS:
            if stream is getattr(sys, name) or stream is getattr(sys, f"__{name}__"):
                return getattr, (sys, name)
        if isinstance(stream, io.BytesIO | io.StringIO):
            return NotImplemented
        # cloudpickle would read a file to its end and ship the text
        raise TypeError(f"cannot pickle '{type(stream).__name__}' object")


def _tracker_id(obj: object) -> str:
    """Return the id under which both sides know the object; "" if it can't be referred to weakly."""
    try:
        return _cloudpickle._get_or_create_tracker_id(obj)
    except TypeError:
        return ""


def _is_in_band(buffers: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    """Whether the buffer stays in the pickle stream; otherwise it is added to `buffers`."""
    view = buffer.raw()
    if view.nbytes >= _SMALLEST_BUFFER:
        buffers.append(view)
    return view.nbytes < _SMALLEST_BUFFER
