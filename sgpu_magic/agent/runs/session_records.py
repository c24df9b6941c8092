"""What a session reports and keeps besides its cells: its state, and its ranks' logs between cells."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence

from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.agent.runs.run_files import RunDirectory
from sgpu_magic.wire.events import SessionMoved

# cells come every few milliseconds: what they do is told when they last, or when it is quiet
_PAUSE_S = 0.2


class SessionNews:
    """Reports how many cells there were, which one runs, which ranks are dead.

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


class SessionLogs:
    """Switches the ranks between the session's logs and those of a cell.

    Args:
        group: The ranks.
        directory: The session's.
    """

    def __init__(self, group: Group, directory: RunDirectory) -> None:
        self._group = group
        self._directory = directory
        # lines and bytes of those that are lent to a cell
        self._written: dict[int, tuple[int, int]] = {}

    def begin(self, ranks: Iterable[int]) -> None:
        """Let new processes write to the session's logs; what is there stays."""
        for rank in ranks:
            path = self._directory.log_path(rank)
            self._open(rank, 0, os.path.getsize(path) if os.path.exists(path) else 0)

    def lend(self, ranks: Iterable[int]) -> None:
        """A cell begins; it names its own logs. What they have printed so far is the session's."""
        for rank in ranks:
            output = self._group.rank(rank).output
            output.drain()
            self._written[rank] = (output.lines, output.total_bytes)

    def take_back(self, ranks: Iterable[int]) -> None:
        """The cell is over."""
        for rank in ranks:
            lines, size = self._written.pop(rank, (0, 0))
            if self._group.rank(rank).alive:
                self._open(rank, lines, size)

    def _open(self, rank: int, lines: int, size: int) -> None:
        self._group.rank(rank).output.switch_log(self._directory.log_path(rank), lines, size)
