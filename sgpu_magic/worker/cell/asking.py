"""Calls methods of the user's objects, such as an exception's `__str__`, so that nothing they do ends the rank.

They may raise, exit or loop; then a default takes the place of their result.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import types
from collections.abc import Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")


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
    """Whether a call is in progress, whether it was interrupted, and how many calls have failed."""

    def __init__(self) -> None:
        self.now = False
        self.interrupted = False
        self.refused = 0


_state = _Asking()


def ask(function: Callable[..., T], *arguments: Any, default: T) -> T:
    """Call the user's code and return its result, or `default` if it raises, exits or is interrupted.

    After an interrupt, further calls return their `default` at once.
    """
    if _state.interrupted:
        _state.refused += 1
        return default
    _state.now = True
    try:
        return function(*arguments)
    except BaseException:  # noqa: BLE001  whatever it is, it is not the cell's failure
        _state.refused += 1
        return default
    finally:
        _state.now = False


def is_asking() -> bool:
    """Whether this is the main thread and a call by `ask` is in progress."""
    return _state.now and threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def interruptible() -> Generator[None]:
    """While an exception is described, let an interrupt end only the user's code that is called for it.

    A rank that is released from a collective is interrupted next, and must still report its error.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state.interrupted = False
    previous = signal.signal(signal.SIGINT, _interrupt_the_asked)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _interrupt_the_asked(signum: int, frame: types.FrameType | None) -> None:
    if _state.now:
        _state.interrupted = True
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


def begin() -> None:
    """Reset the count of `refused`."""
    _state.refused = 0


def refused() -> int:
    """Return the number of calls since `begin` that gave no result of their own."""
    return _state.refused
