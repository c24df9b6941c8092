"""The terms of a pool in its settings: prices, priorities, quotas, simulated devices; billing by the second. No I/O.

Metering of a run or session starts when its ranks are started (STARTING) and stops at its end. It includes all attempts
and the time between them. Each second that has begun is billed in full. Cells in a session cost nothing themselves:
the session pays for the devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

import msgspec

from sgpu_magic.wire.devices import ANY, CPU, canonical_type

if TYPE_CHECKING:
    # every command parses the prices in the settings, and must not load the messages for that
    from sgpu_magic.wire.devices import Lease
    from sgpu_magic.wire.pool_status import RunSummary

K = TypeVar("K")
V = TypeVar("V")

HOUR_S = 3600.0
_SIGNS = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥", "INR": "₹", "KRW": "₩"}
_EXAMPLE = "a10=1.20,h100=4.50,team/h100=3.90"

EVERYBODY = "*"
_PRIORITIES = "alice=10,*=0"
_QUOTAS = "alice=8,alice:h100=4,*=16"

MAX_SIMULATED = 1024
"""Maximum number of simulated devices of one type."""

_SIMULATED = re.compile(r"(?P<type>[^:]+):\s*(?P<count>[0-9]{1,4})\s*")
_DEVICES = "a10:4,h100:8"


# ---------------------------------------------------------------- prices


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
    wrong = f"is not a price; write prices like {_EXAMPLE}"

    def price(key: str, value: str) -> tuple[tuple[str, str], float]:
        pool, _, kind = key.rpartition("/")
        if not kind or (not pool and "/" in key):
            raise ValueError(f"{f'{key}={value}'[:60]!r} {wrong}")
        if (device_type := canonical_type(kind)) == ANY:
            raise ValueError(f"{ANY!r} can't have a price; name each type")
        return (pool, device_type), _amount(value, key)

    return Prices(_read(text, "price", wrong, price))


def prices_text(table: Mapping[str, object]) -> str:
    """Return the setting's text for a table of prices: `{"a10": 1.2, "team": {"h100": 3.9}}`.

    Raises:
        ValueError: A price is not a number.
    """
    return ",".join(f"{key}={value}" for key, value in _table_entries(table))


def _table_entries(table: Mapping[str, object], pool: str = "") -> Iterable[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and not pool:
            yield from _table_entries({str(name): each for name, each in value.items()}, key)  # pyright: ignore
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"the price of {key[:60]!r} is {value!r}, not a number")
        else:
            yield (f"{pool}/{key}" if pool else key), value


def _read(text: str, what: str, wrong: str, read: Callable[[str, str], tuple[K, V]]) -> dict[K, V]:
    """Parse a setting such as `a=1,b=2`.

    Args:
        text: The setting.
        what: What an entry is, such as `price`.
        wrong: What is wrong with an entry without a key or a value.
        read: Parses an entry's key and value.

    Raises:
        ValueError: The text is invalid; the message says why.
    """
    found: dict[K, V] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        key, equals, value = map(str.strip, entry.partition("="))
        if not equals or not key:
            raise ValueError(f"{entry[:60]!r} {wrong}")
        name, number = read(key, value)
        if name in found:
            raise ValueError(f"{key[:60]!r} has more than one {what}")
        found[name] = number
    return found


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


# ---------------------------------------------------------------- priorities and quotas


class UserLimits(msgspec.Struct, frozen=True):
    """Limits of the users of one pool.

    Args:
        priorities: Priority by user, `*` for all others; users not listed have 0. Higher comes first.
        quotas: Maximum number of devices at once, by user (`*` for all others) and canonical type; type "" is all types
            of GPU together.
    """

    priorities: Mapping[str, int] = msgspec.field(default_factory=dict[str, int])
    quotas: Mapping[tuple[str, str], int] = msgspec.field(default_factory=dict[tuple[str, str], int])

    def priority(self, user: str) -> int:
        """Return the user's priority, 0 if none is set."""
        return self.priorities.get(user, self.priorities.get(EVERYBODY, 0))

    def quota(self, user: str, device_type: str = "") -> int | None:
        """Return how many devices the user may have at once, None for no limit.

        Args:
            user: The user.
            device_type: The type; `cpu` for slots, "" for all types of GPU together.
        """
        own = self.quotas.get((user, device_type))
        return self.quotas.get((EVERYBODY, device_type)) if own is None else own


def read_priorities(text: str) -> dict[str, int]:
    """Parse the priorities in a setting: `alice=10,*=0`.

    Raises:
        ValueError: The text is invalid; the message says why.
    """
    wrong = f"is invalid; write it like {_PRIORITIES}"
    return _read(text, "priority", wrong, lambda user, value: (user, _number(value, user, "a priority")))


def read_quotas(text: str) -> dict[tuple[str, str], int]:
    """Parse the quotas in a setting: `alice=8,alice:h100=4,*=16`.

    Raises:
        ValueError: The text is invalid; the message says why.
    """

    def quota(key: str, value: str) -> tuple[tuple[str, str], int]:
        user, colon, kind = key.partition(":")
        device_type = canonical_type(kind) if colon else ""
        if not user or device_type == ANY:
            raise ValueError(f"{key[:60]!r} does not name a user and type; write quotas like {_QUOTAS}")
        return (user, device_type), _number(value, key, "a quota", least=0)

    return _read(text, "quota", f"is invalid; write it like {_QUOTAS}", quota)


def read_limits(priorities: str, quotas: str) -> UserLimits:
    """Parse the two settings.

    Raises:
        ValueError: One of them is invalid.
    """
    return UserLimits(read_priorities(priorities), read_quotas(quotas))


def quota_types(device_type: str) -> Iterable[str]:
    """Return the quota types that apply to a device type: its own, and "" for all GPUs together."""
    return (CPU,) if device_type == CPU else (device_type, "")


def read_simulated(text: str) -> dict[str, int]:
    """Parse the simulated devices in a setting: `a10:4,h100:8`.

    Returns:
        The number of devices of each type.

    Raises:
        ValueError: The text is invalid; the message says why.
    """
    found: dict[str, int] = {}
    for part in text.split(",") if text.strip() else ():
        match = _SIMULATED.fullmatch(part)
        count = int(match["count"]) if match else 0
        if not match or not 1 <= count <= MAX_SIMULATED:
            wanted = f"a type, a colon and a count from 1 to {MAX_SIMULATED}"
            raise ValueError(f"{part.strip()[:60]!r} is not {wanted}; write it like {_DEVICES}")
        kind = canonical_type(match["type"])
        if kind in (CPU, ANY):
            raise ValueError(f"{kind} can't be simulated; write it like {_DEVICES}")
        if kind in found:
            raise ValueError(f"{kind} is listed twice")
        found[kind] = count
    return found


def _number(text: str, key: str, what: str, *, least: float = -math.inf) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not {what} for {key[:60]!r}; it must be a whole number") from None
    if number < least:
        raise ValueError(f"{number} is not {what} for {key[:60]!r}; it must be {least} or more")
    return number


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
    has_meter = run.device_type != CPU or run.hourly is not None
    if run.gpu_s is not None or run.metered_at is None or run.state.is_final or not has_meter:
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
