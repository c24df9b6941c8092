"""What devices cost, what a run's time comes to, and what a pool's runs may cost together. Pure.

`wire.costs` has the rules that views share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from sgpu_magic.config import Settings
from sgpu_magic.wire.costs import Prices, billed_s, cost_of, device_count, format_money, read_prices
from sgpu_magic.wire.devices import CPU, Lease

_NONE = Prices()
DAY_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Tariff:
    """What devices cost in a pool.

    Args:
        prices: The settings' table.
        pool: The pool's name.
        currency: Of the prices.
    """

    prices: Prices = _NONE
    pool: str = "local"
    currency: str = "USD"

    def __bool__(self) -> bool:
        return bool(self.prices)

    def of(self, device_type: str) -> float | None:
        """Return the price of one device for an hour, None without one."""
        return self.prices.of(self.pool, device_type)

    def hourly(self, lease: Lease) -> float | None:
        """Return the price of all of a lease's devices for an hour, None without one."""
        price = self.of(lease.device_type)
        return None if price is None else price * device_count(lease)

    def money(self, amount: float) -> str:
        """Return the amount in words."""
        return format_money(amount, self.currency)

    def priced(self) -> str:
        """Return which types have a price: `a10, h100`."""
        return ", ".join(self.prices.types(self.pool)) or "nothing"


def tariff_of(settings: Settings, pool: str = "local") -> Tariff:
    """Return the prices of a pool."""
    return Tariff(read_prices(settings.prices), pool, settings.currency)


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


@dataclass(frozen=True, slots=True)
class Bill:
    """What a run was billed.

    Args:
        gpu_s: Seconds of devices, of all together; None on CPU slots without a price.
        cost: Theirs; None without a price.
    """

    gpu_s: float | None = None
    cost: float | None = None


NOTHING = Bill()


class IdleMeter:
    """For how long no cell ran in a session; seconds of any one clock.

    Args:
        since: From when on it counts.
        seconds: What was counted before.
    """

    def __init__(self, since: float, seconds: float = 0.0) -> None:
        self._since = since
        self._seconds = seconds
        self._running: set[str] = set()

    def began(self, cell: str, now: float) -> None:
        """A cell begins."""
        self._seconds = self.seconds(now)
        self._running.add(cell)

    def ended(self, cell: str, now: float) -> None:
        """A cell ends."""
        if cell in self._running:
            self._running.discard(cell)
            self._since = now

    def seconds(self, now: float) -> float:
        """Return what was counted until now."""
        return self._seconds if self._running else self._seconds + max(0.0, now - self._since)


def bill(lease: Lease, hourly: float | None, seconds: float) -> Bill:
    """Return what a lease's time comes to.

    Args:
        lease: The run's.
        hourly: Price of all its devices for an hour, None without one.
        seconds: On the meter.
    """
    if lease.device_type == CPU and hourly is None:
        return NOTHING
    return Bill(float(device_count(lease) * billed_s(seconds)), cost_of(hourly, seconds))
