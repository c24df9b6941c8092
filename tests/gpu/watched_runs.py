"""A run in progress, as an attached client sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from kernels import Cell, Home, Kernel

from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.views.fold import RunView
from sgpu_magic.wire.events import Submitted
from sgpu_magic.wire.rank_events import RankSample


def newest_view(home: Home, since: set[str]) -> RunView | None:
    """The view of the run that began after `since` was taken."""
    new = [run for run in home.runs if run not in since]
    if not new:
        return None
    view: RunView | None = None
    with contextlib.suppress(FileNotFoundError):
        for event, frames in EventFile(home.run_dir(new[-1])).new_events():
            if isinstance(event.body, Submitted):
                view = RunView(event.body.spec)
            assert view is not None
            view.apply(event, frames)
    return view


class WatchedRun:
    """A cell that was started, and the view of its run.

    Args:
        kernel: Where it is started.
        code: The cell.
    """

    def __init__(self, kernel: Kernel, code: str) -> None:
        self._home = kernel.home
        self._before = set(kernel.home.runs)
        self.cell: Cell = kernel.start(code)

    @property
    def view(self) -> RunView:
        found = newest_view(self._home, self._before)
        assert found is not None
        return found

    @property
    def pids(self) -> dict[int, int]:
        """The processes of the ranks, by rank, once each has printed `pid N`."""
        found: dict[int, int] = {}
        for rank in range(self.view.ranks):
            for line in self._home.log(self.view.run_id, rank).splitlines():
                if line.startswith("pid "):
                    found[rank] = int(line.split()[1])
        return found

    def sample(self, rank: int = 0) -> RankSample:
        """The rank's newest sample."""
        usage = self.view.usage.ranks[rank].latest
        assert usage is not None
        return usage

    def until(self, wanted: Callable[[RunView], Any], timeout_s: float = 30.0, what: str = "") -> RunView:
        """Wait until the view is as it should be, and return it."""

        def as_wanted() -> bool:
            view = newest_view(self._home, self._before)
            return view is not None and bool(wanted(view))

        self.cell.until(as_wanted, timeout_s, what or "the view")
        return self.view

    def until_sampled(self, ranks: int = 1) -> RunView:
        """Wait until each rank has a sample."""
        return self.until(
            lambda view: len(view.usage.ranks) == ranks and all(usage.latest for usage in view.usage.ranks.values()),
            what="the first samples",
        )
