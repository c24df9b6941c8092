"""What a page is still to be told: newer words take the place of older ones, so that a slow page costs no memory."""

from __future__ import annotations

from collections import deque

from sgpu_magic.panel.messages import Said, Told
from sgpu_magic.panel.schema import PoolsTold, PoolTold, RunRow, RunsTold

_MAX_SAID = 100


class Outbox:
    """Messages that wait for one page. Owned by one thread."""

    def __init__(self) -> None:
        self._said: deque[Said] = deque(maxlen=_MAX_SAID)
        self._pools: PoolsTold | None = None
        self._pool: PoolTold | None = None
        self._runs: RunsTold | None = None

    def put(self, told: Told) -> None:
        """Add a message; it takes the place of one of its kind that has not been sent."""
        match told:
            case Said():
                self._said.append(told)
            case PoolsTold():
                self._pools = told
            case PoolTold():
                self._pool = told
            case RunsTold():
                self._runs = told if self._runs is None else merged(self._runs, told)

    def take(self) -> Told | None:
        """Return the next message, None when nothing waits."""
        if self._said:
            return self._said.popleft()
        if self._pools is not None:
            pools, self._pools = self._pools, None
            return pools
        if self._pool is not None:
            pool, self._pool = self._pool, None
            return pool
        runs, self._runs = self._runs, None
        return runs

    def clear(self) -> None:
        """Nobody waits for them any more."""
        self._said.clear()
        self._pools = self._pool = self._runs = None


def merged(earlier: RunsTold, later: RunsTold) -> RunsTold:
    """Return one message that tells what both tell, one after the other."""
    if later.whole or later.pool != earlier.pool:
        return later
    gone = set(later.gone)
    rows: dict[str, RunRow] = {row.run_id: row for row in (*later.changed, *earlier.changed) if row.run_id not in gone}
    rows |= {row.run_id: row for row in later.changed}
    changed = tuple(sorted(rows.values(), key=lambda row: row.submitted_at, reverse=True))
    still_gone = () if earlier.whole else tuple((set(earlier.gone) | gone) - rows.keys())
    return RunsTold(pool=later.pool, whole=earlier.whole, changed=changed, gone=still_gone)
