"""What a run costs, in words, while it goes on and when it has ended; "" where nothing is to be said."""

from __future__ import annotations

from sgpu_magic.views.view import RunView
from sgpu_magic.wire.device_types import CPU
from sgpu_magic.wire.metering import cost_of
from sgpu_magic.wire.prices import HOUR_S, format_money

# of a cell the part of its session's cost is worth a word from here on
_LEAST_SHARE = 0.005
# and the time of devices without a price, in seconds
_LEAST_S = 36.0
# less is told in seconds
_IN_HOURS_S = 360.0


def cost_text(view: RunView, now: float | None = None) -> str:
    """Return what a run that goes on has cost so far: `$0.37`, `$0.37 (simulated)`, `$0.05 of session work`.

    Args:
        view: The run.
        now: Time by the views' clock (`steady_time`); the present when left out.
    """
    if view.is_final or view.left or view.hourly is None:
        return ""
    if view.spec.session:
        return _share(view, now)
    seconds = view.metered_s(now)
    cost = None if seconds is None else cost_of(view.hourly, seconds)
    return "" if cost is None else format_money(cost, view.currency) + mark(view)


def billed_text(view: RunView) -> str:
    """Return what a run that has ended was billed: `$0.60 for 0.24 GPU h`, without a price `0.24 GPU h`."""
    ended = view.ended
    if ended is None:
        return ""
    if view.spec.session:
        return _share(view)
    if ended.gpu_s is None:
        return ""
    if ended.cost is None:
        return device_time(view, ended.gpu_s) + mark(view) if ended.gpu_s >= _LEAST_S else ""
    return f"{format_money(ended.cost, ended.currency)} for {device_time(view, ended.gpu_s)}{mark(view)}"


def device_time(view: RunView, seconds: float) -> str:
    """Return `0.24 GPU h`, `8 GPU s`: devices' seconds of all together; CPU slots are named so."""
    device = "slot" if view.lease is not None and view.lease.device_type == CPU else "GPU"
    if seconds < _IN_HOURS_S:
        return f"{seconds:.0f} {device} s"
    hours = seconds / HOUR_S
    return f"{hours:.{1 if hours >= 9.95 else 2}f} {device} h"


def mark(view: RunView) -> str:
    """Return that nothing is paid for the devices, where they are simulated."""
    return " (simulated)" if view.lease is not None and view.lease.simulated else ""


def _share(view: RunView, now: float | None = None) -> str:
    """What runs in a session costs nothing of its own: return its part of what the session costs."""
    if view.hourly is None:
        return ""
    seconds = view.elapsed_s(now)
    cost = view.hourly * seconds / HOUR_S
    return f"{format_money(cost, view.currency)} of its session{mark(view)}" if cost >= _LEAST_SHARE else ""
