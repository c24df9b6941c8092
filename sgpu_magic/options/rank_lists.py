"""Lists of ranks, such as `0,2-3` and `-1`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sgpu_magic.errors import UsageError
from sgpu_magic.options.values import MOST_RANKS

Ranks = Iterable[int] | int | str
"""Ranks of a session: `0`, `[0, 2]`, `"0,2-3"`."""

_RANKS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?|(-\d{1,5})")
# ipyparallel's spellings
_ALL = ("all", ":")


def parse_ranks(option: str, text: str) -> tuple[int, ...]:
    """Parse a list of ranks such as `0,2-3`, into ascending order without duplicates.

    `-1` is the last rank; `all` and `:` are all ranks, for which the result is empty. Brackets may surround a list.

    Args:
        option: The option's name for error messages, such as `--ranks`.
        text: The list.

    Raises:
        UsageError: It is not a list of ranks.
    """
    found: set[int] = set()
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1].strip()
    if inner in _ALL:
        return ()
    for part in filter(None, (part.strip() for part in inner.split(","))):
        match = _RANKS.fullmatch(part)
        if match is not None and match[3]:
            found.add(int(match[3]))
            continue
        first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (1, 0)
        if first > last or last >= MOST_RANKS:
            raise UsageError(f"{option} {text!r} is not a list of ranks. Write numbers and ranges with commas: 0,2-3.")
        found.update(range(first, last + 1))
    if not found:
        raise UsageError(f"{option} names no rank. Write numbers and ranges with commas: 0,2-3.")
    return tuple(sorted(found))


def ranks_from(ranks: Ranks | None, count: int, whose: str) -> tuple[int, ...]:
    """Return the chosen ranks in ascending order; empty for all.

    Args:
        ranks: A rank, several, or a list such as `"0,2-3"`; None for all.
        count: Number of ranks that exist.
        whose: Their owner for error messages, such as `session work`.

    Raises:
        UsageError: A rank does not exist, or it is not a list of ranks.
    """
    if ranks is None:
        return ()
    if isinstance(ranks, str):
        given = parse_ranks("ranks", ranks)
        if not given:
            return ()
    else:
        given = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    # the last rank is -1
    found = tuple(sorted({rank + count if -count <= rank < 0 else rank for rank in given}))
    strange = [rank for rank in found if not 0 <= rank < count]
    if strange or not found:
        there = f"ranks 0 to {count - 1}" if count > 1 else "rank 0 only"
        what = f"there is no rank {strange[0]}" if strange else "the list of ranks is empty"
        raise UsageError(f"{whose} has {there}: {what}. Name some of these, or give no list for all.")
    return () if len(found) == count else found
