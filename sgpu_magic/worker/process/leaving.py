"""What a rank finishes after its cell, as Python does after a script and in Python's order.

    tasks            those of asyncio are cancelled, as `asyncio.run` does
    threads          executors are shut down, other threads that are not daemons are joined
    exit functions   those of `atexit`, which also run finalizers, join `multiprocessing`'s processes and queues, and
                     flush loggers
    objects          variables whose class has a finalizer are dropped, and open files are flushed

The zygote has exit functions and finalizers too, such as torch's; only what has been added since the fork counts. A
rank without any such work exits without the interpreter's own exit, which takes 0.4 s after an import of torch.

The names of what is unfinished are found by the helper thread while the main thread works.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import io
import logging
import logging.handlers
import multiprocessing.process
import multiprocessing.util
import os
import stat
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, cast

from sgpu_magic.system import processes
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.rank import Finishing, Remarked
from sgpu_magic.wire.rank_events import Unfinished, WorkKind
from sgpu_magic.worker.cell.event_loop import cancelled_note, cell_loop
from sgpu_magic.worker.process import terminal, user_code
from sgpu_magic.worker.process.position import Sampler

_REPORT_EVERY_S = 0.25
_MOST_NAMED = 20
_MOST_CHARS = 100
# modules whose exit functions call those of others
_CALLERS = ("weakref", "multiprocessing.util")
# modules whose exit functions and finalizers free what the end of the process frees anyway
_OURS = ("torch.", "sgpu_magic.")


class _Registered:
    """What was registered since the zygote's imports, except by torch, which registers when a part of it is imported.

    Attributes:
        exit_functions: Functions of `atexit`.
        newest_finalizer: The zygote's newest finalizer of `weakref`; None when it has none.
        pool_finalizers: Number of `multiprocessing`'s finalizers in the zygote.
    """

    def __init__(self) -> None:
        self.exit_functions: list[Callable[..., object]] = []
        self.newest_finalizer: object = None
        self.pool_finalizers = 0


_registered = _Registered()


def begin_to_count() -> None:
    """Record what is registered for the process's exit from now on. Called by the zygote after its imports.

    The zygote's finalizers are not run by ranks: those of torch's operator libraries would copy 28 MB. IPython's exit
    function is left out too, since it clears the namespace while threads may still use it.
    """
    forget_registered()
    register, unregister = atexit.register, atexit.unregister

    @functools.wraps(register)
    def registering(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        register(function, *args, **kwargs)
        if not _is_ours(function):
            _registered.exit_functions.append(function)
        return function

    @functools.wraps(unregister)
    def unregistering(function: Callable[..., Any]) -> None:
        unregister(function)
        _registered.exit_functions[:] = [each for each in _registered.exit_functions if each is not function]

    atexit.register, atexit.unregister = registering, unregistering


def forget_registered() -> None:
    """Leave the finalizers that there are to the zygote."""
    for made_here in list(_finalizers()):
        made_here.atexit = False
    _registered.newest_finalizer = next(reversed(_finalizers()), None)
    _registered.pool_finalizers = len(_pool_finalizers())


def finalizer_count() -> int:
    """Return how many finalizers are due at the process's exit, without torch's, which no rank runs."""
    return sum(made.atexit and not _is_ours(about.func) for made, about in list(_finalizers().items()))


def _is_ours(function: object) -> bool:
    module = getattr(function, "__module__", None)
    return isinstance(module, str) and module.startswith(_OURS)


def _finalizers() -> dict[Any, Any]:
    return vars(weakref.finalize)["_registry"]


def _pool_finalizers() -> dict[Any, object]:
    return vars(multiprocessing.util)["_finalizer_registry"]


class Leaving:
    """Finishes what this rank's cells have started.

    Args:
        namespace: The cells' namespace.
        sampler: Reads the main thread's stack.
        send: Sends a message to the agent.

    Attributes:
        is_done: Whether everything was finished.
    """

    def __init__(self, namespace: MutableMapping[str, Any], sampler: Sampler, send: Callable[[Record], None]) -> None:
        self._namespace = namespace
        self._sampler = sampler
        self._send = send
        self._kind: WorkKind | None = None
        self._reported: tuple[Unfinished, ...] = ()
        self._reported_at = 0.0
        self.is_done = False

    # ------------------------------------------------------------ pending work

    def has_work(self) -> bool:
        """Whether cells have started anything that Python would finish, or child processes. Takes about 0.2 ms."""
        return (
            bool(_registered.exit_functions)
            or len(_pool_finalizers()) > _registered.pool_finalizers
            or bool(cell_loop.tasks())
            or any(_running_threads())
            or any(_processes())
            or any(_new_finalizers())
            or any(_buffering_loggers())
            or any(self._with_finalizer())
            or any(_files_open_for_writing())
            or processes.has_children()
        )

    def _with_finalizer(self) -> Iterator[str]:
        """Yield the variables whose class has a finalizer: open files, archives, progress bars, the user's own."""
        for name, value in list(self._namespace.items()):
            # looked up on the class, since an instance may define any attribute dynamically
            kind = cast("type[object]", type(value))
            if kind is not type and hasattr(kind, "__del__"):
                yield name

    def unfinished(self) -> tuple[Unfinished, ...]:
        """Return what the main thread waits for now. May be called by any thread."""
        found: Iterable[Unfinished] = ()
        match self._kind:
            case WorkKind.TASK:
                found = (Unfinished(kind=WorkKind.TASK, name=_short(task.get_name())) for task in cell_loop.tasks())
            case WorkKind.THREAD:
                found = (Unfinished(kind=WorkKind.THREAD, name=_short(thread.name)) for thread in _running_threads())
            case WorkKind.EXIT_FUNCTION:
                found = [Unfinished(kind=WorkKind.PROCESS, name=_short(process.name)) for process in _processes()]
                if not found and (name := self._exit_function()):
                    found = (Unfinished(kind=WorkKind.EXIT_FUNCTION, name=_short(name)),)
            case WorkKind.OBJECT:
                found = (Unfinished(kind=WorkKind.OBJECT, name=_short(name)) for name in self._with_finalizer())
            case _:
                pass
        return tuple(found)[:_MOST_NAMED]

    def _exit_function(self) -> str:
        """Return the name of the exit function that runs, "" if none in Python does."""
        called = self._sampler.called_by(_run_exit_functions.__code__)
        named = [each for each in called if each[0] not in _CALLERS] or called
        if not named:
            return ""
        module, name = named[0]
        return name if module == "__main__" else f"{module}.{name}"

    # ------------------------------------------------------------ finishing pending work

    def announce(self) -> None:
        """Report, before the cell's end, that there is something to finish."""
        self._kind = WorkKind.THREAD
        self._report(self.unfinished())

    def tick(self) -> None:
        """Report what is unfinished, if that has changed. Called 20 times a second by the helper thread."""
        if self._kind is None or time.monotonic() - self._reported_at < _REPORT_EVERY_S:
            return
        work = self.unfinished()
        if work != self._reported:
            self._report(work)

    def _report(self, work: tuple[Unfinished, ...]) -> None:
        self._reported, self._reported_at = work, time.monotonic()
        self._send(Finishing(work=work))

    def finish(self) -> None:
        """Finish everything. An interrupt ends the current step, as it does in Python."""
        if self.is_done:
            return
        steps = (
            (WorkKind.TASK, self._cancel_tasks, asyncio),
            (WorkKind.THREAD, _join_threads, threading),
            (WorkKind.EXIT_FUNCTION, _run_exit_functions, atexit),
            (WorkKind.OBJECT, self._drop_objects, None),
        )
        for kind, step, module in steps:
            self._kind = kind
            _interruptible(step, module)
        self._kind = None
        self.is_done = True
        terminal.flush()
        # flush C's stdio buffers too
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).fflush(None)

    def _cancel_tasks(self) -> None:
        if names := cell_loop.finish():
            self._send(Remarked(text=cancelled_note(names)))

    def _drop_objects(self) -> None:
        """Drop the namespace's objects, as the interpreter does with those of `__main__`, and flush open files."""
        # hide errors of daemon threads that miss variables: at an interpreter's exit they would no longer run
        threading.excepthook = lambda _: None
        names = [name for name in self._namespace if not name.startswith("__")]
        for name in sorted(names, key=lambda name: not name.startswith("_")):
            self._namespace[name] = None
        gc.collect()
        if any(_files_open_for_writing()):
            _flush_files()


def _interruptible(step: Callable[[], None], module: object) -> None:
    """Make a step in which interrupts raise `KeyboardInterrupt`; it is shown and ends the step."""
    try:
        try:
            user_code.allow_interrupts()
            step()
        finally:
            user_code.refuse_interrupts()
    except BaseException as error:  # noqa: BLE001  shown as the interpreter does at its exit
        user_code.refuse_interrupts()
        with contextlib.suppress(Exception):
            sys.stderr.write(f"Exception ignored in: {module!r}\n")
            traceback.print_exception(error)


def _join_threads() -> None:
    # as the interpreter does at its exit
    vars(threading)["_shutdown"]()


def _run_exit_functions() -> None:
    for made, about in list(_finalizers().items()):
        made.atexit = made.atexit and not _is_ours(about.func)
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]


def _short(name: object) -> str:
    return user_code.encodable(f"{name}"[:_MOST_CHARS])


# ---------------------------------------------------------------- detection of pending work


def _new_finalizers() -> list[object]:
    """Return the finalizers of `weakref` that are due at exit, except the zygote's and torch's.

    The zygote's are not visited: counting a reference to each would copy their pages, 3 MB in each rank.
    """
    while True:
        found: list[object] = []
        try:
            for made, about in reversed(_finalizers().items()):
                if made is _registered.newest_finalizer:
                    break
                if about.atexit and not _is_ours(about.func):
                    found.append(made)
        except RuntimeError:
            # another thread has made or run one meanwhile
            continue
        return found


def _running_threads() -> Iterator[threading.Thread]:
    """Yield the threads that Python would wait for."""
    main = threading.main_thread()
    for thread in threading.enumerate():
        if thread is not main and not thread.daemon:
            yield thread


def _processes() -> Iterator[multiprocessing.process.BaseProcess]:
    """Yield the processes of `multiprocessing` that Python would wait for."""
    for process in list(vars(multiprocessing.process)["_children"]):
        with contextlib.suppress(AssertionError, ValueError):
            if not process.daemon and process.is_alive():
                yield process


def _buffering_loggers() -> Iterator[logging.Handler]:
    """Yield handlers that write at exit what they have collected."""
    for reference in list(vars(logging)["_handlerList"]):
        handler: object = reference()
        if isinstance(handler, logging.handlers.BufferingHandler) and handler.buffer:
            yield handler


def _files_open_for_writing() -> Iterator[int]:
    """Yield descriptors of files with a name that are open for writing. Their objects may have unwritten data."""
    try:
        descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            status = os.fstat(descriptor)
            has_name = stat.S_ISREG(status.st_mode) and status.st_nlink > 0
            if has_name and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                yield descriptor


def _flush_files() -> None:
    """Flush all open files, compressed ones and texts before the files that they write to."""
    files = [found for found in gc.get_objects() if isinstance(found, io.IOBase)]
    # classes of compressed files are written in Python, those of the underlying files in C
    for file in sorted(files, key=lambda file: (not isinstance(file, io.TextIOBase), type(file).__module__ == "_io")):
        with contextlib.suppress(Exception):
            if not file.closed and file.writable():
                file.flush()
