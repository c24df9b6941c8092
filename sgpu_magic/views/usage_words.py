"""What a run used and what it costs, in words and as a record, while it goes on and when it has ended."""

from __future__ import annotations

import msgspec

from sgpu_magic.views.fold import RunView
from sgpu_magic.views.units import format_gb, format_ranks, format_seconds
from sgpu_magic.views.usage import Drawn, RankUsage, RunUsage, use_text
from sgpu_magic.wire.costs import HOUR_S, cost_of, format_money
from sgpu_magic.wire.devices import CPU
from sgpu_magic.wire.rank_events import IDLE_GPU_PCT

# shorter idleness is how a run begins
_IDLE_S = 60.0
# a GPU that was mostly busy has had its pauses: only a low mean is worth a sentence
_LOW_MEAN_PCT = 25.0
_DIGITS = {"%": 0, "W": 0, "°C": 0}
_KEYS = {
    "GPU": "utilization_pct",
    "GPU, this run": "own_utilization_pct",
    "power": "power_w",
    "temperature": "temperature_c",
    "CPU": "cpu_cores",
}


def busy_text(usage: RunUsage) -> str:
    """Return `GPUs busy 91 %`, "" where no GPU tells it."""
    busy = usage.busy_pct
    if busy is None:
        return ""
    return f"{'GPU' if len(usage.ranks) == 1 else 'GPUs'} busy {busy:.0f} %"


def whole_text(usage: RankUsage) -> str:
    """Return `94 % · 18.2 GB`: the mean of what it did and the most memory in use; "" when nothing was told."""
    latest = usage.latest
    if latest is None:
        return ""
    cores = next((drawn.series.mean for drawn in usage.curves() if drawn.name == "CPU"), None)
    whole = msgspec.structs.replace(
        latest,
        utilization_pct=usage.mean_utilization_pct,
        used_bytes=usage.peak_used_bytes,
        cpu_cores=cores,
        rss_bytes=usage.peak_used_bytes if latest.kind == "cpu" else latest.rss_bytes,
        problem="",
    )
    return use_text(whole)


def curve_text(drawn: Drawn) -> str:
    """Return `GPU: 94 % on average, 98 % at most`."""
    mean, peak = drawn.series.mean, _peak(drawn)
    if mean is None or peak is None:
        return f"{drawn.name}: not told"
    return f"{drawn.name}: {_value(mean, drawn.unit)} on average, {_value(peak, drawn.unit)} at most"


def measured_lines(usage: RankUsage) -> list[str]:
    """Return everything that was measured of a rank, a line each."""
    latest = usage.latest
    if latest is None:
        return []
    where = {"gpu": "", "mig": "a MIG slice, ", "cpu": "CPU"}.get(latest.kind, "")
    if latest.kind == "cpu" and latest.uuid:
        where = "CPU stands in for a simulated device"
    device = f"device: {where}{latest.uuid if latest.kind != 'cpu' else ''}"
    lines = [device, *([latest.problem] if latest.problem else [])]
    for drawn in usage.curves():
        line = curve_text(drawn)
        if drawn.name == "memory" and drawn.top and drawn.series.mean is not None:
            line += f", of {format_gb(drawn.top * 1e9)}"
        lines.append(line)
    return lines


def idle_sentences(usage: RunUsage) -> list[str]:
    """Return which GPUs did little: `rank 3's GPU was under 5 % for 3 min 10 s`."""
    idle: dict[int, float] = {}
    for rank in sorted(usage.ranks):
        seconds = _idle_s(usage.ranks[rank])
        if is_low(usage.ranks[rank]) and seconds >= _IDLE_S:
            idle[rank] = seconds
    if not idle:
        return []
    lasted = f"under {IDLE_GPU_PCT:.0f} % for {format_seconds(min(idle.values()))}"
    if len(idle) == 1:
        return [f"rank {next(iter(idle))}'s GPU was {lasted}"]
    return [f"the GPUs of {format_ranks(idle)} were {lasted} or longer"]


def idle_lines(view: RunView) -> list[str]:
    """Return which GPUs stand out by doing little, or did; those of a session may: its cells say when they do."""
    if view.session is not None:
        return []
    return idle_sentences(view.usage) if view.is_final else view.usage.idle_sentences


def is_low(usage: RankUsage) -> bool:
    """Whether its GPU did little of what it could."""
    mean = usage.mean_utilization_pct
    return mean is not None and mean < _LOW_MEAN_PCT


def usage_record(usage: RunUsage, most: int) -> dict[str, object]:
    """Return means and peaks as JSON: a list by rank of each, units in the keys, null where nobody tells.

    Args:
        usage: Of a run.
        most: Ranks that are told of, from the first.
    """
    ranks = [usage.ranks[rank] for rank in sorted(usage.ranks)[:most]]
    record: dict[str, object] = {"gpus_busy_pct": _rounded(usage.busy_pct), "ranks": [rank.rank for rank in ranks]}
    for name, key in _KEYS.items():
        curves = [next((drawn for drawn in rank.curves() if drawn.name == name), None) for rank in ranks]
        means = [_rounded(drawn.series.mean) if drawn is not None else None for drawn in curves]
        if any(mean is not None for mean in means):
            record[f"mean_{key}"] = means
            record[f"peak_{key}"] = [_rounded(_peak(drawn)) if drawn is not None else None for drawn in curves]
    record["peak_bytes"] = [rank.peak_used_bytes for rank in ranks]
    own = [rank.peak_own_bytes for rank in ranks]
    if any(count is not None for count in own):
        record["peak_own_bytes"] = own
    return record


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _idle_s(usage: RankUsage) -> float:
    for drawn in usage.curves():
        if drawn.name == "GPU":
            idle = [value for value in drawn.series.values if value is not None and value < IDLE_GPU_PCT]
            return len(idle) * drawn.series.step_s
    return 0.0


def _peak(drawn: Drawn) -> float | None:
    return max((value for value in drawn.series.values if value is not None), default=None)


def _value(value: float, unit: str) -> str:
    return f"{value:.{_DIGITS.get(unit, 1)}f} {unit}"


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
    return device_hours(seconds, device)


def device_hours(seconds: float, device: str = "GPU") -> str:
    """Return `0.24 GPU h`."""
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
