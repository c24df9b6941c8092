"""Durations as people write them."""

from __future__ import annotations

import re

from sgpu_magic.config import SEVEN_DAYS_S
from sgpu_magic.errors import UsageError

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)?")
_UNITS = {None: 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def duration_s(option: str, value: str | float) -> float:
    """Read `90s`, `30m`, `2h`, `1d`, `0`; a bare number is seconds.

    Args:
        option: What it was given for, such as `--timeout`.
        value: The text or number.

    Raises:
        UsageError: It is none of these.
    """
    found = _DURATION.fullmatch(str(value).strip().lower())
    if found is None:
        raise UsageError(f"{option} is {value!r}; write a number with its unit: 90s, 30m, 2h, 1d.")
    return float(found[1]) * _UNITS[found[2]]


def optional_s(option: str, value: str | float | None) -> float | None:
    """Read a duration that may be left out."""
    return None if value is None else duration_s(option, value)


def timeout_s(option: str, value: str | float | None) -> float:
    """Read a run's longest running time; 7 days, which is also the most, when it is left out.

    Raises:
        UsageError: It is no duration, or more than 7 days.
    """
    if value is None:
        return SEVEN_DAYS_S
    seconds = duration_s(option, value)
    if not 0 < seconds <= SEVEN_DAYS_S:
        raise UsageError(f"{option} {value} is not possible: a run may take more than 0 s and at most 7 days (7d).")
    return seconds
