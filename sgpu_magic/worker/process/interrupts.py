"""When a rank hears an interrupt: while it prepares or runs a cell, and at no other time."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType


class _Early:
    """An interrupt that came before its cell could be interrupted.

    Attributes:
        came: There is one.
        is_order_waiting: Where to look whether a cell is on its way.
        refusals: Counts the calls of `refuse`: what began before one has no say after it.
    """

    def __init__(self) -> None:
        self.came = False
        self.is_order_waiting: Callable[[], bool] | None = None
        self.refusals = 0


_early = _Early()


def look_for_orders(is_order_waiting: Callable[[], bool]) -> None:
    """Say how to see whether an order has been sent that the main thread has not taken yet."""
    _early.is_order_waiting = is_order_waiting


def _refuse(signum: int, frame: FrameType | None) -> None:
    """A handler and not `SIG_IGN`, which programs that the rank starts would inherit for good."""
    if _early.is_order_waiting is not None and _early.is_order_waiting():
        _early.came = True


def _remember(signum: int, frame: FrameType | None) -> None:
    _early.came = True


def refuse() -> None:
    """From now on an interrupt does nothing, unless a cell is on its way: then it is that cell's.

    One that arrives on the way here does nothing either.
    """
    _early.refusals += 1
    while True:
        try:
            signal.signal(signal.SIGINT, _refuse)
        except KeyboardInterrupt:
            continue
        return


def forget() -> None:
    """The cell is over, and what came after its end was meant for it."""
    _early.came = False


def allow() -> None:
    """From now on an interrupt raises `KeyboardInterrupt` in the main thread.

    By Python's own handler: `asyncio.run` puts its own in the place of that one alone.

    Raises:
        KeyboardInterrupt: One came while the cell was on its way.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    came, _early.came = _early.came, False
    if came:
        raise KeyboardInterrupt


@contextlib.contextmanager
def held() -> Generator[None]:
    """Keep an interrupt for later within code that would swallow it, as IPython does around the user's code.

    Raises:
        KeyboardInterrupt: At the end, if one came.
    """
    if not _is_handled_by(signal.default_int_handler):
        yield
        return
    refusals = _early.refusals
    _hold()
    try:
        yield
    finally:
        if refusals == _early.refusals:
            allow()


@contextlib.contextmanager
def raised() -> Generator[None]:
    """Within `held`: let the user's code be interrupted.

    Raises:
        KeyboardInterrupt: At the beginning, if one came before.
    """
    if not _is_handled_by(_remember):
        yield
        return
    refusals = _early.refusals
    try:
        allow()
        yield
    finally:
        # a coroutine that was abandoned may end within a later cell
        if refusals == _early.refusals:
            _hold()


def _is_handled_by(handler: Callable[[int, FrameType | None], None]) -> bool:
    return threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is handler


def _hold() -> None:
    try:
        signal.signal(signal.SIGINT, _remember)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, _remember)
        _early.came = True
