"""What a measurement is: series of samples, limits they are held against, and rows of the table."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

# One-sided 95 % quantiles of Student's t by degrees of freedom; beyond the table the last is a safe bound.
_T_MANY = 1.729
_T_95 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833, 10: 1.812}
_T_95 |= {11: 1.796, 12: 1.782, 13: 1.771, 14: 1.761, 15: 1.753, 16: 1.746, 17: 1.740, 18: 1.734, 19: _T_MANY}


class MeasurementFailed(Exception):
    """A sample could not be taken; the message is the reason that the report prints."""


@dataclass(frozen=True)
class Series:
    """Samples of one thing.

    Args:
        label: What was measured, as the report prints it.
        values: Samples in `unit`, in the order taken.
        unit: "s", "ms", "MB" or a word for plain counts.
        failures: Reasons of the samples that could not be taken.
    """

    label: str
    values: tuple[float, ...]
    unit: str = "s"
    failures: tuple[str, ...] = ()

    @property
    def median(self) -> float:
        return statistics.median(self.values) if self.values else math.nan

    @property
    def slowest(self) -> float:
        return max(self.values, default=math.nan)

    @property
    def p90(self) -> float:
        """The 90th percentile by nearest rank."""
        return self._percentile(0.90)

    @property
    def p99(self) -> float:
        """The 99th percentile by nearest rank; with fewer than 100 samples that is the slowest."""
        return self._percentile(0.99)

    def _percentile(self, share: float) -> float:
        if not self.values:
            return math.nan
        return sorted(self.values)[max(0, math.ceil(share * len(self.values)) - 1)]


@dataclass(frozen=True)
class Check:
    """One limit of the table beside what was measured. `met` is None where it could not be measured."""

    must: str
    measured: str
    met: bool | None


@dataclass
class Row:
    """One row of the table.

    Args:
        work: What is done, in the table's words.
        ours: Our series; the first is the one that peers are compared with.
        checks: Limits; empty when ours could not be measured.
        peers: Peers' series, same work, same unit as `ours[0]`.
        notes: Sentences for the report: what exactly was timed, what failed.
    """

    work: str
    ours: list[Series] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    peers: list[Series] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def series(self, index: int) -> Series:
        """Our series of that index, or one without samples where it could not be measured."""
        return self.ours[index] if index < len(self.ours) else Series("ours", ())

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Around what measures ours: a failure becomes a note, and the peers are measured all the same."""
        try:
            yield
        except MeasurementFailed as reason:
            self.notes.append(f"Ours could not be measured: {reason}")


def collect(
    label: str, sample: Callable[[], float], count: int, *, pause_s: float = 0.0, most_failures: int = 1
) -> Series:
    """Take `count` samples.

    Args:
        label: The series' name.
        sample: Takes one sample and returns seconds; a `MeasurementFailed` from it is recorded.
        count: How many.
        pause_s: Seconds of rest before each sample.
        most_failures: After so many failures the series ends.
    """
    values: list[float] = []
    failures: list[str] = []
    for index in range(count):
        if pause_s:
            time.sleep(pause_s)
        try:
            values.append(sample())
        except MeasurementFailed as reason:
            failures.append(f"sample {index + 1} of {count}: {reason}")
            if len(failures) >= most_failures:
                break
    return Series(label, tuple(values), failures=tuple(failures))


def at_most(series: Series, limit: float, *, of: str = "median", what: str = "") -> Check:
    """Hold a series' median, or with another `of` its largest sample, against a limit in the same unit."""
    value = series.median if of == "median" else series.slowest
    prefix = f"{what}: " if what else ""
    must = f"{prefix}{of} at most {limit:g} {series.unit}"
    if math.isnan(value):
        return Check(must, "not measured", None)
    failed = f", {len(series.failures)} failed" if series.failures else ""
    return Check(must, show(value, series.unit) + failed, value <= limit and not series.failures)


def at_most_beyond(series: Series, base: Series, limit: float, *, of: str = "median") -> Check:
    """Hold what a series takes longer than another one, in the median or `p90`, against a limit in seconds."""
    must = f"{of} at most {limit * 1e3:g} ms beyond {base.label}"
    more = (series.median if of == "median" else series.p90) - base.median
    if math.isnan(more):
        return Check(must, "not measured", None)
    return Check(must, f"{more * 1e3:.1f} ms", more <= limit)


def at_most_p99(series: Series, limit: float) -> Check:
    """Hold a series' 99th percentile against a limit in the same unit."""
    must = f"p99 at most {limit:g} {series.unit}"
    if math.isnan(series.p99):
        return Check(must, "not measured", None)
    return Check(must, show(series.p99, series.unit), series.p99 <= limit)


def at_least_times_faster(ours: Series, peer: Series, times: float) -> Check:
    """Hold the ratio of two medians against the least that is wanted."""
    must = f"{f'at least {times:g} times ' if times != 1 else ''}faster than {peer.label}"
    ratio = peer.median / ours.median
    if math.isnan(ratio):
        return Check(must, "not measured", None)
    return Check(must, f"{ratio:.3g} times", ratio >= times)


def at_most_times(ours: Series, other: Series, times: float) -> Check:
    """Compare our median with a multiple of another one's."""
    must = f"at most {times:g} times {other.label}"
    ratio = ours.median / other.median
    if math.isnan(ratio):
        return Check(must, "not measured", None)
    return Check(must, f"{ratio:.2f} times", ratio <= times)


def ratio_with_upper_bound(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Compare pairs.

    Args:
        ours: Seconds of ours, one per pair.
        theirs: Seconds of the peer, in the same order.

    Returns:
        The geometric mean of the pairs' ratios, and its one-sided 95 % upper bound (Student's t).
    """
    logs = _log_ratios(ours, theirs)
    if len(logs) < 2:
        return (math.exp(logs[0]) if logs else math.nan), math.nan
    mean = statistics.fmean(logs)
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean + _T_95.get(len(logs) - 1, _T_MANY) * error)


def pairs_needed(ours: Sequence[float], theirs: Sequence[float], limit: float) -> int:
    """How many pairs as noisy as these have an upper bound of `limit`, if the true ratio is 1."""
    return math.ceil((_T_MANY * statistics.stdev(_log_ratios(ours, theirs)) / math.log(limit)) ** 2)


def _log_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [math.log(mine / other) for mine, other in zip(ours, theirs, strict=True)]


def show(value: float, unit: str = "s") -> str:
    """A number for people: three digits, seconds below one as milliseconds."""
    if math.isnan(value):
        return "-"
    if unit == "s" and value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
