"""How a rank treats the user's code: when an interrupt reaches it, and calls of it that must not end the rank.

An interrupt is accepted only while the rank prepares or runs a cell.

Methods of the user's objects, such as an exception's `__str__`, may raise, exit or loop; the rank then uses a default
instead of their result.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import signal
import threading
import types
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


class _Early:
    """An interrupt that arrived before its cell could be interrupted.

    Attributes:
        came: Whether there is one.
        is_order_waiting: Tells whether an order was sent that the main thread has not finished.
        refusals: Number of calls of `refuse_interrupts`; blocks of `interrupts_held` and `interrupts_raised` that were
            entered before it leave the handler alone.
    """

    def __init__(self) -> None:
        self.came = False
        self.is_order_waiting: Callable[[], bool] = lambda: False
        self.refusals = 0


early = _Early()


def _refuse(signum: int, frame: FrameType | None) -> None:
    """Handle an interrupt between cells. Programs that the rank starts would inherit `SIG_IGN`."""
    if early.is_order_waiting():
        early.came = True


def _remember(signum: int, frame: FrameType | None) -> None:
    early.came = True


def refuse_interrupts() -> None:
    """Ignore interrupts from now on; one that arrives while an order is waiting is kept for its cell.

    An interrupt that arrives during this call is ignored too.
    """
    early.refusals += 1
    while True:
        try:
            signal.signal(signal.SIGINT, _refuse)
        except KeyboardInterrupt:
            continue
        return


def allow_interrupts() -> None:
    """Let interrupts raise `KeyboardInterrupt` in the main thread from now on.

    Uses Python's default handler, the only one that `asyncio.run` replaces with its own.

    Raises:
        KeyboardInterrupt: An interrupt arrived before this call and was kept for this cell.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    came, early.came = early.came, False
    if came:
        raise KeyboardInterrupt


def interrupts_held() -> AbstractContextManager[None]:
    """Defer interrupts in a block that would swallow them, as IPython's code around the user's does.

    Raises:
        KeyboardInterrupt: At the end of the block, if an interrupt arrived.
    """
    return _switched(signal.default_int_handler, _hold, allow_interrupts)


def interrupts_raised() -> AbstractContextManager[None]:
    """Within `interrupts_held`, let the user's code be interrupted.

    Raises:
        KeyboardInterrupt: At the beginning of the block, if an interrupt arrived before it.
    """
    return _switched(_remember, allow_interrupts, _hold)


@contextlib.contextmanager
def _switched(
    handler: Callable[[int, FrameType | None], None], begin: Callable[[], None], end: Callable[[], None]
) -> Generator[None]:
    """Call `begin` before and `end` after the block, if this is the main thread and it has this handler."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not handler:
        yield
        return
    refusals = early.refusals
    try:
        begin()
        yield
    finally:
        # an abandoned coroutine may end within a later cell
        if refusals == early.refusals:
            end()


def _hold() -> None:
    try:
        signal.signal(signal.SIGINT, _remember)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, _remember)
        early.came = True


# ---------------------------------------------------------------- calls


def slot(owner: type, name: str) -> Callable[[Any], Any]:
    """Return a getter of an attribute that `owner` itself defines, which subclasses can't override."""
    return owner.__dict__[name].__get__


traceback_of: Callable[[BaseException], types.TracebackType | None] = slot(BaseException, "__traceback__")
cause_of = slot(BaseException, "__cause__")
context_of = slot(BaseException, "__context__")
suppresses_context = slot(BaseException, "__suppress_context__")
grouped_by = slot(BaseExceptionGroup, "exceptions")
_code_of = slot(SystemExit, "code")
name_of = slot(type, "__name__")
qualname_of = slot(type, "__qualname__")
module_of = slot(type, "__module__")


class _Asking:
    """The calls by `ask`.

    Attributes:
        now: Whether one is in progress.
        interrupted: Whether one was interrupted.
        refused: Number of calls that gave no result of their own; whoever describes an exception resets it.
    """

    def __init__(self) -> None:
        self.now = False
        self.interrupted = False
        self.refused = 0


asking = _Asking()


def ask(function: Callable[..., T], *arguments: Any, default: T) -> T:
    """Call the user's code and return its result, or `default` if it raises, exits or is interrupted.

    After an interrupt, further calls return their `default` at once.
    """
    if asking.interrupted:
        asking.refused += 1
        return default
    asking.now = True
    try:
        return function(*arguments)
    except BaseException:  # noqa: BLE001  whatever it is, it is not the cell's failure
        asking.refused += 1
        return default
    finally:
        asking.now = False


def is_asking() -> bool:
    """Whether this is the main thread and a call by `ask` is in progress."""
    return asking.now and threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def interruptible() -> Generator[None]:
    """While an exception is described, let an interrupt end only the user's code that is called for it.

    A rank that is released from a collective is interrupted next, and must still report its error.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asking.interrupted = False
    previous = signal.signal(signal.SIGINT, _interrupt_the_asked)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _interrupt_the_asked(signum: int, frame: FrameType | None) -> None:
    if asking.now:
        asking.interrupted = True
        raise KeyboardInterrupt


def is_exit(error: BaseException) -> bool:
    """Whether this is `sys.exit()` with a code that means success."""
    if not issubclass(type(error), SystemExit):
        return False
    code = _code_of(error)
    return code is None or (type(code) in (int, bool) and code == 0)


def is_a(error: BaseException, *kinds: type[BaseException]) -> bool:
    """`isinstance` by the object's real type: `isinstance` itself may run the user's code."""
    return issubclass(type(error), kinds)


def text_of(value: object) -> str | None:
    """Return a `str` of the characters of a string of any subclass, None for other objects."""
    return str.__str__(value) if issubclass(type(value), str) else None  # pyright: ignore[reportArgumentType]


def encodable(text: str) -> str:
    """Return the text with surrogates escaped, which UTF-8 can't encode."""
    return text.encode("utf-8", "backslashreplace").decode()


# ---------------------------------------------------------------- calls from other threads

_waiting: list[Callable[[], None]] = []


def in_main_thread(call: Callable[[], None]) -> None:
    """Let the main thread call `call` between two of its bytecode instructions.

    A profiler must be stopped in the thread that started it, and a signal would interrupt the cell's system calls.
    """
    _waiting.append(call)
    ctypes.pythonapi.Py_AddPendingCall(_call_waiting(), None)


@functools.cache
def _call_waiting() -> Any:
    # created in the rank that needs it: all forks would share the memory of a callback created in the zygote
    @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    def call_waiting(_: object) -> int:
        while _waiting:
            _waiting.pop()()
        return 0

    return call_waiting
