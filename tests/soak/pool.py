"""Strikes on the whole pool: one at a time, and remembered, because they end other notebooks' runs too."""

from __future__ import annotations

import random
import threading
import time

from homes import Home
from strikes import kill
from waiting import eventually

# a pool abandons an agent that dies three times within seconds of its start
_APART_S = 4.0
# processes started this long before a strike's end may have been hit, and so may runs that began this soon after it
_MARGIN_S = 1.5


class Pool:
    """The pool as something to strike.

    Args:
        home: Where it lives.
        source: Chooses a victim among several.
    """

    def __init__(self, home: Home, source: random.Random) -> None:
        self.home = home
        self._source = source
        self._lock = threading.Lock()
        self._strikes: list[tuple[float, str]] = []
        self.counts: dict[str, int] = {}

    def strike(self, roles: str) -> None:
        """Kill all of `pool agent zygote` that are named, at once."""
        with self._lock:
            if self._strikes:
                over = self._strikes[-1][0] + _APART_S
                eventually(lambda: time.monotonic() > over, _APART_S + 1)
            pids = eventually(lambda: self._pids(roles), 20, f"{roles} to be there")
            kill(*pids)
            self._strikes.append((time.monotonic(), roles))
            self.counts[roles] = self.counts.get(roles, 0) + 1

    def strikes_between(self, begin: float, end: float) -> list[str]:
        """What was struck then."""
        with self._lock:
            return [roles for at, roles in self._strikes if begin - _MARGIN_S < at < end + _MARGIN_S]

    def choose(self, pids: list[int]) -> int:
        with self._lock:
            return self._source.choice(pids)

    def _pids(self, roles: str) -> list[int]:
        found = {
            "pool": [pid for pid in [self.home.pool_pid()] if pid is not None],
            "agent": self.home.agent_pids(),
            "zygote": self.home.zygote_pids(),
        }
        chosen = [found[role] for role in roles.split()]
        return [pid for pids in chosen for pid in pids] if all(chosen) else []
