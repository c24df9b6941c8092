"""The log files of a session's ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.agent.runs.run_files import AttemptFiles
from sgpu_magic.wire.rank_events import OutputWritten


class SessionLogs:
    """Switches the ranks between the session's logs and those of a cell.

    Args:
        group: The ranks.
        files: The session's files.
    """

    def __init__(self, group: Group, files: AttemptFiles) -> None:
        self._group = group
        self._files = files
        # lines and bytes in the session's logs of ranks that are lent to a cell
        self._written: dict[int, tuple[int, int]] = {}
        # the files of the last cell of each rank
        self._last: dict[int, AttemptFiles] = {}

    def begin(self, ranks: Iterable[int]) -> None:
        """Let new processes append to the session's logs."""
        for rank in ranks:
            path = self._files.log_path(rank)
            self._open(rank, 0, os.path.getsize(path) if os.path.exists(path) else 0)

    def lend(self, ranks: Iterable[int], files: AttemptFiles) -> None:
        """Write pending output to the session's logs before a cell sets its own.

        Args:
            ranks: The ranks that run the cell.
            files: The cell's files.
        """
        for rank in ranks:
            self._last[rank] = files
            output = self._group.rank(rank).output
            output.drain()
            self._written[rank] = (output.lines, output.total_bytes)

    def add_late(self, batch: OutputWritten) -> None:
        """Add what a rank prints between cells to the log of its last cell, whose threads have most likely printed it.

        The session's own log and view have it too.
        """
        if (files := self._last.get(batch.rank)) is not None and batch.text:
            # the directory may be removed by now
            with contextlib.suppress(OSError), open(files.log_path(batch.rank), "a", encoding="utf-8") as log:
                log.write(batch.text)

    def take_back(self, ranks: Iterable[int]) -> None:
        """Switch the ranks back to the session's logs after a cell."""
        for rank in ranks:
            lines, size = self._written.pop(rank, (0, 0))
            if self._group.rank(rank).alive:
                self._open(rank, lines, size)

    def _open(self, rank: int, lines: int, size: int) -> None:
        self._group.rank(rank).output.switch_log(self._files.log_path(rank), lines, size)
