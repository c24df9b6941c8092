"""Describes a cell's failure on its rank: traceback, line of the cell, memory use."""

# torch and IPython are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import gc
import os
import re
import socket
import time
import traceback
import types
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from sgpu_magic.errors import EnvironmentFailed, SerializationError
from sgpu_magic.system.processes import memory_available_bytes
from sgpu_magic.wire.base import FailureKind
from sgpu_magic.wire.rank_events import Failure, RankMemory, TensorUse
from sgpu_magic.worker.cell import failures
from sgpu_magic.worker.cell.collective_errors import find_collective_error, is_raised_by_c
from sgpu_magic.worker.cell.failures import with_earlier
from sgpu_magic.worker.cell.shell import RankShell
from sgpu_magic.worker.process import user_code
from sgpu_magic.worker.process.user_code import is_a

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LARGEST = 8
_PATH_CHARS = 1000
# maximum number of items examined in one list or dictionary
_MOST_ITEMS = 1000
_CPU_REFUSED = "DefaultCPUAllocator: can't allocate memory"
_MODULE_LEVEL = "<module>"
_COLOUR = r"(?:\x1b\[[\d;]*m)*"
# the first line of a cell in a traceback
_MAGIC_LINE = re.compile(rf"(?m)^({_COLOUR} *{_COLOUR}1{_COLOUR} +{_COLOUR})# (%%(?:distributed|rank|ray_launch)\b)")
_TENSOR_PROBLEMS = (RuntimeError, NotImplementedError, AttributeError, ValueError)


def describe(error: BaseException, shell: RankShell, rank: int) -> Failure:
    """Describe a cell's failure: IPython's traceback, the line of the cell, the torch function that the rank was in.

    The description of a failed allocation has the largest tensors, that of a rank stopped by the user or by a peer's
    failure its memory use.
    """
    described = shell.failure
    if described is None or described.error is not error:
        described = shell.failure = failures.inspect_error(error, shell.whole)
    message = described.message
    is_released = shell.released.is_set()
    # a rank is interrupted after its release, on top of the error for a lost peer
    collective_error = find_collective_error(error, is_released=is_released)
    if is_released and is_a(error, dist.DistStoreError) and collective_error is error:
        # torch's own text names the file of the store, which `file_stores.revoke` has made unreadable
        message = "released while it waited for a peer that did not join"
    # as in the notebook; the rank compiled the magic's line as a comment
    ansi = _MAGIC_LINE.sub(r"\1\2", "\n".join(described.lines))
    text = shell.whole.cut(_ANSI.sub("", ansi), failures.TRACEBACK_CHARS, "traceback")
    kind = FailureKind.USER_CODE
    if user_code.is_a(error, SerializationError):
        kind = FailureKind.SERIALIZATION
    elif user_code.is_a(error, EnvironmentFailed):
        kind = FailureKind.ENVIRONMENT
    entry = user_code.traceback_of(error)
    line, where = position_in_cell(entry, shell)
    if line is None:
        line, _ = position_in_cell(shell.unwound, shell)
    out_of_memory = is_a(error, MemoryError, torch.cuda.OutOfMemoryError) or (
        is_a(error, RuntimeError) and is_raised_by_c(error) and _CPU_REFUSED in message
    )
    if collective_error is not None and collective_error is not error:
        # if that came after the cell's last line, only the error has the cell's frames
        released_line, released_where = position_in_cell(user_code.traceback_of(collective_error), shell)
        line = released_line if line is None else line
        where = released_where or where
    is_consequence = collective_error is not None
    held: RankMemory | None = None
    if out_of_memory:
        held = measure_memory(error, entry, shell)
    elif is_consequence or is_released or user_code.is_a(error, KeyboardInterrupt):
        held = measure("cuda" if torch.cuda.is_initialized() else "cpu")
    return Failure(
        kind=kind,
        message=message,
        rank=rank,
        host=socket.gethostname(),
        at=shell.failed_at or time.time(),
        type_name=described.type_name,
        traceback_text=text,
        traceback_ansi=shell.whole.cut(ansi, failures.ANSI_CHARS, ""),
        line=line,
        where=where,
        is_consequence=is_consequence,
        out_of_memory=out_of_memory,
        memory=held,
        missing_module=_missing_module(error),
        missing_file=_missing_file(error),
    )


def _missing_module(error: BaseException) -> str:
    if not is_a(error, ModuleNotFoundError):
        return ""
    return user_code.text_of(user_code.slot(ImportError, "name")(error)) or ""


def _missing_file(error: BaseException) -> str:
    """Return the path that the error, or one before it, did not find."""
    errors = (each for each in with_earlier(error) if is_a(each, FileNotFoundError))
    names = (user_code.text_of(user_code.slot(OSError, "filename")(each)) for each in errors)
    path = next(filter(None, names), "")
    with contextlib.suppress(OSError):
        if path.startswith(f"{os.getcwd()}{os.sep}"):
            path = os.path.relpath(path)
    return user_code.encodable(path[:_PATH_CHARS])


def position_in_cell(entry: types.TracebackType | None, shell: RankShell) -> tuple[int | None, str]:
    """Return the innermost line of a notebook cell on the stack, and the torch function called from there."""
    line: int | None = None
    where = ""
    cells = shell.compile._filename_map  # pyright: ignore[reportPrivateUsage]
    for frame, at in traceback.walk_tb(entry):
        code = frame.f_code
        if code.co_filename in cells:
            line, where = at, ""
        elif not where and f"{os.sep}torch{os.sep}" in code.co_filename and code.co_name != "wrapper":
            where = code.co_name.strip("_")
    return line, where


def measure(device: str) -> RankMemory | None:
    """Return the used and free memory, None if the device does not answer. Cheap.

    Args:
        device: `cuda`, or `cpu`.
    """
    if device == "cuda" and torch.cuda.is_initialized():
        # a GPU whose last kernel failed answers no more queries
        with contextlib.suppress(RuntimeError):
            free, total = torch.cuda.mem_get_info()
            return RankMemory(
                device=f"cuda:{torch.cuda.current_device()}",
                used_bytes=torch.cuda.memory_allocated(),
                reserved_bytes=torch.cuda.memory_reserved(),
                free_bytes=free,
                total_bytes=total,
            )
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * page
        total = os.sysconf("SC_PHYS_PAGES") * page
        return RankMemory(device="cpu", used_bytes=resident, free_bytes=memory_available_bytes(), total_bytes=total)
    return None


def measure_memory(error: BaseException, entry: types.TracebackType | None, shell: RankShell) -> RankMemory | None:
    """Return the memory use with the largest tensors. To be called before the error's frames are freed.

    Args:
        error: The failed allocation.
        entry: Its traceback.
        shell: The rank's shell, whose namespace names the tensors.
    """
    device = "cuda" if is_a(error, torch.cuda.OutOfMemoryError) else "cpu"
    found = measure(device)
    if found is None:
        return None
    # without enough memory for the list, the totals are returned alone
    with contextlib.suppress(MemoryError):
        return msgspec.structs.replace(found, largest=_largest(device, _names(entry, shell)))
    return found


def _largest(device: str, names: dict[int, str]) -> tuple[TensorUse, ...]:
    """Return the tensors with the largest storages. Of tensors that share one, a named one is preferred."""
    by_storage: dict[int, TensorUse] = {}
    for found in gc.get_objects():
        # by type: `isinstance` may run the user's code
        if not issubclass(type(found), torch.Tensor):
            continue
        with contextlib.suppress(*_TENSOR_PROBLEMS):
            if found.device.type != device:
                continue
            storage = found.untyped_storage()
            size, address = storage.nbytes(), storage.data_ptr()
            known = by_storage.get(address)
            name = names.get(id(found), "")
            if size == 0 or (known is not None and (known.name or not name)):
                continue
            by_storage[address] = TensorUse(
                name=name,
                shape=tuple(found.shape),
                dtype=str(found.dtype).removeprefix("torch."),
                device=str(found.device),
                size_bytes=size,
            )
    ordered = sorted(by_storage.values(), key=lambda use: use.size_bytes, reverse=True)
    return tuple(ordered[:_LARGEST])


def _names(entry: types.TracebackType | None, shell: RankShell) -> dict[int, str]:
    """Return names by id for tensors reachable from the notebook's names or from locals of the failed frames."""
    names: dict[int, str] = {}
    # IPython's own names of values come last
    namespace: dict[str, Any] = shell.user_ns
    for name in sorted(namespace, key=lambda name: name.startswith("_")):
        value = namespace[name]
        for way, tensor in _tensors_of(name, value):
            names.setdefault(id(tensor), way)
    for frame, line in traceback.walk_tb(entry):
        if frame.f_locals is shell.user_ns or frame.f_code.co_name == _MODULE_LEVEL:
            continue
        for name, value in frame.f_locals.items():
            for way, tensor in _tensors_of(name, value):
                names.setdefault(id(tensor), f"{way} (in {frame.f_code.co_name}, line {line})")
    return names


def _tensors_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        yield from _tensor(name, value)
    elif issubclass(kind, torch.nn.Module):
        for parts in (value.named_parameters(), value.named_buffers()):
            for path, part in parts:
                yield from _tensor(f"{name}.{path}", part)
    elif issubclass(kind, torch.optim.Optimizer):
        for state in value.state.values():
            for key, part in state.items():
                if isinstance(part, torch.Tensor):
                    yield f"{name}'s {key}", part
    elif kind in (list, tuple, dict):
        parts: Any = value.items() if kind is dict else enumerate(value)
        for key, part in list(islice(parts, _MOST_ITEMS)):
            if isinstance(key, str | int) and issubclass(type(part), torch.Tensor):
                yield from _tensor(f"{name}[{key!r}]", part)


def _tensor(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    parts = {name: tensor}
    if tensor.is_leaf and tensor.grad is not None:
        parts[f"{name}.grad"] = tensor.grad
    for way, part in parts.items():
        yield way, part
        # a sharded tensor wraps its local part
        local = getattr(part, "_local_tensor", None)
        if isinstance(local, torch.Tensor):
            yield way, local


def free() -> None:
    """Free uncollected garbage and torch's cached GPU memory."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
