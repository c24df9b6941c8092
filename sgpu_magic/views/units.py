"""The clock that views use, a run's times by it, and the alignment of columns.

Running costs, durations and remaining times are differences between now and an event's time. Both are given by this
clock, which advances with the monotonic clock, so a step of the wall clock affects none of them. The exception is an
event from before a step that is received after it, as by `%sgpu_attach`: its wall-clock time is used.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sgpu_magic.formatting import format_duration
from sgpu_magic.views import ansi
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.rank_events import Failure

TIMES = "\u00d7"  # the multiplication sign of a number of devices
ROW_CHARS = 85
"""Characters of a row in a narrow notebook."""
BETWEEN = "   "
"""What is between the columns of a table of text."""

# maximum difference between readings of the two clocks, unless one was set
_STEP_S = 0.01

_began = time.time() - time.monotonic()


def steady_time() -> float:
    """Return seconds since the epoch that advance with the monotonic clock; steps of the wall clock are ignored."""
    return _began + time.monotonic()


def to_steady_time(at: float) -> float:
    """Convert an event's wall-clock time to the steady clock. Call it when the event is received."""
    # this process may be interrupted between two readings
    before, wall, after = steady_time(), time.time(), steady_time()
    return at if before - _STEP_S < wall < after + _STEP_S else at - (wall - after)


class RunTimes:
    """When a run was placed and when its ranks started, by the views' clock, and how long that is ago.

    Attributes:
        placed_at: When it got its devices, or when its current attempt began if that is later; None in the queue.
        started_at: When the ranks of its current attempt had started, None before.
        metered_at: When metering began, None before.
        ended: Its final event, None while it is active.
    """

    def __init__(self) -> None:
        self.placed_at: float | None = None
        self.started_at: float | None = None
        self.metered_at: float | None = None
        self.ended: RunEnded | None = None
        self._starting_at: float | None = None

    def starts(self, at: float) -> None:
        """Record that its ranks are being started."""
        self._starting_at = at
        self.metered_at = at if self.metered_at is None else self.metered_at

    def start_again(self, at: float) -> float:
        """Note that a further attempt begins; return how long the last one lasted."""
        # a rank may die before all have started
        began = self.started_at or self._starting_at
        self.placed_at, self.started_at = at, None
        return max(at - began, 0.0) if began is not None else 0.0

    def running_s(self, now: float | None = None) -> float:
        """Return seconds since the ranks had started, or until they ended; 0 before.

        Args:
            now: The time; by default, the present. The following methods take it too.
        """
        if self.ended is not None:
            # for a cell of milliseconds the ranks' own time is more precise than the pool's
            return self.ended.running_s if self.ended.starting_s else max(self.held_s() - self._start_s(), 0.0)
        return 0.0 if self.started_at is None else max(_or_now(now) - self.started_at, 0.0)

    def starting_s(self, now: float | None = None) -> float:
        """Return seconds from the lease until the ranks had started, or until `now`; 0 in the queue."""
        if self.ended is not None:
            # a pool interrupted after the launch may record the lease only after the ranks have started
            return max(self._start_s(), self.ended.starting_s)
        if self.placed_at is None or self.started_at is not None:
            return self._start_s()
        return max(_or_now(now) - self.placed_at, 0.0)

    def held_s(self) -> float:
        """Return seconds for which it has had its devices."""
        if self.ended is not None:
            return max(self.ended.total_s - self.ended.queued_s, self.ended.running_s)
        return self.starting_s() + self.running_s()

    def metered_s(self, now: float | None = None) -> float | None:
        """Return the metered seconds; None before metering and for a cell in a session."""
        return None if self.metered_at is None else max(_or_now(now) - self.metered_at, 0.0)

    def fail(self, failure: Failure) -> RunEnded:
        """Return the final event of a run that fails now, with its durations."""
        start_s, run_s = self.starting_s(), self.running_s()
        total_s = start_s + run_s
        return RunEnded(state=RunState.FAILED, failure=failure, starting_s=start_s, running_s=run_s, total_s=total_s)

    def text(self, now: float | None = None) -> str:
        """Return `12 s · start 25 s`; "" in the queue, and for a run that was refused."""
        return format_duration(self.running_s(now), self.starting_s(now))

    def _start_s(self) -> float:
        if self.placed_at is None or self.started_at is None:
            return 0.0
        return max(self.started_at - self.placed_at, 0.0)


def _or_now(now: float | None) -> float:
    return steady_time() if now is None else now


Row = tuple[str, ...]


def cut(text: str, most: int) -> str:
    """Return the text, or its first `most - 1` characters and an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def aligned(rows: Sequence[Row], right: tuple[int, ...] = ()) -> list[str]:
    """Return the rows with aligned columns; those in `right` are right-aligned."""
    rows = [tuple(ansi.plain(cell) for cell in row) for row in rows]
    columns: list[list[str]] = []
    for at, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if at in right else cell.ljust(width) for cell in column])
    return [BETWEEN.join(row).rstrip() for row in zip(*columns, strict=True)]
