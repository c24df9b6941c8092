"""Numbers, amounts and lists as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")
# shorter start times are omitted beside a duration
_WORTH_TELLING_S = 1.0
# shorter durations are omitted, such as that of a refused run
_LEAST_S = 0.0005
_SIGNS = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥", "INR": "₹", "KRW": "₩"}


def format_money(amount: float, currency: str) -> str:
    """Format an amount: `$0.37`, `$1,240.00`, `3.10 CHF`. A few cents have two digits: `$0.015`, `$0.0042`."""
    if 0 < amount < 1e-6:
        return f"under {_with_sign('0.000001', currency)}"
    if amount == 0 or amount >= 0.0995:
        return _with_sign(f"{amount:,.2f}", currency)
    digits = f"{float(f'{amount:.1e}'):.6f}".rstrip("0")
    return _with_sign(digits.ljust(4, "0"), currency)


def _with_sign(digits: str, currency: str) -> str:
    sign = _SIGNS.get(currency, currency if len(currency) == 1 else "")
    return f"{sign}{digits}" if sign else f"{digits} {currency}".rstrip()


def format_bytes(count: float) -> str:
    """Format a size like `1.2 kB` or `45.1 MB`: decimal units, one digit after the point."""
    if count < 999.5:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"


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


def format_exact_span(seconds: float) -> str:
    """Return `90 s`, `10 min`, `2 h`, `7 d`: a duration that was set, in the largest unit that divides it."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:g} s"


def format_rough_span(seconds: float) -> str:
    """Return `40 s`, `12 min`, `5 h 10 min`, `2 d 3 h`: a duration in at most two units."""
    whole = max(0, round(seconds))
    if whole < 100:
        return f"{whole} s"
    units = [(whole // 86400, "d"), (whole % 86400 // 3600, "h"), (whole % 3600 // 60, "min")]
    first = next(index for index, (count, _) in enumerate(units) if count)
    return " ".join(f"{count} {unit}" for count, unit in units[first : first + 2] if count)


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


def plural(number: int, noun: str) -> str:
    """Return `rank` for one, `ranks` for any other number."""
    return noun if number == 1 else f"{noun}s"


def count_of(number: int, noun: str) -> str:
    """Return `1 rank`, `4 ranks`, `204,816 lines`."""
    return f"{number:,} {plural(number, noun)}"


def names_text(names: Iterable[str], most: int = 8) -> str:
    """Return `model, loader, cfg`; for many names the first ones and the number of others."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
