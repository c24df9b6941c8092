"""Names of groups that are made by their members alone (`new_group(use_local_synchronization=True)`).

torch names such a group by its ranks and the number of groups that the process has. Members that have different numbers
of other groups get different names, and wait for each other forever. Here the number is that of groups of the same
ranks, which all members make together.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch.distributed.distributed_c10d as c10d


class _Made:
    """The groups that this process has made by their members alone.

    Attributes:
        generation: Number of the store that they meet in; each store has its own names.
        counts: Number of groups by their ranks.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.counts: Counter[tuple[int, ...]] = Counter()


_made = _Made()


def count_by_members() -> None:
    """Let torch number these groups by their members. Called in the zygote."""
    # torch without this function names them in another way
    if hasattr(c10d, "_hash_ranks_to_str"):
        c10d._hash_ranks_to_str = _name


def _name(ranks: Sequence[int]) -> str:
    members = tuple(ranks)
    number = _made.counts[members]
    _made.counts[members] += 1
    text = "_".join(map(str, (*members, number, _made.generation)))
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def generation() -> int:
    """Return the number of the current store."""
    return _made.generation


def begin_generation(number: int) -> None:
    """Count from 0 again, in a new store."""
    _made.generation = number
    _made.counts.clear()
