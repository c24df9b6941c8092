"""Timers for work that can wait, so that it neither delays cells that follow each other nor wakes the agent often."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")

# calls within one such interval are made together
_TOGETHER_S = 0.25


class PutOff:
    """A call that is put off again and again while something goes on, but not for longer than a limit.

    Args:
        call: The call, without arguments.
        most_s: At most so many seconds pass from the first `put_off` to the call.
    """

    def __init__(self, call: Callable[[], None], most_s: float) -> None:
        self._call = call
        self._most_s = most_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        # when the call has to be made
        self._by = 0.0

    def put_off(self, delay_s: float) -> None:
        """Make the call after `delay_s` seconds, instead of at the time set before."""
        now = self._loop.time()
        if self._timer is None:
            self._by = now + self._most_s
        else:
            self._timer.cancel()
        self._timer = self._loop.call_at(min(now + delay_s, self._by), self.flush)

    def put_off_if_due(self, delay_s: float) -> None:
        """Like `put_off`, if the call is to be made at all."""
        if self._timer is not None:
            self.put_off(delay_s)

    def flush(self) -> None:
        """Make the call now, if it is to be made at all."""
        if self._timer is not None:
            self.cancel()
            self._call()

    def cancel(self) -> None:
        """Don't make the call."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def call_about(delay_s: float, call: Callable[[*Ts], object], *args: *Ts) -> asyncio.TimerHandle:
    """Make a call after `delay_s` seconds, or up to a quarter of a second later, together with others."""
    loop = asyncio.get_running_loop()
    at = math.ceil((loop.time() + delay_s) / _TOGETHER_S) * _TOGETHER_S
    return loop.call_at(at, call, *args)
