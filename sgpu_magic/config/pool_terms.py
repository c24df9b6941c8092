"""A pool's terms in its settings: parsers of prices, priorities, quotas and simulated devices."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import msgspec

from sgpu_magic.wire.costs import Prices
from sgpu_magic.wire.devices import ANY, CPU, canonical_type

K = TypeVar("K")
V = TypeVar("V")
_EXAMPLE = "a10=1.20,h100=4.50,team/h100=3.90"

EVERYBODY = "*"
"""The user whose limits apply to all users without their own."""

_PRIORITIES = "alice=10,*=0"
_QUOTAS = "alice=8,alice:h100=4,*=16"

MAX_SIMULATED = 1024
"""Maximum number of simulated devices of one type."""

_SIMULATED = re.compile(r"(?P<type>[^:]+):\s*(?P<count>[0-9]{1,4})\s*")
_DEVICES = "a10:4,h100:8"


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
