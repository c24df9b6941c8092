"""Ranks as people write them: `0`, `0,2-3`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sgpu_magic.errors import UsageError

_PART = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_MOST = 4096


def parse_ranks(option: str, text: str) -> tuple[int, ...]:
    """Read `0,2-3`, ascending and each once.

    Args:
        option: What it was given for, such as `--ranks`.
        text: The list.

    Raises:
        UsageError: It is none.
    """
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _PART.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (1, 0)
        if first > last or last >= _MOST:
            raise UsageError(f"{option} {text!r} is no list of ranks. Write numbers and ranges with commas: 0,2-3.")
        found.update(range(first, last + 1))
    if not found:
        raise UsageError(f"{option} names no rank. Write numbers and ranges with commas: 0,2-3.")
    return tuple(sorted(found))


def ranks_from(ranks: Iterable[int] | int | str | None, count: int, whose: str) -> tuple[int, ...]:
    """Return ranks ascending; empty for all of them.

    Args:
        ranks: A number, numbers, or a list as text; None for all.
        count: How many there are.
        whose: For messages, such as `session work`.

    Raises:
        UsageError: There is no such rank, or it is no list of ranks.
    """
    if ranks is None:
        return ()
    if isinstance(ranks, str):
        found = parse_ranks("ranks", ranks)
    else:
        found = tuple(sorted({ranks} if isinstance(ranks, int) else set(ranks)))
    strange = [rank for rank in found if not 0 <= rank < count]
    if strange or not found:
        there = f"ranks 0 to {count - 1}" if count > 1 else "rank 0 only"
        what = f"no rank {strange[0]}" if strange else "no ranks at all were named"
        raise UsageError(f"{whose} has {there}: {what}. Name some of those, or none for all.")
    return () if len(found) == count else found


def format_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 2` or `ranks 0, 2`."""
    listed = [str(rank) for rank in ranks]
    return f"rank{'s' * (len(listed) != 1)} {', '.join(listed)}"
