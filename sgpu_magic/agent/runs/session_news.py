"""What a session tells of itself: how many cells, which one runs, which ranks are dead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from sgpu_magic.wire.events import SessionMoved

# cells come every few milliseconds: what they do is told when they last, or when it is quiet
_PAUSE_S = 0.2


class SessionNews:
    """Gathers what has changed.

    Args:
        say: Takes what is told.
    """

    def __init__(self, say: Callable[[SessionMoved], None]) -> None:
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._cells = 0
        self._running = ""
        self._dead: set[int] = set()
        self._told = SessionMoved(cells=0)
        self._timer: asyncio.TimerHandle | None = None

    def began(self, name: str) -> None:
        """A cell runs."""
        self._cells += 1
        self._running = name
        self._changed()

    def over(self) -> None:
        """The cell is over."""
        self._running = ""
        self._changed()

    def died(self, rank: int) -> None:
        """A rank is dead."""
        self._dead.add(rank)
        self._tell_now()

    def replaced(self, ranks: Sequence[int]) -> None:
        """These ranks live again."""
        self._dead -= set(ranks)
        self._tell_now()

    def close(self) -> None:
        """Tell what was not told yet; nothing follows."""
        if self._timer is not None:
            self._tell_now()

    def _tell_now(self) -> None:
        """What a user can do depends on it."""
        if self._timer is not None:
            self._timer.cancel()
        self._tell()

    def _changed(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_PAUSE_S, self._tell)

    def _tell(self) -> None:
        self._timer = None
        running = (self._running,) if self._running else ()
        news = SessionMoved(cells=self._cells, running=running, dead=tuple(sorted(self._dead)))
        if news != self._told:
            self._told = news
            self._say(news)
