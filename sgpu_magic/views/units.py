"""Numbers with their units and in columns, as every view writes them, and the clock that views count by.

What a run has cost so far, how long it has run and what is left of its time are differences between now and an event's
time. Both are told by this clock, which goes on with the monotonic one: a step of the wall clock is in none of them. An
event from before a step that is heard after it, as by `%sgpu_attach`, still counts by the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from sgpu_magic.views import ansi

TIMES = "\u00d7"  # the multiplication sign of a number of devices
# what two readings of clocks differ by that were not set
_STEP_S = 0.01

_began = time.time() - time.monotonic()


def steady_time() -> float:
    """Return the seconds since the epoch, as the wall clock had them when this process began to count."""
    return _began + time.monotonic()


def heard_at(at: float) -> float:
    """Return an event's wall-clock time by the steady clock. To be asked when the event is heard."""
    set_by = time.time() - steady_time()
    return at if abs(set_by) < _STEP_S else at - set_by


def format_gb(count: float) -> str:
    """Return `18.2 GB`, `0.4 GB`: always in one unit, for numbers that change while they are read."""
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
    """Return `31 s`, `12 min`, `1 h 05 min`: how long something was there, which nobody reads to the second."""
    return f"{round(seconds / 60)} min" if 100 <= seconds < 3570 else format_seconds(seconds)


def format_clock(seconds: float) -> str:
    """Return `02:14`, above an hour `1:02:14`: for numbers that run."""
    whole = int(max(seconds, 0))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60:02d}:{rest % 60:02d}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 1`, `ranks 0, 2, 3`, `ranks 0-14, 16`."""
    ordered = sorted(set(ranks))
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
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(pieces)}"


def count_of(number: int, noun: str) -> str:
    """Return `1 rank`, `4 ranks`, `204,816 lines`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


Row = tuple[str, ...]


def aligned(rows: Sequence[Row], right: tuple[int, ...] = ()) -> list[str]:
    """Return the rows with their columns below each other, those in `right` at the right."""
    rows = [tuple(ansi.plain(cell) for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
