"""What this calendar month has used, in one line: `This month 41.2 GPU h · $118 of $300`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sgpu_magic.client import ledger_file
from sgpu_magic.client.usage import Use, usage
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError
from sgpu_magic.wire.pool_status import BudgetState, RunSummary
from sgpu_magic.wire.prices import HOUR_S, Prices, format_money

KEPT_S = 20.0
"""So long the sums are kept: they move slowly."""
# of the time, at most so much goes into adding up
_SHARE = 0.01
_NO_PRICES = Prices()


class MonthUsage:
    """This month's sums from the ledger's file, beside a living pool. Owned by one thread.

    Args:
        settings: Where the ledger lies.
        clock: Monotonic time in seconds.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._kept_until = float("-inf")
        self._sums: Use | None = None

    def line(self, now: float, budget: BudgetState | None) -> str:
        """Return the line, "" when there is nothing to tell.

        Args:
            now: Wall-clock time, seconds since the epoch.
            budget: The pool's, None without one.
        """
        began = self._clock()
        if began >= self._kept_until:
            self._sums = self._read(now)
            took = self._clock() - began
            self._kept_until = began + max(KEPT_S, took / _SHARE)
        return "" if self._sums is None else month_line(self._sums, budget)

    def _read(self, now: float) -> Use | None:
        since = month_began(now)
        try:
            return month_sums(ledger_file.runs_since(self._settings, since), since, now)
        except PoolError:
            # who looks at the runs is told
            return None


def month_began(now: float) -> float:
    """Return when the calendar month of `now` began; both in seconds since the epoch."""
    local = time.localtime(now)
    return time.mktime((local.tm_year, local.tm_mon, 1, 0, 0, 0, 0, 0, -1))


def month_sums(rows: Sequence[RunSummary], since: float, now: float) -> Use:
    """Return what runs have used that ended since then, or go on."""
    return usage(rows, since, now, "user", _NO_PRICES, "").total


def month_line(used: Use, budget: BudgetState | None) -> str:
    """Return the line, "" when nothing was used and no budget is there to be told of."""
    parts: list[str] = []
    if used.gpu_s:
        marked = ""
        if used.simulated_s:
            is_all = used.simulated_s >= used.gpu_s - 0.5
            marked = " (simulated)" if is_all else f", {_hours(used.simulated_s)} simulated"
        parts.append(f"{_hours(used.gpu_s)} GPU h{marked}")
    cost = " + ".join(round_money(amount, currency) for currency, amount in sorted(used.cost.items()))
    if budget is not None:
        spent, limit = (round_money(amount, budget.currency) for amount in (budget.spent, budget.limit))
        if spent == (cost or round_money(0.0, budget.currency)):
            parts.append(f"{spent} of {limit}")
        else:
            # its days are others than the month's
            parts += [*([cost] if cost else []), f"budget {spent} of {limit} in {budget.days:g} d"]
    elif cost:
        parts.append(cost)
    return f"This month {' · '.join(parts)}" if parts else ""


def _hours(seconds: float) -> str:
    hours = seconds / HOUR_S
    return f"{hours:,.{2 if hours < 0.995 else 1}f}"


def round_money(amount: float, currency: str) -> str:
    """Return `$118`, `$0.37`: no cents where nobody misses them."""
    if amount >= 99.5:
        amount = float(round(amount))
    text = format_money(amount, currency)
    return text.replace(".00", "", 1) if amount >= 1 and amount == round(amount) else text
