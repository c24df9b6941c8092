"""Numbers with units and in columns, and the clock that views use.

Running costs, durations and remaining times are differences between now and an event's time. Both are given by this
clock, which advances with the monotonic clock, so a step of the wall clock affects none of them. Exception: for an
event from before a step that is received after it, as by `%sgpu_attach`, the wall clock counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from sgpu_magic.views import ansi

TIMES = "\u00d7"  # the multiplication sign of a number of devices
# two clocks that were not set differ by less than this between two readings
_STEP_S = 0.01

_began = time.time() - time.monotonic()


def steady_time() -> float:
    """Return seconds since the epoch that advance with the monotonic clock; steps of the wall clock are ignored."""
    return _began + time.monotonic()


def heard_at(at: float) -> float:
    """Convert an event's wall-clock time to the steady clock. Call it when the event is received."""
    set_by = time.time() - steady_time()
    return at if abs(set_by) < _STEP_S else at - set_by


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
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_span(seconds: float) -> str:
    """Return `31 s`, `12 min`, `1 h 05 min`: a duration without seconds from 100 s on."""
    return f"{round(seconds / 60)} min" if 100 <= seconds < 3570 else format_seconds(seconds)


def format_clock(seconds: float) -> str:
    """Return `02:14`, from an hour on `1:02:14`: for running times."""
    whole = int(max(seconds, 0))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60:02d}:{rest % 60:02d}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 1`, `ranks 0, 2, 3`, `ranks 0-14, 16`."""
    ordered = sorted(set(ranks))
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {numbers_text(ordered)}"


def numbers_text(numbers: Iterable[int]) -> str:
    """Return `1`, `0, 2, 3`, `0-14, 16`."""
    ordered = sorted(set(numbers))
    pieces: list[str] = []
    at = 0
    while at < len(ordered):
        end = at
        while end + 1 < len(ordered) and ordered[end + 1] == ordered[end] + 1:
            end += 1
        if end - at >= 3:
            pieces.append(f"{ordered[at]}-{ordered[end]}")
        else:
            pieces.extend(str(rank) for rank in ordered[at : end + 1])
        at = end + 1
    return ", ".join(pieces)


def count_of(number: int, noun: str) -> str:
    """Return `1 rank`, `4 ranks`, `204,816 lines`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


Row = tuple[str, ...]


def aligned(rows: Sequence[Row], right: tuple[int, ...] = ()) -> list[str]:
    """Return the rows with aligned columns; those in `right` are right-aligned."""
    rows = [tuple(ansi.plain(cell) for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
