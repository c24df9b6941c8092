"""Where the ranks of a session write: the session's own logs between cells, each cell's while it runs."""

from __future__ import annotations

import os
from collections.abc import Iterable

from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.agent.runs.run_directory import RunDirectory


class SessionLogs:
    """Keeps how far each rank's own log of the session is written.

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
