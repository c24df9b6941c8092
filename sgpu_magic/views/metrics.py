"""Metrics that a run's code has logged to MLflow, folded from its events into curves of bounded size. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sgpu_magic.formatting import clipped
from sgpu_magic.views import ansi
from sgpu_magic.wire.rank_events import MetricsLogged
from sgpu_magic.wire.tracking import MetricPoint

MAX_POINTS = 200
"""Number of points of a series at which every other one is dropped."""
MAX_METRICS = 24
"""Number of metrics that are kept: the first ones that are logged."""
MAX_CURVES = 8
"""Number of ranks of a metric whose points are kept: those with the lowest numbers."""

# names that are remembered to count the metrics that are not kept
_MAX_NAMES = 1000
_MAX_NAME_CHARS = 120
# measurements that this package and MLflow log, not the run's code
_NOT_LOGGED_BY_CODE = "system/"
_PLAIN_FROM, _PLAIN_BELOW = 1_000, 10_000_000


def _order(point: MetricPoint) -> tuple[int, int]:
    """Return the key by which MLflow orders a metric's points: the step, then the time."""
    return point.step, point.at_ms


class MetricSeries:
    """What one rank has logged as one metric. When it is full, every other point is dropped.

    Args:
        rank: The rank.

    Attributes:
        rank: The rank.
        last: The last point in MLflow's order; None before the first.
        smallest: The smallest finite value, dropped ones included; None without one.
        largest: The largest finite value, dropped ones included; None without one.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.last: MetricPoint | None = None
        self.smallest: float | None = None
        self.largest: float | None = None
        self._points: list[MetricPoint] | None = []
        # one of `_stride` points is kept; `_skips` points are dropped before the next one
        self._stride = 1
        self._skips = 0

    def add(self, point: MetricPoint) -> None:
        if self.last is None or _order(point) >= _order(self.last):
            self.last = point
        value = point.value
        if math.isfinite(value):
            if self.smallest is None or value < self.smallest:
                self.smallest = value
            if self.largest is None or value > self.largest:
                self.largest = value
        if self._points is None:
            return
        if self._skips:
            self._skips -= 1
            return
        self._skips = self._stride - 1
        self._points.append(point)
        if len(self._points) >= MAX_POINTS:
            self._points.sort(key=_order)
            del self._points[1::2]
            self._stride *= 2

    def drop_points(self) -> None:
        """Keep only the last, smallest and largest value from now on."""
        self._points = None

    @property
    def points(self) -> list[MetricPoint]:
        """The kept points and the last one, in MLflow's order; empty if points are not kept."""
        if self._points is None or self.last is None:
            return []
        points = sorted(self._points, key=_order)
        return points if points[-1] is self.last else [*points, self.last]


class LoggedMetric:
    """One metric of a run.

    Args:
        name: Its name, without control characters.

    Attributes:
        name: Its name.
        series: What each rank has logged, by rank.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.series: dict[int, MetricSeries] = {}
        self._curve_ranks: list[int] = []

    def add(self, rank: int, point: MetricPoint) -> None:
        series = self.series.get(rank)
        if series is None:
            series = self.series[rank] = self._begin(rank)
        series.add(point)

    def _begin(self, rank: int) -> MetricSeries:
        self._curve_ranks = sorted([*self._curve_ranks, rank])
        series = {**self.series, rank: MetricSeries(rank)}
        for number in self._curve_ranks[MAX_CURVES:]:
            series[number].drop_points()
        del self._curve_ranks[MAX_CURVES:]
        return series[rank]

    @property
    def all_series(self) -> list[MetricSeries]:
        """The series whose points are kept, by rank."""
        return [self.series[rank] for rank in self._curve_ranks]

    @property
    def others(self) -> list[MetricSeries]:
        """The series of further ranks, of which only single values are kept, by rank."""
        return [self.series[rank] for rank in sorted(self.series) if rank not in self._curve_ranks]

    @property
    def last(self) -> float:
        """The last value of the first rank that has logged it."""
        last = self.all_series[0].last
        return math.nan if last is None else last.value


class RunMetrics:
    """The metrics of a run. A new attempt continues them, as in MLflow.

    Attributes:
        kept: The metrics that are kept, in the order in which they were first logged.
        version: Grows with every change.
    """

    def __init__(self) -> None:
        self.kept: list[LoggedMetric] = []
        self.version = 0
        # None for names that are not shown
        self._by_name: dict[str, LoggedMetric | None] = {}
        self._left_out = 0

    def apply(self, body: MetricsLogged) -> None:
        """Fold in what a rank has logged."""
        if not body.metrics:
            return
        self.version += 1
        for point in body.metrics:
            name = point.key
            metric = self._by_name[name] if name in self._by_name else self._begin(name)
            if metric is not None:
                metric.add(body.rank, point)

    def more(self, listed: int) -> str:
        """Return `and 3 more` for the metrics after the first `listed`, "" if there are none."""
        count = max(len(self.kept) - listed, 0) + self._left_out
        at_least = "at least " if len(self._by_name) >= _MAX_NAMES else ""
        return f"and {at_least}{count:,} more" if count else ""

    def _begin(self, name: str) -> LoggedMetric | None:
        if name.startswith(_NOT_LOGGED_BY_CODE) or len(self._by_name) >= _MAX_NAMES:
            return None
        metric = None
        if len(self.kept) < MAX_METRICS:
            metric = LoggedMetric(clipped(ansi.plain(name), _MAX_NAME_CHARS))
            self.kept.append(metric)
        else:
            self._left_out += 1
        self._by_name[name] = metric
        return metric


# ---------------------------------------------------------------- in words


def format_value(value: float) -> str:
    """Return `0.0312`, `1234.5`, `40`, `1.2e-05`, `NaN`, `-inf`."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return f"{value:.0f}"
    if abs(value) < _PLAIN_BELOW and value == int(value):
        return str(int(value))
    return f"{value:.1f}" if _PLAIN_FROM <= abs(value) < _PLAIN_BELOW else f"{value:.4g}"


def range_text(series: Sequence[MetricSeries]) -> str:
    """Return the smallest and the largest finite value of these series: `0.03 to 2.3`; "" without one."""
    low, high = value_range(series)
    if low is None or high is None:
        return ""
    first, last = format_value(low), format_value(high)
    return first if first == last else f"{first} to {last}"


def value_range(series: Sequence[MetricSeries]) -> tuple[float | None, float | None]:
    """Return the smallest and the largest finite value of these series; None without one."""
    low = min((each.smallest for each in series if each.smallest is not None), default=None)
    high = max((each.largest for each in series if each.largest is not None), default=None)
    return low, high


def metrics_text(metrics: RunMetrics, most: int) -> str:
    """Return the last values of the first metrics: `loss 0.0312 · accuracy 0.97 · and 3 more`; "" without any."""
    words = [f"{metric.name} {format_value(metric.last)}" for metric in metrics.kept[:most]]
    return " · ".join(filter(None, [*words, metrics.more(most)]))
