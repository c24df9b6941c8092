"""On which node each rank is, where a run has more than one."""

from __future__ import annotations

from collections.abc import Sequence

from sgpu_magic.views import ansi
from sgpu_magic.views.units import count_of
from sgpu_magic.views.view import RunView

_MAX_NAMED = 4
_MAX_CHARS = 60


def hosts(view: RunView) -> tuple[str, ...]:
    """Return each rank's node in rank order; empty where all are on one."""
    shares = view.lease.shares if view.lease is not None else ()
    if len(shares) < 2:
        return ()
    return tuple(ansi.plain(share.host)[:_MAX_CHARS] for share in shares for _ in range(share.ranks))


def host_of(view: RunView, rank: int) -> str:
    """Return the rank's node, "" where all are on one."""
    found = hosts(view)
    return found[rank] if rank < len(found) else ""


def new_host(view: RunView, ranks: Sequence[int], at: int) -> str:
    """Return the node of the rank that is listed at this place, "" when the one before it is there too."""
    host = host_of(view, ranks[at])
    # two nodes may have one name
    before = _share_of(view, ranks[at - 1]) if at else -1
    return host if _share_of(view, ranks[at]) != before else ""


def hosts_text(view: RunView) -> str:
    """Return `2 nodes: ml-1, ml-2`, of many only how many, "" for one."""
    shares = view.lease.shares if view.lease is not None else ()
    if len(shares) < 2:
        return ""
    count = count_of(len(shares), "node")
    named = ", ".join(ansi.plain(share.host)[:_MAX_CHARS] for share in shares)
    return f"{count}: {named}" if len(shares) <= _MAX_NAMED else count


def _share_of(view: RunView, rank: int) -> int:
    first = 0
    for number, share in enumerate(view.lease.shares if view.lease is not None else ()):
        first += share.ranks
        if rank < first:
            return number
    return 0
