"""Events of a session: its cells, its dead ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from sgpu_magic.wire.events import SessionMoved

# cells may come every few milliseconds, so changes are reported only this often
_PAUSE_S = 0.2


class SessionEvents:
    """Reports the number of cells, the running cell and the dead ranks.

    Args:
        say: Reports an event.
    """

    def __init__(self, say: Callable[[SessionMoved], None]) -> None:
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._cells = 0
        self._running = ""
        self._dead: set[int] = set()
        self._last_reported = SessionMoved(cells=0)
        self._timer: asyncio.TimerHandle | None = None

    def on_cell_started(self, name: str) -> None:
        """Note that a cell has started."""
        self._cells += 1
        self._running = name
        self._changed()

    def on_cell_ended(self) -> None:
        """Note that the cell is over."""
        self._running = ""
        self._changed()

    def died(self, rank: int) -> None:
        """Report that a rank is dead."""
        self._dead.add(rank)
        self._publish_state()

    def replaced(self, ranks: Sequence[int]) -> None:
        """Report that ranks were replaced."""
        self._dead -= set(ranks)
        self._publish_state()

    def close(self) -> None:
        """Report the pending change, if any."""
        if self._timer is not None:
            self._publish_state()

    def _publish_state(self) -> None:
        """Report without delay, since it affects what the user can do."""
        if self._timer is not None:
            self._timer.cancel()
        self._publish()

    def _changed(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_PAUSE_S, self._publish)

    def _publish(self) -> None:
        self._timer = None
        running = (self._running,) if self._running else ()
        moved = SessionMoved(cells=self._cells, running=running, dead=tuple(sorted(self._dead)))
        if moved != self._last_reported:
            self._last_reported = moved
            self._say(moved)
