"""How the ranks of a lease are laid over nodes. Pure.

- `pack` takes as few nodes as can be, and of those that do the fullest: what is left stays in large pieces.
- `strict_pack` takes one node, `--nodes N` takes N with the same number of ranks each.
- `spread` takes as many nodes as can be, as evenly as can be.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from sgpu_magic.pool.wants import SPREAD, Want

Parts = list[tuple[str, int]]


def laid_out(want: Want, free: Mapping[str, int]) -> Parts | None:
    """Return (node, ranks) for each node that a lease would have, the largest part first; None if it does not fit.

    Args:
        want: The request.
        free: Devices or slots that it could take, by node, in an order that stays.
    """
    if want.on_one_node:
        node = _tightest(free, want.ranks)
        return None if node is None else [(node, want.ranks)]
    if want.nodes:
        return _evenly(free, want.nodes, want.per_node)
    if sum(count for count in free.values() if count > 0) < want.ranks:
        return None
    return _spread(free, want.ranks) if want.strategy == SPREAD else _packed(free, want.ranks)


def _tightest(free: Mapping[str, int], ranks: int) -> str | None:
    """The node with enough room and the least of it, the first of several."""
    best, room = None, 0
    for node, count in free.items():
        if count >= ranks and (best is None or count < room):
            best, room = node, count
            if count == ranks:
                break
    return best


def _evenly(free: Mapping[str, int], nodes: int, each: int) -> Parts | None:
    enough = sorted((count, place, node) for place, (node, count) in enumerate(free.items()) if count >= each)
    return [(node, each) for _, _, node in enough[:nodes]] if len(enough) >= nodes else None


def _packed(free: Mapping[str, int], ranks: int) -> Parts:
    alone = _tightest(free, ranks)
    if alone is not None:
        return [(alone, ranks)]
    parts: Parts = []
    left = dict(free)
    # the largest nodes first need the fewest; the last part goes where it fits best
    for node, count in sorted(free.items(), key=lambda item: -item[1]):
        last = _tightest(left, ranks) if parts else None
        if last is not None:
            parts.append((last, ranks))
            break
        parts.append((node, count))
        del left[node]
        ranks -= count
    return parts


def _spread(free: Mapping[str, int], ranks: int) -> Parts:
    parts = {node: 0 for node, count in free.items() if count > 0}
    # the node with the fewest ranks takes the next, of these the emptiest
    heap = [(0, -free[node], place, node) for place, node in enumerate(parts)]
    heapq.heapify(heap)
    for _ in range(ranks):
        taken, room, place, node = heapq.heappop(heap)
        parts[node] = taken + 1
        if taken + 1 < free[node]:
            heapq.heappush(heap, (taken + 1, room, place, node))
    return sorted(((node, count) for node, count in parts.items() if count), key=lambda part: -part[1])
