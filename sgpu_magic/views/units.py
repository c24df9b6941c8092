"""Numbers with units and in columns, clipped texts, the clock that views use, and a run's times by it.

Running costs, durations and remaining times are differences between now and an event's time. Both are given by this
clock, which advances with the monotonic clock, so a step of the wall clock affects none of them. Exception: for an
event from before a step that is received after it, as by `%sgpu_attach`, the wall clock counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TypeVar

from sgpu_magic.views import ansi
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.rank_events import Failure

T = TypeVar("T")

TIMES = "\u00d7"  # the multiplication sign of a number of devices
ROW_CHARS = 85
"""Characters of a row in a narrow notebook."""

# maximum difference between readings of the two clocks, unless one was set
_STEP_S = 0.01
# shorter start times are omitted beside a duration
_WORTH_TELLING_S = 1.0
# shorter durations are omitted, such as that of a refused run
_LEAST_S = 0.0005

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
        placed_at: When it got its devices; None in the queue. For a further attempt when that began.
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
        """Note that its ranks are being started."""
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
            now: The time, by default the present; as for the following ones.
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


def format_gb(count: float) -> str:
    """Return `18.2 GB`, `0.4 GB`: always in the same unit, for numbers that keep changing."""
    return f"{count / 1e9:.1f} GB"


def format_seconds(seconds: float) -> str:
    """Return `38 ms`, `12.4 s`, `31 s`, `2 min 14 s`, `1 h 05 min`."""
    if seconds < 0.0995:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    if seconds < 0.995:
        return f"{seconds:.2f} s"
    if seconds < 19.95:
        return f"{seconds:.1f} s"
    return _in_seconds(round(seconds))


def _in_seconds(whole: int) -> str:
    if whole < 100:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_elapsed(seconds: float) -> str:
    """Return `38 ms`, `0.31 s`, `12 s`, `2 min 14 s`, `1 h 05 min`: the whole seconds of a time that may go on."""
    return format_seconds(seconds) if seconds < 0.995 else _in_seconds(max(int(seconds), 1))


def format_duration(running_s: float, starting_s: float = 0.0) -> str:
    """Return `12 s · start 25 s`: how long a run's ranks ran, and how long they took to start.

    Args:
        running_s: Seconds since they had started; 0 if they never did.
        starting_s: Seconds from the lease until then. Less than a second is left out.
    """
    parts = [format_elapsed(running_s)] if running_s >= _LEAST_S else []
    if starting_s >= _WORTH_TELLING_S or (starting_s >= _LEAST_S and not parts):
        parts.append(f"start {format_elapsed(starting_s)}")
    return " · ".join(parts)


def format_span(seconds: float) -> str:
    """Return `31 s`, `12 min`, `1 h 05 min`: a duration without seconds from 100 s on."""
    return f"{round(seconds / 60)} min" if 100 <= seconds < 3570 else format_seconds(seconds)


def format_clock(seconds: float) -> str:
    """Return `02:14`, from an hour on `1:02:14`: for running times."""
    hours, rest = divmod(int(max(seconds, 0)), 3600)
    return (f"{hours}:" if hours else "") + f"{rest // 60:02d}:{rest % 60:02d}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 1`, `ranks 0, 2, 3`, `ranks 0-14, 16`."""
    ranks = frozenset(ranks)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers_text(ranks)}"


def numbers_text(numbers: Iterable[int]) -> str:
    """Return `1`, `0, 2, 3`, `0-14, 16`."""
    pieces: list[str] = []
    # consecutive numbers have the same difference to their positions
    for _, pairs in groupby(enumerate(sorted(set(numbers))), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in pairs]
        pieces += [f"{found[0]}-{found[-1]}"] if len(found) > 3 else map(str, found)
    return ", ".join(pieces)


def ends(items: Sequence[T], most: int, between: T) -> list[T]:
    """Return at most `most` items: of more, the first and the last half with `between` in place of the others."""
    half = most // 2
    return list(items) if len(items) <= most else [*items[:half], between, *items[-half:]]


def clipped(text: str, most: int = 200) -> str:
    """Return the beginning of a text, at most `most` characters."""
    return text if len(text) <= most else f"{text[:most]} ..."


def count_of(number: int, noun: str) -> str:
    """Return `1 rank`, `4 ranks`, `204,816 lines`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


Row = tuple[str, ...]


def aligned(rows: Sequence[Row], right: tuple[int, ...] = ()) -> list[str]:
    """Return the rows with aligned columns; those in `right` are right-aligned."""
    rows = [tuple(ansi.plain(cell) for cell in row) for row in rows]
    columns: list[list[str]] = []
    for at, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if at in right else cell.ljust(width) for cell in column])
    return ["   ".join(row).rstrip() for row in zip(*columns, strict=True)]
