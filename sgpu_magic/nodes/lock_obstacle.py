"""Why a device can't be locked."""

from __future__ import annotations

from typing import NamedTuple

SOMEBODY = "another process"
"""The holder if nothing is known about it."""


class Obstacle(NamedTuple):
    """Why a device can't be locked. One of the two is set.

    Args:
        holder: Who holds it, for example `process 4242 of user alice`.
        problem: Why its lock can't be used by anybody here, and the remedy, as one paragraph.
    """

    holder: str = ""
    problem: str | None = None
