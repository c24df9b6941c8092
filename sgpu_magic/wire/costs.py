"""What devices cost: the prices in the settings, billing by the second, sums of money in words. No I/O, no clock.

The meter of a run or session begins when its ranks are being started (STARTING) and stops at its end; attempts and the
time between them count. Each second that has begun counts whole. What runs in a session costs nothing of its own: the
session pays for the devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.wire.devices import ANY, CPU, canonical_type

if TYPE_CHECKING:
    # the settings read prices, and every command reads the settings: it need not load the messages
    from sgpu_magic.wire.devices import Lease
    from sgpu_magic.wire.pool_status import RunSummary

HOUR_S = 3600.0
_SIGNS = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥", "INR": "₹", "KRW": "₩"}
_EXAMPLE = "a10=1.20,h100=4.50,team/h100=3.90"


class Prices(msgspec.Struct, frozen=True):
    """Price of one device for an hour, by pool ("" for every pool) and canonical type."""

    hourly: Mapping[tuple[str, str], float] = msgspec.field(default_factory=dict[tuple[str, str], float])

    def __bool__(self) -> bool:
        return bool(self.hourly)

    def of(self, pool: str, device_type: str) -> float | None:
        """Return the price of one device for an hour: the pool's own before everybody's; None without one."""
        own = self.hourly.get((pool, device_type))
        return self.hourly.get(("", device_type)) if own is None else own

    def types(self, pool: str) -> list[str]:
        """Return the types that have a price in the pool."""
        return sorted({device_type for where, device_type in self.hourly if where in ("", pool)})


def read_prices(text: str) -> Prices:
    """Return the prices that stand in a setting: `a10=1.20,h100=4.50,team/h100=3.90`.

    Raises:
        ValueError: It means nothing; the message says what.
    """
    hourly: dict[tuple[str, str], float] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in entry.partition("="))
        pool, _, kind = key.rpartition("/")
        if not equals or not kind or (not pool and "/" in key):
            raise ValueError(f"{entry[:60]!r} is no price: {_EXAMPLE} has three")
        device_type = canonical_type(kind)
        if device_type == ANY:
            raise ValueError(f"{ANY!r} is no type that has a price; name each type")
        if (pool, device_type) in hourly:
            raise ValueError(f"{key[:60]!r} has more than one price")
        hourly[pool, device_type] = _amount(value, key)
    return Prices(hourly)


def prices_text(table: Mapping[str, object]) -> str:
    """Return a table of prices as the setting's text: `{"a10": 1.2, "team": {"h100": 3.9}}`.

    Raises:
        ValueError: A price is no number.
    """
    return ",".join(f"{key}={value}" for key, value in _entries(table))


def _entries(table: Mapping[str, object], pool: str = "") -> Iterable[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and not pool:
            yield from _entries({str(name): each for name, each in value.items()}, key)  # pyright: ignore
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"the price of {key[:60]!r} is {value!r}, and not a number")
        else:
            yield (f"{pool}/{key}" if pool else key), value


def _amount(text: str, key: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = math.nan
    if not (math.isfinite(amount) and amount >= 0):
        raise ValueError(f"the price of {key[:60]!r} is {text[:40]!r}; a number of 0 or more is needed")
    return amount


def is_currency(text: str) -> bool:
    """Whether `text` can stand for a currency: `USD`, `€`, `credits`."""
    return 0 < len(text) <= 12 and text.isprintable() and not any(char.isdigit() or char.isspace() for char in text)


def format_money(amount: float, currency: str) -> str:
    """Return `$0.37`, `$1,240.00`, `3.10 CHF`; of few cents two digits: `$0.015`, `$0.0042`."""
    if 0 < amount < 1e-6:
        return f"under {_with_sign('0.000001', currency)}"
    if amount == 0 or amount >= 0.0995:
        return _with_sign(f"{amount:,.2f}", currency)
    digits = f"{float(f'{amount:.1e}'):.6f}".rstrip("0")
    return _with_sign(digits.ljust(4, "0"), currency)


def _with_sign(digits: str, currency: str) -> str:
    sign = _SIGNS.get(currency, currency if len(currency) == 1 else "")
    return f"{sign}{digits}" if sign else f"{digits} {currency}".rstrip()


# ---------------------------------------------------------------- the meter


def billed_s(seconds: float) -> int:
    """Return the seconds that are billed of a time on the meter: at least one."""
    # what a clock adds to a whole second is no second
    return max(1, math.ceil(seconds - 1e-6))


def device_count(lease: Lease) -> int:
    """Return how many devices of its type a lease takes; of `cpu` the slots. Simulated ones count like real ones."""
    return len(lease.uuids) or (lease.cpu_slots if lease.device_type == CPU else lease.ranks) or lease.ranks


def cost_of(hourly: float | None, seconds: float) -> float | None:
    """Return what `seconds` on the meter cost at `hourly` for all devices together; None without a price."""
    return None if hourly is None else hourly * billed_s(seconds) / HOUR_S


def cost_so_far(run: RunSummary, now: float) -> float | None:
    """Return what a run in the ledger has cost, also while it goes on; None where it costs nothing of its own.

    Args:
        run: Its row.
        now: Wall-clock time, seconds since the epoch.
    """
    if run.cost is not None or run.metered_at is None or run.state.is_final:
        return run.cost
    return cost_of(run.hourly, now - run.metered_at)


def gpu_s_so_far(run: RunSummary, now: float) -> float | None:
    """Return the seconds of devices that were billed; arguments as for `cost_so_far`."""
    if run.gpu_s is not None or run.metered_at is None or run.state.is_final or not _has_meter(run):
        return run.gpu_s
    return float(run.ranks * billed_s(now - run.metered_at))


def idle_seconds(since: float, until: float, cells: Iterable[tuple[float, float | None]]) -> float:
    """Return for how many of the seconds from `since` to `until` no cell ran.

    Args:
        since: When the session was connected, seconds of any one clock.
        until: When it ended, or now.
        cells: Beginning and end of each cell in it, in any order; None is one that goes on. They may overlap.
    """
    idle, at = 0.0, since
    for began, ended in sorted(cells, key=lambda cell: cell[0]):
        idle += max(0.0, min(began, until) - at)
        at = max(at, until if ended is None else ended)
    return idle + max(0.0, until - at)


def _has_meter(run: RunSummary) -> bool:
    return run.device_type != CPU or run.hourly is not None
