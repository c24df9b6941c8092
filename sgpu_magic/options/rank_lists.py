"""Lists of ranks, such as `0,2-3`, `-1` and `::2`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sgpu_magic.errors import UsageError
from sgpu_magic.options.values import MOST_RANKS

RankList = tuple[int | slice, ...]
"""Indices and slices of ranks, as in Python: `-1` is the last rank. What they select depends on the number of ranks."""

Ranks = Iterable[int | slice] | slice | int | str
"""Ranks of a session: `0`, `[0, 2]`, `slice(None, None, 2)`, `"0,2-3"`."""

_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_LAST = re.compile(r"-\d{1,5}")
_SLICE = re.compile(r"(-?\d{1,5})?:(-?\d{1,5})?(?::(-?\d{1,5})?)?")


def parse_ranks(option: str, text: str) -> RankList:
    """Parse a list of ranks such as `0,2-3`; ipyparallel's spellings `all`, `:`, `::2`, `-1`, `[0, 2]` are known too.

    Args:
        option: The option's name for error messages, such as `--ranks`.
        text: The list.

    Raises:
        UsageError: It is not a list of ranks.
    """
    found: list[int | slice] = []
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1].strip()
    if inner == "all":
        return (slice(None),)
    for part in filter(None, (part.strip() for part in inner.split(","))):
        if _LAST.fullmatch(part):
            found.append(int(part))
        elif (match := _RANGE.fullmatch(part)) and int(match[1]) <= int(match[2] or match[1]) < MOST_RANKS:
            found.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
        elif (match := _SLICE.fullmatch(part)) and (match[3] is None or int(match[3])):
            found.append(slice(*(None if bound is None else int(bound) for bound in match.groups())))
        else:
            raise UsageError(f"{option} {text!r} is not a list of ranks. Write numbers and ranges with commas: 0,2-3.")
    if not found:
        raise UsageError(f"{option} names no rank. Write numbers and ranges with commas: 0,2-3.")
    return tuple(found)


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
        ranks = parse_ranks("ranks", ranks)
    selected: set[int] = set()
    for item in (ranks,) if isinstance(ranks, (int, slice)) else ranks:
        if isinstance(item, slice):
            selected.update(range(count)[item])
        else:
            selected.add(item + count if -count <= item < 0 else item)
    strange = sorted(rank for rank in selected if not 0 <= rank < count)
    if strange or not selected:
        there = f"ranks 0 to {count - 1}" if count > 1 else "rank 0 only"
        what = f"there is no rank {strange[0]}" if strange else "the list of ranks is empty"
        raise UsageError(f"{whose} has {there}: {what}. Name some of these, or give no list for all.")
    return () if len(selected) == count else tuple(sorted(selected))
