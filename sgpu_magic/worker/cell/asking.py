"""Asking the user's objects about themselves, as an exception for its text: nothing that they do ends the rank.

Such a question runs code that may raise, exit or loop. What it does costs at most its own answer.
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
    """Read an attribute of `owner`'s own: no class below it can put code in the way."""
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
    """Whether the user's code is being asked, what it has refused, and whether the user wants it to end."""

    def __init__(self) -> None:
        self.now = False
        self.interrupted = False
        self.refused = 0


_state = _Asking()


def ask(function: Callable[..., T], *arguments: Any, default: T) -> T:
    """Return what the user's code answers, `default` where it raises or exits, or an interrupt ends its loop."""
    if _state.interrupted:
        _state.refused += 1
        return default
    _state.now = True
    try:
        return function(*arguments)
    except BaseException:  # noqa: BLE001  whatever it is, it is no failure of the cell's
        _state.refused += 1
        return default
    finally:
        _state.now = False


def is_asking() -> bool:
    """Whether this thread is within the user's code that describes an exception."""
    return _state.now and threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def interruptible() -> Generator[None]:
    """While an exception is described, an interrupt ends only what the user's code does there.

    A rank that is released from a collective is interrupted next, and its error must be reported all the same.
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
    """Whether this is `sys.exit()` without a code that says failure."""
    if not issubclass(type(error), SystemExit):
        return False
    code = _code_of(error)
    return code is None or (type(code) in (int, bool) and code == 0)


def is_a(error: BaseException, *kinds: type[BaseException]) -> bool:
    """`isinstance` by the object's real type: to ask an object for its class may run the user's code."""
    return issubclass(type(error), kinds)


def text_of(value: object) -> str | None:
    """The characters of a string of any class, None where it is none."""
    return str.__str__(value) if issubclass(type(value), str) else None  # pyright: ignore[reportArgumentType]


def encodable(text: str) -> str:
    """The text with surrogates written out: no message can carry them."""
    return text.encode("utf-8", "backslashreplace").decode()


def begin() -> None:
    """Count anew what is refused."""
    _state.refused = 0


def refused() -> int:
    """How often since `begin` an answer was refused."""
    return _state.refused
