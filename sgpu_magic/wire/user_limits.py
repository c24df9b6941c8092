"""Per-user limits in a pool's settings: priorities and device quotas. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from sgpu_magic.wire.devices import ANY, CPU, canonical_type

EVERYBODY = "*"
_PRIORITIES = "alice=10,*=0"
_QUOTAS = "alice=8,alice:h100=4,*=16"


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
    found: dict[str, int] = {}
    for user, value in _entries(text, _PRIORITIES):
        if user in found:
            raise ValueError(f"{user[:60]!r} has more than one priority")
        found[user] = _number(value, user, "a priority", least=None)
    return found


def read_quotas(text: str) -> dict[tuple[str, str], int]:
    """Parse the quotas in a setting: `alice=8,alice:h100=4,*=16`.

    Raises:
        ValueError: The text is invalid; the message says why.
    """
    found: dict[tuple[str, str], int] = {}
    for key, value in _entries(text, _QUOTAS):
        user, colon, kind = key.partition(":")
        device_type = canonical_type(kind) if colon else ""
        if not user or device_type == ANY:
            raise ValueError(f"{key[:60]!r} does not name a user and type; write quotas like {_QUOTAS}")
        if (user, device_type) in found:
            raise ValueError(f"{key[:60]!r} has more than one quota")
        found[user, device_type] = _number(value, key, "a quota", least=0)
    return found


def read_limits(priorities: str, quotas: str) -> UserLimits:
    """Parse the two settings.

    Raises:
        ValueError: One of them is invalid.
    """
    return UserLimits(read_priorities(priorities), read_quotas(quotas))


def quota_types(device_type: str) -> Iterable[str]:
    """Return the quota types that apply to a device type: its own, and "" for all GPUs together."""
    return (CPU,) if device_type == CPU else (device_type, "")


def _entries(text: str, example: str) -> Iterable[tuple[str, str]]:
    for entry in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not equals or not key:
            raise ValueError(f"{entry[:60]!r} is invalid; write it like {example}")
        yield key, value


def _number(text: str, key: str, what: str, *, least: int | None) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not {what} for {key[:60]!r}; it must be a whole number") from None
    if least is not None and number < least:
        raise ValueError(f"{number} is not {what} for {key[:60]!r}; it must be {least} or more")
    return number
