"""What a run's time on the meter comes to. Pure.

`wire.metering` has the rules that views share.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgpu_magic.wire.device_types import CPU
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.metering import billed_s, cost_of, device_count


@dataclass(frozen=True, slots=True)
class Bill:
    """What a run was billed.

    Args:
        gpu_s: Seconds of devices, of all together; None on CPU slots without a price.
        cost: Theirs; None without a price.
    """

    gpu_s: float | None = None
    cost: float | None = None


NOTHING = Bill()


class IdleMeter:
    """For how long no cell ran in a session; seconds of any one clock.

    Args:
        since: From when on it counts.
        seconds: What was counted before.
    """

    def __init__(self, since: float, seconds: float = 0.0) -> None:
        self._since = since
        self._seconds = seconds
        self._running: set[str] = set()

    def began(self, cell: str, now: float) -> None:
        """A cell begins."""
        self._seconds = self.seconds(now)
        self._running.add(cell)

    def ended(self, cell: str, now: float) -> None:
        """A cell ends."""
        if cell in self._running:
            self._running.discard(cell)
            self._since = now

    def seconds(self, now: float) -> float:
        """Return what was counted until now."""
        return self._seconds if self._running else self._seconds + max(0.0, now - self._since)


def bill(lease: Lease, hourly: float | None, seconds: float) -> Bill:
    """Return what a lease's time comes to.

    Args:
        lease: The run's.
        hourly: Price of all its devices for an hour, None without one.
        seconds: On the meter.
    """
    if lease.device_type == CPU and hourly is None:
        return NOTHING
    return Bill(float(device_count(lease) * billed_s(seconds)), cost_of(hourly, seconds))
