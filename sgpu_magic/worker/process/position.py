"""Where a rank is: its stack, readable from outside and after its death, and the collective that it is in.

The agent reads the stack from a file (see `wire.codec`):

faulthandler    writes to it when C code crashes, and on `STACK_SIGNAL`, also while C code holds the interpreter
Sampler         keeps the main thread's last stack in it, for deaths by SIGKILL and `os._exit`

The collective is read from torch's flight recorder. Newer versions of torch (seen with 2.13) record gloo and NCCL;
earlier ones record NCCL only, under another name. A torch without a recorder gives no answer. torch reads the buffer's
size when it makes the first process group. With 2,000 entries, an all_reduce of one number over gloo takes as long as
without a recorder: the smallest of 80 means of 300 calls was 117 us with and 122 us without.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import mmap
import os
import signal
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any, NoReturn

import msgspec

from sgpu_magic.wire.codec import AREA_BYTES, HEADER, LENGTH, STACK_SIGNAL, TEXT_BYTES, half_offset
from sgpu_magic.wire.decoding import JsonDecoder
from sgpu_magic.wire.rank_events import Collective
from sgpu_magic.worker.process import user_code

_MAX_FRAMES = 200
# frames kept of a deep stack: the innermost ones, and above them only those of notebook cells
_INNERMOST = 24
_CELL = "<ipython-input-"
# Python 3.11 may collect garbage within `f_back`, while it creates the object of another thread's frame. Finalizers may
# then release the GIL: that thread leaves the frame, the frame's memory is reused, and the object refers to arbitrary
# memory. Newer versions collect only between two bytecode instructions.
_COLLECTS_WITHIN_CALLS = sys.version_info < (3, 12)
script = ""
"""The path of the running script, "" for none. Its frames of a deep stack are kept like those of cells."""

_BUFFER_ENTRIES = "2000"
_EVERY_BACKEND = "_dump_fr_trace_json"
# the function, newest first, and the variable that it reads
_SIZES = {_EVERY_BACKEND: "TORCH_FR_BUFFER_SIZE", "_dump_nccl_trace_json": "TORCH_NCCL_TRACE_BUFFER_SIZE"}
# beginning of the names of collectives that the calling thread waits for; NCCL's are queued on a stream
_ON_CPU = ("gloo:", "mpi:")


def install_stack_file(descriptor: int) -> Sampler:
    """Let faulthandler write to the stack file from now on, and return the sampler that writes to its area.

    Args:
        descriptor: The stack file, positioned after the area. Kept open.
    """
    faulthandler.enable(file=descriptor, all_threads=True)
    # one thread: the system delivers a process's signal to its main thread, and reading the other threads' stacks
    # while they run is not safe. No chain: it would end in the default action, which ends the process.
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=False, chain=False)
    # a child process's crash report belongs to the rank's output, not to the rank's own stack
    os.register_at_fork(after_in_child=_crash_to_stderr)
    sampler = Sampler(descriptor)
    _sample_before_exit(sampler)
    return sampler


def _sample_before_exit(sampler: Sampler) -> None:
    """Sample the stack in `os._exit`, else the last sample would show an earlier line.

    Called while an exception is being described, `os._exit` raises `SystemExit` instead: the rank must not end there.
    """
    leave, rank = os._exit, os.getpid()

    @functools.wraps(leave)
    def _exit(status: int) -> NoReturn:
        if os.getpid() == rank and threading.current_thread() is threading.main_thread():
            if user_code.is_asking():
                raise SystemExit(status)
            sampler.sample()
        leave(status)

    os._exit = _exit


def _crash_to_stderr() -> None:
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.unregister(STACK_SIGNAL)
        signal.signal(STACK_SIGNAL, signal.SIG_DFL)
        faulthandler.enable(file=2, all_threads=True)


class Sampler:
    """Writes the main thread's stack into the file's area when it has changed.

    A call takes 3 us for 20 frames when nothing has changed and 11 us when something has; for 200 frames 40 and
    100 us. That is 0.02 to 0.2 % of a core at 20 calls a second. It makes no system call.

    Args:
        descriptor: The stack file.
    """

    def __init__(self, descriptor: int) -> None:
        self._area = mmap.mmap(descriptor, AREA_BYTES)
        self._main = threading.main_thread().ident or 0
        self._half = 0
        self._seen: list[tuple[int, int]] = []
        # whether `sample` has garbage collection disabled
        self._collects = False
        # another thread may fork while collection is disabled
        os.register_at_fork(after_in_child=self._collect_again)
        HEADER.pack_into(self._area, 0, self._main, 0, 0.0)

    def sample(self) -> None:
        """Record the main thread's stack. May be called by any thread."""
        self._collects = _COLLECTS_WITHIN_CALLS and gc.isenabled()
        if self._collects:
            gc.disable()
        try:
            frames, seen = self._sample()
        finally:
            self._collect_again()
        if seen == self._seen:
            HEADER.pack_into(self._area, 0, self._main, self._half, time.time())
            return
        self._seen = seen
        self._write("".join(_lines(frames)).encode("utf-8", "backslashreplace")[:TEXT_BYTES])

    def called_by(self, code: CodeType) -> list[tuple[str, str]]:
        """Return the module and name of the functions that the main thread runs in a call by `code`, outermost first.

        May be called by any thread.
        """
        self._collects = _COLLECTS_WITHIN_CALLS and gc.isenabled()
        if self._collects:
            gc.disable()
        try:
            frame = sys._current_frames().get(self._main)  # pyright: ignore[reportPrivateUsage]
            found: list[tuple[str, str]] = []
            while frame is not None and frame.f_code is not code:
                found.append((str(frame.f_globals.get("__name__", "")), frame.f_code.co_qualname))
                frame = frame.f_back
            return found[::-1] if frame is not None else []
        finally:
            self._collect_again()

    def _sample(self) -> tuple[list[FrameType], list[tuple[int, int]]]:
        frame = sys._current_frames().get(self._main)  # pyright: ignore[reportPrivateUsage]
        frames: list[FrameType] = []
        seen: list[tuple[int, int]] = []
        while frame is not None and frame.f_code.co_filename == __file__:
            # `sample` and `_exit` themselves
            frame = frame.f_back
        while frame is not None and len(frames) < _MAX_FRAMES:
            frames.append(frame)
            seen.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        return frames, seen

    def _collect_again(self) -> None:
        if self._collects:
            self._collects = False
            gc.enable()

    def _write(self, text: bytes) -> None:
        half = 2 if self._half == 1 else 1
        begin = half_offset(half)
        LENGTH.pack_into(self._area, begin, len(text))
        begin += LENGTH.size
        self._area[begin : begin + len(text)] = text
        HEADER.pack_into(self._area, 0, self._main, half, time.time())
        self._half = half


def _lines(frames: list[FrameType]) -> list[str]:
    lines: list[str] = []
    for number, frame in enumerate(frames):
        code = frame.f_code
        if number < _INNERMOST or code.co_filename == script or code.co_filename.startswith(_CELL):
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno or 0} in {code.co_name}\n')
    return lines


# ---------------------------------------------------------------- torch's flight recorder


class _Entry(msgspec.Struct):
    """The fields of an entry that are read here. Some versions lack some of them, so all have defaults."""

    profiling_name: str = ""
    state: str = ""
    collective_seq_id: int = 0
    p2p_seq_id: int = 0
    is_p2p: bool = False
    retired: bool = False
    pg_id: int = 0
    process_group: tuple[str, ...] = ()
    time_created_ns: int = 0


class _Trace(msgspec.Struct):
    entries: list[_Entry] = msgspec.field(default_factory=list[_Entry])


_decoder = JsonDecoder(_Trace)
# older entries are ignored
_since_ns = 0


@functools.cache
def _recorder() -> tuple[Any, str]:
    """Return torch's module, and the name of its function that returns the entries, "" if it has none."""
    # imported here because the stack file works without torch
    import torch._C._distributed_c10d as module

    return module, next((name for name in _SIZES if hasattr(module, name)), "")


def record_collectives() -> None:
    """Switch the recorder on, unless the user has set its size. To be called before the first process group is made.

    torch 2.13 records 2,000 entries by default; earlier versions may not. A version that knows the newer variable warns
    about the older one.
    """
    _, dump = _recorder()
    if dump and not any(name in os.environ for name in _SIZES.values()):
        os.environ[_SIZES[dump]] = _BUFFER_ENTRIES


def records_every_backend() -> bool:
    """Whether torch records the collectives of all backends; earlier versions record NCCL's only."""
    return _recorder()[1] == _EVERY_BACKEND


def current_collective(rehearsed: int = 0) -> tuple[Collective | None, float]:
    """Return the collective that this rank is in, else its last one, and when it was called.

    The time is in seconds since the epoch. Returns None and 0.0 if no collective is recorded.

    Takes 30 ms with a full recorder and waits for no collective. May be called by any thread.

    Args:
        rehearsed: Number of collectives at the beginning of the default group that were not the user's.
    """
    # collectives from before a renewal are over, even those that the recorder has as pending
    if _since_ns:
        rehearsed = 0
    # no recorder, one that is switched off, or an unknown format
    with contextlib.suppress(AttributeError, RuntimeError, msgspec.DecodeError):
        module, dump = _recorder()
        return newest_collective(getattr(module, dump)(), rehearsed, _since_ns)
    return None, 0.0


def forget_collectives() -> None:
    """Ignore the entries recorded so far. Called after a renewal, after which the numbers begin again."""
    global _since_ns
    _since_ns = time.time_ns()


def newest_collective(trace: bytes | str, rehearsed: int = 0, since_ns: int = 0) -> tuple[Collective | None, float]:
    """Return the first unfinished collective of the trace, else the last one, and when it was called.

    NCCL's collectives are queued: the rank waits in the first unfinished one.
    """
    entries = [entry for entry in _decoder.decode(trace).entries if entry.time_created_ns >= since_ns]
    theirs = [entry for entry in entries if entry.pg_id or entry.is_p2p or entry.collective_seq_id > rehearsed]
    if not theirs:
        return None, 0.0
    entry = next((entry for entry in theirs if _is_pending(entry)), theirs[-1])
    number = entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id
    if entry.pg_id == 0 and not entry.is_p2p:
        number -= rehearsed
    found = Collective(
        name=entry.profiling_name.rpartition(":")[2].split(" ")[0],
        seq=number,
        pending=_is_pending(entry),
        group=_group_name(entry),
        queued=not entry.profiling_name.startswith(_ON_CPU),
    )
    return found, entry.time_created_ns / 1e9


def _is_pending(entry: _Entry) -> bool:
    return not entry.retired and entry.state != "completed"


def _group_name(entry: _Entry) -> str:
    """Return the group's description if the user gave one, else its number; "" for the default group."""
    name, description = (*entry.process_group, "", "")[:2]
    if description == "default_pg" or name in ("", "0"):
        return ""
    return description if description not in ("", "undefined") else name
