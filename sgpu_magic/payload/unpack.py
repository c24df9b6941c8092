"""Unpacks packed bytes to objects. Light: imports nothing that a rank does not import anyway.

Nothing is unpickled before the MAC under the run's key and the table of buffers are verified. Arrays and
tensors use the given bytes without a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import importlib
import io
import mmap
import os
import pickle
import struct
import sys
import types
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from sgpu_magic.errors import SerializationError
from sgpu_magic.system import collector
from sgpu_magic.wire.attachments import PackedLayout
from sgpu_magic.wire.files import PAYLOAD, PAYLOAD_PARTS

PackedBytes = bytes | bytearray | memoryview | mmap.mmap

_MAC_PREFIX = b"sgpu-magic packed 1\0"
# the same value on macOS and on all architectures of Linux; the module `mmap` does not define it
_MAP_FIXED = 0x10
_namespace: ContextVar[dict[str, object]] = ContextVar("sgpu_namespace")
# notebook classes that this process has sent or received: a returned class is the original object
known_classes: weakref.WeakSet[type] = weakref.WeakSet()


def compute_mac(key: bytes, stream: bytes | memoryview, buffers: tuple[tuple[int, int], ...]) -> bytes:
    """Return the HMAC-SHA256 under `key` over a pickle stream and its table of buffers."""
    mac = hmac.new(key, _MAC_PREFIX, "sha256")
    mac.update(
        struct.pack(f"<QQ{2 * len(buffers)}Q", len(stream), len(buffers), *(n for pair in buffers for n in pair))
    )
    mac.update(stream)
    return mac.digest()


def unpack(data: PackedBytes, layout: PackedLayout, key: bytes, namespace: dict[str, object]) -> object:
    """Return the object that `pack_object` packed.

    Args:
        data: The packed bytes; arrays and tensors keep using this memory. Read-only bytes are copied once.
        layout: The layout that was sent with them.
        key: The run's key.
        namespace: The globals of unpacked functions.

    Raises:
        SerializationError: The bytes were not packed with this key, or can't be rebuilt here.
    """
    unpickler = _checked_unpickler(data, layout, key)
    with _standing_in(namespace):
        return _load(unpickler, "the value")


def unpack_namespace(data: PackedBytes, layout: PackedLayout, key: bytes, namespace: dict[str, object]) -> None:
    """Set the names that `pack_namespace` packed in `namespace`.

    Args:
        data: As for `unpack`.
        layout: As for `unpack`.
        key: As for `unpack`.
        namespace: Filled in place; also the globals of unpacked functions.

    Raises:
        SerializationError: As for `unpack`; the message names the variable that can't be rebuilt.
    """
    unpickler = _checked_unpickler(data, layout, key)
    with _standing_in(namespace):
        while True:
            name = _load(unpickler, "the next name")
            if not isinstance(name, str):
                return
            namespace[name] = _load(unpickler, f"`{name}`")


def _checked_unpickler(data: PackedBytes, layout: PackedLayout, key: bytes) -> pickle.Unpickler:
    view = memoryview(data)
    if view.format != "B" or view.ndim != 1:
        view = view.cast("B")
    size = view.nbytes
    if not 0 <= layout.pickle_size <= size or any(
        offset < layout.pickle_size or length < 0 or offset + length > size for offset, length in layout.buffers
    ):
        raise SerializationError(
            f"a packed object does not match its {size:,} bytes: it was truncated in transit. Run it again."
        )
    stream = view[: layout.pickle_size]
    if not hmac.compare_digest(compute_mac(key, stream, layout.buffers), layout.mac):
        raise SerializationError(
            "a packed object does not carry this run's signature, so it was not unpickled. It was "
            "changed in transit. Run it again."
        )
    if view.readonly and layout.buffers:
        view = memoryview(bytearray(view))
    buffers = [view[offset : offset + length] for offset, length in layout.buffers]
    return pickle.Unpickler(io.BytesIO(stream), buffers=buffers)


@contextmanager
def _standing_in(namespace: dict[str, object]) -> Generator[None]:
    token = _namespace.set(namespace)
    try:
        with collector.paused():
            yield
    finally:
        _namespace.reset(token)


def _load(unpickler: pickle.Unpickler, what: str) -> Any:
    try:
        return unpickler.load()
    except Exception as error:  # constructors and __setstate__ of any class run here
        raise SerializationError(
            f"{what} can't be rebuilt on the other side: {type(error).__name__}: {error}. {_remedy(error)}"
        ) from error


def _remedy(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        package = sys.modules.get((error.name or "").partition(".")[0])
        if package is not None and package.__name__ != error.name:
            here = f" {package.__version__}" if hasattr(package, "__version__") else ""
            return (
                f"{package.__name__}{here} is installed where the value arrives, and the value was packed with another "
                "version of it: install the same one on both sides."
            )
        return "That module has to be installed where the value arrives."
    if isinstance(error, AttributeError):
        return "Its class or function has to exist in the same version where the value arrives."
    return "Create it inside the cell, or give its class a __reduce__ or __setstate__ that works elsewhere."


def map_private(fd: int, size: int) -> mmap.mmap:
    """Map `size` bytes of `fd` copy-on-write: writable, never written back."""
    flags: dict[str, Any] = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
    if sys.version_info >= (3, 13):
        flags["trackfd"] = False  # else the mapping keeps a duplicate of the descriptor
    return mmap.mmap(fd, size, **flags)


def map_over(mapping: mmap.mmap, offset: int, fd: int, size: int) -> None:
    """Replace a range of a private mapping by `size` bytes of `fd`, also copy-on-write.

    Args:
        mapping: What `map_private` returned; nothing of the range was read or written yet.
        offset: Where the range begins, a multiple of the page size. It ends with its last page.
        fd: A file of at least `size` bytes.
        size: The number of bytes.

    Raises:
        OSError: The file can't be mapped.
    """
    # `mmap.mmap` takes no address
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(3 * [ctypes.c_int]), ctypes.c_long)
    if offset < 0 or offset % mmap.PAGESIZE or offset + size > len(mapping):
        raise ValueError(f"{size} bytes can't be mapped at {offset}")
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + offset
    flags = mmap.MAP_PRIVATE | _MAP_FIXED
    if libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def map_kept(directory: Path, layout: PackedLayout) -> mmap.mmap:
    """Map the payload in a run's directory copy-on-write: one file, or its parts.

    Raises:
        OSError: It can't be read.
        ValueError: It is not complete.
    """
    end = max((offset + length for offset, length in layout.buffers), default=layout.pickle_size)
    folder = directory / PAYLOAD_PARTS
    paths = {0: directory / PAYLOAD}
    if folder.is_dir():
        paths = {int(path.name): path for path in folder.iterdir() if path.name.isdecimal()}
    with contextlib.ExitStack() as stack:
        parts = {begin: stack.enter_context(open(path, "rb")) for begin, path in paths.items() if begin < end}
        # a memory file that was copied may be larger than its payload
        sizes = {begin: min(os.fstat(file.fileno()).st_size, end - begin) for begin, file in parts.items()}
        there = max((begin + size for begin, size in sizes.items()), default=0)
        if there < end:
            raise ValueError(f"{there:,} bytes of {end:,} are there")
        mapping = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        copied = {begin for begin in parts if begin % mmap.PAGESIZE or sizes[begin] < mmap.PAGESIZE}
        for begin in parts.keys() - copied:
            map_over(mapping, begin, parts[begin].fileno(), sizes[begin])
        # after the mapped ones, which replace their last page as a whole
        with memoryview(mapping) as whole:
            for begin in copied:
                parts[begin].readinto(whole[begin : begin + sizes[begin]])
    return mapping


# ---------------------------------------------------------------- called by pickle streams


def current_namespace() -> dict[str, object]:
    """Return the namespace that is being filled: the globals of functions from a notebook.

    Raises:
        SerializationError: The packed stream is not being read by this module.
    """
    try:
        return _namespace.get()
    except LookupError:
        raise SerializationError("a packed notebook function can only be read by sgpu_magic.payload.unpack.") from None


def make_cell() -> types.CellType:
    return types.CellType()


def make_function(
    code: types.CodeType, namespace: dict[str, object], closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    return types.FunctionType(code, namespace, None, None, closure)


def set_function_state(
    function: types.FunctionType,
    state: tuple[dict[str, object], dict[str, object], dict[int, object], list[object]],
) -> None:
    """Set a function's attributes, slots and closure; the fourth part only has to be unpickled, to import modules."""
    attributes, slots, contents, _ = state
    function.__dict__.update(attributes)
    for index, value in contents.items():
        (function.__closure__ or ())[index].cell_contents = value
    for name, value in slots.items():
        setattr(function, name, value)


def array_of(data: Any, dtype: Any, shape: tuple[int, ...], order: Any) -> Any:
    """Return an array in a buffer of its bytes."""
    import numpy

    if not len(data):
        return numpy.empty(shape, dtype)
    return numpy.frombuffer(data, dtype).reshape(shape, order=order)


def random_of(name: str, source: Any, state: Any) -> Any:
    """Return one of NumPy's bit generators, made from its seed, or a RandomState of a bit generator, in a state."""
    import numpy

    generator = getattr(numpy.random, name)(source)
    if name == "RandomState":
        generator.set_state(state)
    else:
        generator.state = state
    return generator


def make_memoryview(data: Any, format_: str, shape: tuple[int, ...], readonly: bool) -> memoryview:
    view: Any = memoryview(data).cast("B")
    if (format_, shape) != ("B", (view.nbytes,)):
        view = view.cast(format_, shape)
    return view.toreadonly() if readonly else view


def view_as(array: Any, dtype: Any) -> Any:
    return array.view(dtype)


def make_lru_cache(function: Callable[..., object], maxsize: int | None, typed: bool) -> object:
    import functools

    return functools.lru_cache(maxsize, typed)(function)


def make_singledispatch(registry: list[tuple[type, Callable[..., object]]]) -> Callable[..., object]:
    import functools

    implementations = dict(registry)
    dispatching = functools.singledispatch(implementations.pop(object))
    for cls, implementation in implementations.items():
        dispatching.register(cls, implementation)
    return dispatching


def make_class(
    metaclass: Any, name: str, bases: tuple[Any, ...], attributes: dict[str, Any], tracker_id: str, extra: object
) -> type:
    """Return the class that this process knows by this id, or a new one without its attributes, which are set next.

    The notebook has called its own hooks when it defined the class: a metaclass's `__new__` and `__init__`, and
    `__init_subclass__` of a base. What they did is in the attributes and variables that are sent. They are not called
    again, with arguments that are not known here. Those of installed packages are: their registries are not sent.

    Args:
        metaclass: Its metaclass.
        name: Its name.
        bases: Its bases, `__orig_bases__` if it has them.
        attributes: Attributes with which it is made.
        tracker_id: The id that cloudpickle has given it.
        extra: Unused; of cloudpickle's signature.
    """
    impl = _cloudpickle()
    known = impl._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    if known is not None:
        return known
    resolved = types.resolve_bases(bases)
    if not _is_of_notebook(metaclass, "__prepare__", "__new__", "__init__") and not _hook_is_of_notebook(resolved):
        # a package's hook may require arguments or attributes
        with contextlib.suppress(Exception):
            return impl._make_skeleton_class(metaclass, name, bases, attributes, tracker_id, extra)
    namespace = {sys.intern(key): value for key, value in attributes.items()}
    if resolved is not bases:
        namespace["__orig_bases__"] = bases
    with _without_hooks(resolved):
        made = _beyond_notebook(metaclass, "__new__")(metaclass, name, resolved, namespace)
    _beyond_notebook(metaclass, "__init__")(made, name, resolved, namespace)
    return impl._lookup_class_or_track(tracker_id, made)


def _no_hook(cls: type, **kwargs: object) -> None:
    """Stand for `__init_subclass__` while a class is made that has been through it."""


@contextmanager
def _without_hooks(bases: Iterable[type]) -> Generator[None]:
    """Leave `__init_subclass__` of these bases out: `type.__new__` always calls it."""
    with contextlib.ExitStack() as stack:
        for owner in dict.fromkeys(base for each in bases for base in each.__mro__[:-1]):
            hook = vars(owner).get("__init_subclass__")
            # a type of an extension can't be changed
            with contextlib.suppress(TypeError):
                if hook is not None:
                    type.__setattr__(owner, "__init_subclass__", classmethod(_no_hook))
                    stack.callback(type.__setattr__, owner, "__init_subclass__", hook)
        yield


def _is_of_notebook(cls: type, *names: str) -> bool:
    """Whether a method of a class, with one of these names, is the notebook's."""
    return any(_is_notebooks_function(vars(base).get(name)) for base in cls.__mro__ for name in names)


def _hook_is_of_notebook(bases: Iterable[type]) -> bool:
    return any(_is_of_notebook(base, "__init_subclass__") for base in bases)


def _is_notebooks_function(found: object) -> bool:
    function = getattr(found, "__func__", found)
    return isinstance(function, types.FunctionType) and function.__globals__ is _namespace.get(None)


def _beyond_notebook(metaclass: type, name: str) -> Callable[..., Any]:
    """Return the metaclass's method that the notebook's own calls: that of `type`, or of a package's metaclass."""
    for base in metaclass.__mro__:
        found = vars(base).get(name)
        if found is not None and not _is_notebooks_function(found):
            return getattr(base, name)
    return getattr(type, name)


def find_or_make_class(make: Callable[..., type], *arguments: Any) -> type:
    """Return the class that this process sent under the tracker's id, or a new one."""
    known = _cloudpickle()._DYNAMIC_CLASS_TRACKER_BY_ID.get(arguments[-2])
    return make(*arguments) if known is None else known


def set_class_state(cls: type, state: Any) -> None:
    """Set the attributes of a returned class, unless this process has it already."""
    if cls not in known_classes:
        known_classes.add(cls)
        _cloudpickle()._class_setstate(cls, state)


def _cloudpickle() -> Any:
    return importlib.import_module("cloudpickle.cloudpickle")
