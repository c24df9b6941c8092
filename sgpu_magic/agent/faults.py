"""Limits an exception in a callback of the agent (a fault) to the run that the callback serves.

Callbacks, timers and tasks inherit the context in which they were scheduled (`contextvars`), and that context holds
the fault's handler: that of a run, a group of ranks, or one of a run's watches. A fault without a handler is logged.
Background work is a task of the loop, or a call in a daemon thread, for which the program does not wait when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

OnFault = Callable[[Exception], None]
P = ParamSpec("P")
T = TypeVar("T")

_charged: ContextVar[OnFault | None] = ContextVar("charged", default=None)
# the loop holds only weak references to its tasks
_tasks: set[asyncio.Task[Any]] = set()


@contextlib.contextmanager
def charging(who: OnFault | None) -> Generator[None]:
    """Report faults of everything that the block schedules to `who`; with None they are only logged.

    Exceptions that the block itself raises propagate.
    """
    token = _charged.set(who)
    try:
        yield
    finally:
        _charged.reset(token)


@contextlib.contextmanager
def guarded(who: OnFault | None) -> Generator[None]:
    """Like `charging`, but an exception ends the block and is reported to `who`."""
    with charging(who):
        try:
            yield
        except Exception as error:  # noqa: BLE001  one message's or one run's guard
            report(error)


def bound(call: Callable[P, None]) -> Callable[P, None]:
    """Return `call` bound to the current handler, for use as a callback in another context."""
    who = _charged.get()

    def guarded_call(*args: P.args, **kwargs: P.kwargs) -> None:
        with guarded(who):
            call(*args, **kwargs)

    return guarded_call


def charged() -> OnFault | None:
    """Return the handler for faults of the current context."""
    return _charged.get()


def report(error: BaseException) -> None:
    """Log a fault and pass it to the current handler."""
    loop = asyncio.get_running_loop()
    loop.call_exception_handler({"message": "A bug in sgpu-magic, in the agent", "exception": error})


def in_background(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task; an exception in it is reported at once."""
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_on_task_done)
    return task


def _on_task_done(task: asyncio.Task[Any]) -> None:
    _tasks.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        report(error)


def call_in_background(call: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Make a call that may block forever, in its own daemon thread.

    asyncio's executor waits for its threads when the loop ends, so a driver that hangs would keep the agent alive.

    Args:
        call: The call to make.
        name: The thread's name.

    Returns:
        A future of the running loop with the call's result or exception.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            settle = functools.partial(future.set_result, call())
        except BaseException as error:  # noqa: BLE001  the thread's top level: the future gets the exception
            settle = functools.partial(future.set_exception, error)
        # at exit the loop may already be closed
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: future.cancelled() or settle())

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


def handle_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle an exception of the loop: log it and pass it to the context's handler."""
    loop.default_exception_handler(context)
    error, handle = context.get("exception"), context.get("handle")
    if not isinstance(error, Exception) or "future" in context or "task" in context:
        # reported by the garbage collector in an arbitrary context
        return
    # Python 3.12 calls this in the callback's context, 3.11 does not
    of_callback = getattr(handle, "_context", None)
    who = _charged.get() if of_callback is None else of_callback.get(_charged)
    if who is None:
        return
    try:
        who(error)
    except Exception as second:  # noqa: BLE001  the handler's own guard
        loop.default_exception_handler({"message": "A fault of a run could not be charged to it", "exception": second})
