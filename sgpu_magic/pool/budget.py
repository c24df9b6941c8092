"""What a pool's runs may cost together in a time. Pure: seconds of any one clock."""

from __future__ import annotations

import math
from collections.abc import Iterable

DAY_S = 24 * 3600.0


class Budget:
    """A limit on what was spent in the last `days`.

    Args:
        limit: In the settings' currency; more than 0.
        days: How far back spending counts; more than 0.
        spent: (time, cost) of runs that have ended, in any order.
    """

    def __init__(self, limit: float, days: float, spent: Iterable[tuple[float, float]] = ()) -> None:
        self.limit = limit
        self.days = days
        self._spent = sorted(spent)
        # summed up when something leaves it, and not whenever it is asked for
        self._total = math.fsum(cost for _, cost in self._spent)

    def add(self, at: float, cost: float) -> None:
        """A run has ended at `at`, the newest time so far."""
        self._spent.append((at, cost))
        self._total += cost

    def spent(self, now: float) -> float:
        """Return what the runs cost that have ended in the last `days`."""
        since = now - self.days * DAY_S
        if self._spent and self._spent[0][0] <= since:
            self._spent = [entry for entry in self._spent if entry[0] > since]
            self._total = math.fsum(cost for _, cost in self._spent)
        return self._total

    def frees_at(self, now: float, more: float = 0.0) -> float | None:
        """Return when enough of it has been so long ago that there is room again; None when that is not known.

        Args:
            now: The present.
            more: What runs that go on have cost so far: that does not leave it before they end.
        """
        left = self.spent(now) + more
        for at, cost in self._spent:
            left -= cost
            if left < self.limit * (1 - 1e-9):
                return at + self.days * DAY_S
        return None
