"""When a pool that nobody uses gives its processes back, and who is told before."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

_WARN_BEFORE_S = 300.0


class Idleness:
    """Watches how long nothing was asked of the pool.

    Args:
        idle_s: Seconds without runs after which it ends; infinite for never.
        in_use: Whether runs go on.
        warn: Tells everybody who is connected a sentence; "" takes it back.
        give_back: Ends the pool.
    """

    def __init__(
        self,
        idle_s: float,
        in_use: Callable[[], bool],
        warn: Callable[[str], None],
        give_back: Callable[[], None],
    ) -> None:
        self._idle_s = idle_s
        self._warn_s = min(_WARN_BEFORE_S, idle_s / 4)
        self._in_use = in_use
        self._warn = warn
        self._give_back = give_back
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._warned = False
        self._timer = self._loop.call_later(self._look_s, self._look)

    @property
    def ends_at(self) -> float | None:
        """Wall-clock time at which the pool ends if nothing happens, None while it is in use."""
        if self._in_use() or self._idle_s == math.inf:
            return None
        return time.time() + max(0.0, self._idle_s - (self._loop.time() - self._since))

    def touched(self) -> None:
        """Somebody wants something."""
        self._since = self._loop.time()
        if self._warned:
            self._warned = False
            self._warn("")

    def close(self) -> None:
        self._timer.cancel()

    @property
    def _look_s(self) -> float:
        return max(0.1, min(30.0, self._warn_s / 2))

    def _look(self) -> None:
        if self._in_use():
            self.touched()
        idle_s = self._loop.time() - self._since
        if idle_s > self._idle_s:
            self._give_back()
            return
        if idle_s > self._idle_s - self._warn_s and not self._warned:
            self._warned = True
            left = self._idle_s - idle_s
            span = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
            self._warn(
                f"the pool has been idle for {idle_s / 60:.0f} min and gives its processes back in {span}; "
                "the next run starts them again"
            )
        self._timer = self._loop.call_later(self._look_s, self._look)
