"""When a rank hears an interrupt: while it prepares or runs a cell, and at no other time."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType


class _Early:
    """An interrupt that came when its cell was on the way already, and where to look whether one is."""

    def __init__(self) -> None:
        self.came = False
        self.is_order_waiting: Callable[[], bool] | None = None


_early = _Early()


def look_for_orders(is_order_waiting: Callable[[], bool]) -> None:
    """Say how to see whether an order has been sent that the main thread has not taken yet."""
    _early.is_order_waiting = is_order_waiting


def _refuse(signum: int, frame: FrameType | None) -> None:
    """A handler and not `SIG_IGN`, which programs that the rank starts would inherit for good."""
    if _early.is_order_waiting is not None and _early.is_order_waiting():
        _early.came = True


def refuse() -> None:
    """From now on an interrupt does nothing, unless a cell is on its way: then it is that cell's.

    One that arrives on the way here does nothing either.
    """
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
