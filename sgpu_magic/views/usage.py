"""Usage of ranks and their devices, folded from a run's events into bounded curves, and described in words. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from sgpu_magic.formatting import format_gb, format_ranks, format_seconds
from sgpu_magic.wire.rank_events import IDLE_GPU_PCT, DeviceBusy, DeviceIdle, RankSample, Sampled

MAX_POINTS = 120
"""Maximum number of points of a curve."""

_NEXT_TO_ZERO = 0.05
_NOT_REPORTED = "not reported by this device"
_NOT_FOR_SLICES = "reported for the whole GPU only, not for a MIG slice of it"

# the sample's field, its name, the curve's unit
_GPU_CURVES = (
    ("utilization_pct", "GPU", "%"),
    ("used_bytes", "memory", "GB"),
    ("own_utilization_pct", "GPU, this run", "%"),
    ("own_bytes", "memory, this run", "GB"),
    ("power_w", "power", "W"),
    ("temperature_c", "temperature", "°C"),
    ("cpu_cores", "CPU", "cores"),
    ("rss_bytes", "main memory", "GB"),
)
_CPU_CURVES = (("cpu_cores", "CPU", "cores"), ("rss_bytes", "memory", "GB"))


class Series:
    """A value over time at even steps. When it is full, neighbours are averaged and the step doubles.

    Args:
        began_s: Start of the series, seconds since the ranks started.
        step_s: Initial seconds between two points.
        digits: Decimal places of the values; more would only make messages longer.
    """

    def __init__(self, began_s: float = 0.0, step_s: float = 1.0, digits: int = 1) -> None:
        self.began_s = round(max(began_s, 0.0), 3)
        self.step_s = step_s
        self._digits = digits
        # for each step: the integral of the reported values, and the seconds that they cover
        self._sums: list[float] = []
        self._known_s: list[float] = []

    def add(self, begin_s: float, end_s: float, value: float | None) -> None:
        """Add a value measured from `begin_s` to `end_s` (seconds since the ranks started); None if not reported."""
        begin_s, end_s = begin_s - self.began_s, end_s - self.began_s
        if end_s <= max(begin_s, 0.0):
            return
        while end_s > MAX_POINTS * self.step_s:
            self._halve()
        first, last = int(max(begin_s, 0.0) / self.step_s), min(int(end_s / self.step_s), MAX_POINTS - 1)
        # a point for less than half a step would flicker
        if last > first and end_s - last * self.step_s < self.step_s / 2:
            last -= 1
        missing = last + 1 - len(self._sums)
        self._sums += [0.0] * missing
        self._known_s += [0.0] * missing
        if value is None:
            return
        for index in range(first, last + 1):
            since = begin_s if index == first else index * self.step_s
            until = end_s if index == last else (index + 1) * self.step_s
            self._sums[index] += value * (until - since)
            self._known_s[index] += until - since

    @property
    def values(self) -> tuple[float | None, ...]:
        """The points, oldest first; None where nothing was reported."""
        pairs = zip(self._sums, self._known_s, strict=True)
        return tuple(round(total / known, self._digits) if known else None for total, known in pairs)

    @property
    def mean(self) -> float | None:
        """The mean over the reported time; None when nothing was reported."""
        known_s = sum(self._known_s)
        return sum(self._sums) / known_s if known_s else None

    @property
    def peak(self) -> float | None:
        """The largest of `values`; None when nothing was reported."""
        return max((value for value in self.values if value is not None), default=None)

    def _halve(self) -> None:
        for column in (self._sums, self._known_s):
            column[:] = [sum(column[at : at + 2]) for at in range(0, len(column), 2)]
        self.step_s *= 2


def thinned(values: Sequence[float | None], most: int) -> tuple[list[float | None], int]:
    """Return at most `most` points of a curve, and how many original points each of them averages."""
    every = max(-(-len(values) // most), 1)
    points: list[float | None] = []
    for at in range(0, len(values), every):
        known = [value for value in values[at : at + every] if value is not None]
        points.append(sum(known) / len(known) if known else None)
    return points, every


class UsageCurve(NamedTuple):
    """A curve to render: `name`, `unit`, its `series` in that unit, and `top`, the end of its axis if known."""

    name: str
    unit: str
    series: Series
    top: float | None

    @property
    def is_flat_zero(self) -> bool:
        """Whether it would be drawn as a line at the bottom, because all values are 0.0 or not reported."""
        return (self.series.peak or 0.0) < _NEXT_TO_ZERO


class RankUsage:
    """What one rank and its device have used in this attempt.

    Attributes:
        rank: The rank.
        latest: The last sample, None before the first.
        idle: The event that its GPU is idle, None when it is not.
        peak_used_bytes: Peak memory in use on the device; on CPU, peak memory of the rank's processes.
        peak_own_bytes: Peak device memory of this run's own processes; None when not reported.
        series: The measured curves by the sample's field; bytes are in GB.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.latest: RankSample | None = None
        self.idle: DeviceIdle | None = None
        self.peak_used_bytes: int | None = None
        self.peak_own_bytes: int | None = None
        self._idle_at = 0.0
        self._now = 0.0
        self.series: dict[str, Series] = {}

    def sampled(self, sample: RankSample, begin_s: float, end_s: float, at: float) -> None:
        """Add a sample of the time from `begin_s` to `end_s`, reported at `at`."""
        before = self.latest
        if before is not None:
            # constant values are reported once
            total = before.total_bytes if sample.total_bytes is None else sample.total_bytes
            cores = before.cores if sample.cores is None else sample.cores
            sample = msgspec.structs.replace(sample, uuid=sample.uuid or before.uuid, total_bytes=total, cores=cores)
        self.latest, self._now = sample, at
        used = sample.rss_bytes if sample.kind == "cpu" else sample.used_bytes
        self.peak_used_bytes = _larger(self.peak_used_bytes, used)
        self.peak_own_bytes = _larger(self.peak_own_bytes, sample.own_bytes)
        for field, _, unit in _GPU_CURVES:
            value: float | None = getattr(sample, field)
            is_gb = unit == "GB"
            if value is not None and field not in self.series:
                self.series[field] = Series(begin_s, digits=2 if is_gb else 1)
            if field in self.series:
                self.series[field].add(begin_s, end_s, value / 1e9 if value is not None and is_gb else value)

    def turned_idle(self, idle: DeviceIdle | None, at: float) -> None:
        """Mark its GPU as idle, or as busy again (None)."""
        self.idle, self._idle_at, self._now = idle, at, max(at, self._now)

    @property
    def idle_s(self) -> float:
        """Seconds for which its GPU has been idle."""
        return self.idle.seconds + max(self._now - self._idle_at, 0.0) if self.idle is not None else 0.0

    @property
    def idle_text(self) -> str:
        """`GPU under 5 % for 60 s: it waits in the DataLoader`, "" when its GPU is not idle."""
        if self.idle is None:
            return ""
        cause = f": it waits in {self.idle.waits_in}" if self.idle.waits_in else ""
        return f"GPU under {IDLE_GPU_PCT:.0f} % for {format_seconds(self.idle_s)}{cause}"

    @property
    def mean_utilization_pct(self) -> float | None:
        """Mean utilization of its GPU over the attempt, 0 to 100; None on CPU and on MIG slices."""
        return self.mean("utilization_pct")

    def mean(self, field: str) -> float | None:
        """Return the mean of one of the sample's fields; None when it is not reported."""
        return self.series[field].mean if field in self.series else None

    def curves(self) -> list[UsageCurve]:
        """Return the curves. The first is for the grid: GPU utilization, memory of a MIG slice, or cores on CPU."""
        if self.latest is None:
            return []
        tops = {"utilization_pct": 100.0, "own_utilization_pct": 100.0}
        if self.latest.total_bytes:
            # not on CPU: on the scale of the whole machine's memory the curve would be flat
            tops |= dict.fromkeys(("used_bytes", "own_bytes"), self.latest.total_bytes / 1e9)
        if "cpu_cores" in self.series:
            # a rank may use more than its share while others are idle
            tops["cpu_cores"] = max(float(self.latest.cores or 1), self.series["cpu_cores"].peak or 0.0)
        order = _CPU_CURVES if self.latest.kind == "cpu" else _GPU_CURVES
        there = [curve for curve in order if curve[0] in self.series]
        return [UsageCurve(name, unit, self.series[field], tops.get(field)) for field, name, unit in there]


class RunUsage:
    """What the ranks of a run use: `RankUsage` by rank, of the current or last attempt."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankUsage] = {}
        self._until_s = 0.0

    def apply(self, body: Sampled | DeviceIdle | DeviceBusy, at: float, started_at: float | None) -> None:
        """Fold in one event.

        Args:
            body: The event.
            at: When it was reported, by the views' clock.
            started_at: When the ranks started; None when unknown.
        """
        match body:
            case Sampled(seconds=seconds, samples=samples):
                end_s = at - (started_at if started_at is not None else at - seconds)
                # leave no hole and no overlap when the clock is set back
                begin_s = max(end_s - seconds, self._until_s)
                end_s = self._until_s = max(end_s, begin_s + seconds)
                for sample in samples:
                    self._usage_of(sample.rank).sampled(sample, begin_s, end_s, at)
            case DeviceIdle() | DeviceBusy():
                self._usage_of(body.rank).turned_idle(body if isinstance(body, DeviceIdle) else None, at)

    def start_again(self) -> None:
        """Discard everything, as a new attempt starts."""
        self.ranks, self._until_s = {}, 0.0

    def ended(self) -> None:
        """Clear the idle marks, as the run has ended."""
        for usage in self.ranks.values():
            usage.idle = None

    @property
    def busy_pct(self) -> float | None:
        """Mean utilization of the run's GPUs, 0 to 100; None when no GPU reports it."""
        means = [usage.mean_utilization_pct for usage in self.ranks.values()]
        known = [mean for mean in means if mean is not None]
        return sum(known) / len(known) if known else None

    @property
    def idle_sentences(self) -> list[str]:
        """One sentence for each cause of idle GPUs: `rank 3's GPU has been under 5 % for 60 s: ...`."""
        groups: dict[str, dict[int, float]] = {}
        for rank, usage in sorted(self.ranks.items()):
            if usage.idle is not None:
                groups.setdefault(usage.idle.waits_in, {})[rank] = usage.idle_s
        parts: list[str] = []
        for waits_in, idle_s in groups.items():
            cause = f": {'it waits' if len(idle_s) == 1 else 'they wait'} in {waits_in}" if waits_in else ""
            parts.append(idle_sentence(idle_s, "has been", "have been") + cause)
        return parts

    def _usage_of(self, rank: int) -> RankUsage:
        return self.ranks.setdefault(rank, RankUsage(rank))


def use_text(sample: RankSample) -> str:
    """Return a rank's usage in short: `94 % · 18.2 GB`, `MIG · 4.1 GB`, `1.9 cores · 0.4 GB`."""
    if sample.problem and sample.kind != "cpu":
        return "can't be read"
    held_bytes = sample.rss_bytes if sample.kind == "cpu" else sample.used_bytes
    return format_use(sample.kind, sample.utilization_pct, sample.cpu_cores, held_bytes)


def format_use(kind: str, utilization_pct: float | None, cpu_cores: float | None, held_bytes: int | None) -> str:
    """Return `use_text` for these values of a rank and its kind of device; simulated GPUs are of the kind `cpu`."""
    words = "MIG" if kind == "mig" else _or(utilization_pct, "", _percent)
    words = _or(cpu_cores, "", _cores) if kind == "cpu" else words
    return " · ".join(filter(None, [words, _or(held_bytes, "", format_gb)]))


def device_line(sample: RankSample) -> str:
    """Return `device: GPU-1a2b`, `device: a MIG slice, MIG-1a2b`, `device: CPU`."""
    if sample.kind == "cpu":
        return f"device: {'CPU stands in for a simulated device' if sample.uuid else 'CPU'}"
    return f"device: {'a MIG slice, ' if sample.kind == 'mig' else ''}{sample.uuid}"


def detail_lines(sample: RankSample) -> list[str]:
    """Return everything that was measured, one line each; values that are not reported are marked as absent."""
    cores = _or(sample.cpu_cores, "unknown", _cores)
    if sample.kind == "cpu":
        held = _memory(sample.rss_bytes, sample.total_bytes, "unknown")
        return [device_line(sample), f"CPU: {cores}", f"memory: {held}"]
    own = [f"CPU: {cores}", f"main memory: {_memory(sample.rss_bytes, None, 'unknown')}"]
    if sample.problem:
        return [device_line(sample), sample.problem, *own]
    absent = _NOT_FOR_SLICES if sample.kind == "mig" else _NOT_REPORTED
    return [
        device_line(sample),
        f"GPU: {_or(sample.utilization_pct, absent, _percent)}",
        f"GPU, this run: {_or(sample.own_utilization_pct, absent, _percent)}",
        f"memory: {_memory(sample.used_bytes, sample.total_bytes, _NOT_REPORTED)}",
        f"memory, this run: {_or(sample.own_bytes, _NOT_REPORTED, format_gb)}",
        f"power: {_or(sample.power_w, absent, '{:.0f} W'.format)}",
        f"temperature: {_or(sample.temperature_c, absent, '{:.0f} °C'.format)}",
        *own,
    ]


# ---------------------------------------------------------------- internals


def idle_sentence(idle_s: Mapping[int, float], one: str, several: str) -> str:
    """Return `rank 3's GPU was under 5 % for 3 min 10 s`, `the GPUs of ranks 2, 3 have been under 5 % for 60 s`.

    Args:
        idle_s: Idle seconds by rank; the shortest time is named.
        one: The verb for one GPU.
        several: The verb for several.
    """
    lasts = f"under {IDLE_GPU_PCT:.0f} % for {format_seconds(min(idle_s.values()))}"
    if len(idle_s) == 1:
        return f"rank {next(iter(idle_s))}'s GPU {one} {lasts}"
    return f"the GPUs of {format_ranks(idle_s)} {several} {lasts}"


def _memory(used_bytes: int | None, total_bytes: int | None, absent: str) -> str:
    used = _or(used_bytes, absent, format_gb)
    return used if used == absent or not total_bytes else f"{used.removesuffix(' GB')} of {format_gb(total_bytes)}"


_percent, _cores = "{:.0f} %".format, "{:.1f} cores".format


def _or(value: float | None, absent: str, format_value: Callable[[float], str]) -> str:
    return absent if value is None else format_value(value)


def _larger(one: int | None, other: int | None) -> int | None:
    return max((count for count in (one, other) if count is not None), default=None)
