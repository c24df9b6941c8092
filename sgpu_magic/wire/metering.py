"""How devices are billed: by the second, for as long as a lease holds them for ranks. No I/O, no clock.

The meter of a run or session begins when its ranks are being started (STARTING) and stops at its end; attempts and the
time between them count. Each second that has begun counts whole. What runs in a session costs nothing of its own: the
session pays for the devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from sgpu_magic.wire.device_types import CPU
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.pool_status import RunSummary
from sgpu_magic.wire.prices import HOUR_S


def billed_s(seconds: float) -> int:
    """Return the seconds that are billed of a time on the meter: at least one."""
    # what a clock adds to a whole second is no second
    return max(1, math.ceil(seconds - 1e-6))


def device_count(lease: Lease) -> int:
    """Return how many devices of its type a lease takes; of `cpu` the slots. Simulated ones count like real ones."""
    return len(lease.uuids) or (lease.cpu_slots if lease.device_type == CPU else lease.ranks) or lease.ranks


def cost_of(hourly: float | None, seconds: float) -> float | None:
    """Return what `seconds` on the meter cost at `hourly` for all devices together; None without a price."""
    return None if hourly is None else hourly * billed_s(seconds) / HOUR_S


def cost_so_far(run: RunSummary, now: float) -> float | None:
    """Return what a run in the ledger has cost, also while it goes on; None where it costs nothing of its own.

    Args:
        run: Its row.
        now: Wall-clock time, seconds since the epoch.
    """
    if run.cost is not None or run.metered_at is None or run.state.is_final:
        return run.cost
    return cost_of(run.hourly, now - run.metered_at)


def gpu_s_so_far(run: RunSummary, now: float) -> float | None:
    """Return the seconds of devices that were billed; arguments as for `cost_so_far`."""
    if run.gpu_s is not None or run.metered_at is None or run.state.is_final or not _has_meter(run):
        return run.gpu_s
    return float(run.ranks * billed_s(now - run.metered_at))


def idle_seconds(since: float, until: float, cells: Iterable[tuple[float, float | None]]) -> float:
    """Return for how many of the seconds from `since` to `until` no cell ran.

    Args:
        since: When the session was connected, seconds of any one clock.
        until: When it ended, or now.
        cells: Beginning and end of each cell in it, in any order; None is one that goes on. They may overlap.
    """
    idle, at = 0.0, since
    for began, ended in sorted(cells, key=lambda cell: cell[0]):
        idle += max(0.0, min(began, until) - at)
        at = max(at, until if ended is None else ended)
    return idle + max(0.0, until - at)


def _has_meter(run: RunSummary) -> bool:
    return run.device_type != CPU or run.hourly is not None
