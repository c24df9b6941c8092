"""What runs cost: hourly prices, billing by the second. No I/O.

Metering of a run or session starts when its ranks are started (STARTING) and stops at its end. It includes all attempts
and the time between them. Each second that has begun is billed in full. Cells in a session cost nothing themselves:
the session pays for the devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.wire.devices import CPU

if TYPE_CHECKING:
    # every command parses the prices in the settings, which must not require loading the messages
    from sgpu_magic.wire.devices import Lease
    from sgpu_magic.wire.pool_status import RunSummary


HOUR_S = 3600.0


class Prices(msgspec.Struct, frozen=True):
    """Hourly price of one device, by pool ("" for every pool) and canonical type."""

    hourly: Mapping[tuple[str, str], float] = msgspec.field(default_factory=dict[tuple[str, str], float])

    def __bool__(self) -> bool:
        return bool(self.hourly)

    def price_of(self, pool: str, device_type: str) -> float | None:
        """Return the hourly price of one device: the pool's own, else the price for every pool, else None."""
        own = self.hourly.get((pool, device_type))
        return self.hourly.get(("", device_type)) if own is None else own

    def types(self, pool: str) -> list[str]:
        """Return the types that have a price in the pool."""
        return sorted({device_type for where, device_type in self.hourly if where in ("", pool)})


def is_currency(text: str) -> bool:
    """Whether `text` is valid as a currency: `USD`, `€`, `credits`."""
    return 0 < len(text) <= 12 and text.isprintable() and not any(char.isdigit() or char.isspace() for char in text)


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
        since: When the session was connected, in seconds; all times are from the same clock.
        until: When it ended, or now.
        cells: Start and end of each of its cells, in any order; the end of a running cell is None. They may overlap.
    """
    idle, at = 0.0, since
    for began, ended in sorted(cells, key=lambda cell: cell[0]):
        idle += max(0.0, min(began, until) - at)
        at = max(at, until if ended is None else ended)
    return idle + max(0.0, until - at)
