"""The result of a check of `sgpu doctor`."""

from __future__ import annotations

import enum
import functools

import msgspec


class Level(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True):
    """One result of a check.

    Args:
        level: A problem prevents runs from working, a warning may.
        name: What was checked.
        text: The result, or what is wrong.
        remedy: What to do about it; "" if there is nothing to do, or if `text` is an error message with the remedy.
    """

    level: Level
    name: str
    text: str
    remedy: str = ""


ok = functools.partial(Finding, Level.OK)
warning = functools.partial(Finding, Level.WARNING)
problem = functools.partial(Finding, Level.PROBLEM)
