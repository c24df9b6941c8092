"""The prices of one pool. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from sgpu_magic.config import Settings
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.metering import device_count
from sgpu_magic.wire.prices import Prices, format_money, read_prices

_NONE = Prices()


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
