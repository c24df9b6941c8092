"""Device costs: prices from the settings, billing by the second, formatting of amounts. No I/O, no clock.

Metering of a run or session starts when its ranks are started (STARTING) and stops at its end. It includes all attempts
and the time between them. Each second that has begun is billed in full. Cells in a session cost nothing themselves:
the session pays for the devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.wire.devices import ANY, CPU, canonical_type

if TYPE_CHECKING:
    # every command reads the settings, which parse prices: loading the messages for that is not needed
    from sgpu_magic.wire.devices import Lease
    from sgpu_magic.wire.pool_status import RunSummary

HOUR_S = 3600.0
_SIGNS = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥", "INR": "₹", "KRW": "₩"}
_EXAMPLE = "a10=1.20,h100=4.50,team/h100=3.90"


class Prices(msgspec.Struct, frozen=True):
    """Hourly price of one device, by pool ("" for every pool) and canonical type."""

    hourly: Mapping[tuple[str, str], float] = msgspec.field(default_factory=dict[tuple[str, str], float])

    def __bool__(self) -> bool:
        return bool(self.hourly)

    def of(self, pool: str, device_type: str) -> float | None:
        """Return the hourly price of one device: the pool's own, else the price for every pool, else None."""
        own = self.hourly.get((pool, device_type))
        return self.hourly.get(("", device_type)) if own is None else own

    def types(self, pool: str) -> list[str]:
        """Return the types that have a price in the pool."""
        return sorted({device_type for where, device_type in self.hourly if where in ("", pool)})


def read_prices(text: str) -> Prices:
    """Parse the prices in a setting: `a10=1.20,h100=4.50,team/h100=3.90`.

    Raises:
        ValueError: The text is invalid; the message says why.
    """
    hourly: dict[tuple[str, str], float] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in entry.partition("="))
        pool, _, kind = key.rpartition("/")
        if not equals or not kind or (not pool and "/" in key):
            raise ValueError(f"{entry[:60]!r} is not a price; write prices like {_EXAMPLE}")
        device_type = canonical_type(kind)
        if device_type == ANY:
            raise ValueError(f"{ANY!r} can't have a price; name each type")
        if (pool, device_type) in hourly:
            raise ValueError(f"{key[:60]!r} has more than one price")
        hourly[pool, device_type] = _amount(value, key)
    return Prices(hourly)


def prices_text(table: Mapping[str, object]) -> str:
    """Return the setting's text for a table of prices: `{"a10": 1.2, "team": {"h100": 3.9}}`.

    Raises:
        ValueError: A price is not a number.
    """
    return ",".join(f"{key}={value}" for key, value in _entries(table))


def _entries(table: Mapping[str, object], pool: str = "") -> Iterable[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and not pool:
            yield from _entries({str(name): each for name, each in value.items()}, key)  # pyright: ignore
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"the price of {key[:60]!r} is {value!r}, not a number")
        else:
            yield (f"{pool}/{key}" if pool else key), value


def _amount(text: str, key: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = math.nan
    if not (math.isfinite(amount) and amount >= 0):
        raise ValueError(f"the price of {key[:60]!r} is {text[:40]!r}; it must be a number of 0 or more")
    return amount


def is_currency(text: str) -> bool:
    """Whether `text` is valid as a currency: `USD`, `€`, `credits`."""
    return 0 < len(text) <= 12 and text.isprintable() and not any(char.isdigit() or char.isspace() for char in text)


def format_money(amount: float, currency: str) -> str:
    """Format an amount: `$0.37`, `$1,240.00`, `3.10 CHF`. A few cents have two digits: `$0.015`, `$0.0042`."""
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
    """Return metered seconds rounded up to whole billed seconds, at least one."""
    # tolerates clock error just above a whole second
    return max(1, math.ceil(seconds - 1e-6))


def device_count(lease: Lease) -> int:
    """Return how many devices a lease has, or CPU slots for `cpu`. Simulated devices count like real ones."""
    return len(lease.uuids) or (lease.cpu_slots if lease.device_type == CPU else lease.ranks) or lease.ranks


def cost_of(hourly: float | None, seconds: float) -> float | None:
    """Return the cost of `seconds` of metered time at `hourly` for all devices together; None without a price."""
    return None if hourly is None else hourly * billed_s(seconds) / HOUR_S


def cost_so_far(run: RunSummary, now: float) -> float | None:
    """Return the cost of a run, up to now if it is active; None if it has no cost of its own.

    Args:
        run: The run's row in the ledger.
        now: Wall-clock time, seconds since the epoch.
    """
    if run.cost is not None or run.metered_at is None or run.state.is_final:
        return run.cost
    return cost_of(run.hourly, now - run.metered_at)


def gpu_s_so_far(run: RunSummary, now: float) -> float | None:
    """Return the billed device-seconds of a run; arguments as for `cost_so_far`."""
    if run.gpu_s is not None or run.metered_at is None or run.state.is_final or not _has_meter(run):
        return run.gpu_s
    return float(run.ranks * billed_s(now - run.metered_at))


def idle_seconds(since: float, until: float, cells: Iterable[tuple[float, float | None]]) -> float:
    """Return the number of seconds from `since` to `until` in which no cell ran.

    Args:
        since: When the session was connected, in seconds of any one clock.
        until: When it ended, or now.
        cells: Start and end of each of its cells, in any order; the end of a running cell is None. They may overlap.
    """
    idle, at = 0.0, since
    for began, ended in sorted(cells, key=lambda cell: cell[0]):
        idle += max(0.0, min(began, until) - at)
        at = max(at, until if ended is None else ended)
    return idle + max(0.0, until - at)


def _has_meter(run: RunSummary) -> bool:
    return run.device_type != CPU or run.hourly is not None
