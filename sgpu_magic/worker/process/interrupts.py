"""When a rank accepts an interrupt: only while it prepares or runs a cell."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType


class _Early:
    """An interrupt that arrived before its cell could be interrupted.

    Attributes:
        came: Whether there is one.
        is_order_waiting: Tells whether an order is waiting.
        refusals: Number of calls of `refuse`; blocks of `held` and `raised` entered before it leave the handler alone.
    """

    def __init__(self) -> None:
        self.came = False
        self.is_order_waiting: Callable[[], bool] | None = None
        self.refusals = 0


_early = _Early()


def look_for_orders(is_order_waiting: Callable[[], bool]) -> None:
    """Set the function that tells whether an order was sent that the main thread has not finished."""
    _early.is_order_waiting = is_order_waiting


def _refuse(signum: int, frame: FrameType | None) -> None:
    """Handle an interrupt between cells. Programs that the rank starts would inherit `SIG_IGN`."""
    if _early.is_order_waiting is not None and _early.is_order_waiting():
        _early.came = True


def _remember(signum: int, frame: FrameType | None) -> None:
    _early.came = True


def refuse() -> None:
    """Ignore interrupts from now on; one that arrives while an order is waiting is kept for its cell.

    An interrupt that arrives during this call is ignored too.
    """
    _early.refusals += 1
    while True:
        try:
            signal.signal(signal.SIGINT, _refuse)
        except KeyboardInterrupt:
            continue
        return


def forget() -> None:
    """Drop an interrupt that arrived after the end of its cell."""
    _early.came = False


def allow() -> None:
    """Let interrupts raise `KeyboardInterrupt` in the main thread from now on.

    Uses Python's default handler, the only one that `asyncio.run` replaces with its own.

    Raises:
        KeyboardInterrupt: An interrupt arrived before this call and was kept for this cell.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    came, _early.came = _early.came, False
    if came:
        raise KeyboardInterrupt


@contextlib.contextmanager
def held() -> Generator[None]:
    """Defer interrupts in a block that would swallow them, as IPython's code around the user's does.

    Raises:
        KeyboardInterrupt: At the end of the block, if an interrupt arrived.
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
    """Within `held`, let the user's code be interrupted.

    Raises:
        KeyboardInterrupt: At the beginning of the block, if an interrupt arrived before it.
    """
    if not _is_handled_by(_remember):
        yield
        return
    refusals = _early.refusals
    try:
        allow()
        yield
    finally:
        # an abandoned coroutine may end within a later cell
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
