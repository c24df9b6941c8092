"""What one check of `sgpu doctor` says."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor.

    Args:
        level: A problem keeps runs from working, a warning may.
        name: What was looked at.
        text: What was found.
        remedy: What to do about it; "" when nothing has to be done.
    """

    level: Level
    name: str
    text: str
    remedy: str = ""


def ok(name: str, text: str) -> Finding:
    return Finding(Level.OK, name, text)


def warning(name: str, text: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, name, text, remedy)


def problem(name: str, text: str, remedy: str) -> Finding:
    return Finding(Level.PROBLEM, name, text, remedy)
