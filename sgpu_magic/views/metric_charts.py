"""The metrics that a run has logged, as charts of the live view, and as static HTML."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from sgpu_magic.formatting import count_of, format_seconds
from sgpu_magic.views.html_style import ACCENT, FAINT, GOOD, LINE, PANEL, SOFT, WARN, safe
from sgpu_magic.views.live.messages import json_bytes
from sgpu_magic.views.live.schema import MetricChart, MetricCurve
from sgpu_magic.views.metrics import (
    MAX_CURVES,
    MAX_POINTS,
    LoggedMetric,
    MetricSeries,
    RunMetrics,
    format_value,
    metrics_text,
    range_text,
    value_range,
)
from sgpu_magic.wire.tracking import MetricPoint

SUMMARY_METRICS = 4
"""Metrics whose last values are shown while the charts are folded."""

_MAX_BYTES = 16_000
# points of a curve and curves of a chart, tried in turn until the charts fit
_LEVELS = ((MAX_POINTS, MAX_CURVES), (100, MAX_CURVES), (50, MAX_CURVES), (25, MAX_CURVES), (25, 2), (12, 1))
# bytes of a point, and of a curve and a chart without points, as JSON
_POINT_BYTES, _CURVE_BYTES, _CHART_BYTES = 12, 50, 170
_DIGITS = 5
_LARGEST = sys.float_info.max

# curves of more ranks than there are colours are dashed
_COLOURS = (ACCENT, WARN, GOOD, "currentColor")
_DASHES = "5 3"
_WIDTH, _HEIGHT = 240, 48
_PAD = 2
_DOT = 4
# of the bytes of a saved run's HTML
_HTML_SHARE = 0.3


# ---------------------------------------------------------------- as records


_made: WeakKeyDictionary[RunMetrics, tuple[int, tuple[MetricChart, ...]]] = WeakKeyDictionary()


def metric_charts(metrics: RunMetrics) -> tuple[MetricChart, ...]:
    """Return a chart for each metric, all together at most 16 kB of JSON: many have fewer points and curves."""
    version, charts = _made.get(metrics, (-1, ()))
    if version != metrics.version:
        charts = _fitted(metrics.kept)
        _made[metrics] = (metrics.version, charts)
    return charts


def _fitted(metrics: Sequence[LoggedMetric]) -> tuple[MetricChart, ...]:
    for most, curves in _LEVELS:
        if _estimated_bytes(metrics, most, curves) <= _MAX_BYTES:
            charts = tuple(_chart(metric, most, curves) for metric in metrics)
            if json_bytes(charts) <= _MAX_BYTES:
                return charts
    most, curves = _LEVELS[-1]
    charts = tuple(_chart(metric, most, curves) for metric in metrics)
    while json_bytes(charts) > _MAX_BYTES:
        charts = charts[:-1]
    return charts


def _estimated_bytes(metrics: Sequence[LoggedMetric], most: int, curves: int) -> int:
    """Return about how many bytes of JSON the charts have, without making them."""
    size = 0
    for metric in metrics:
        curved = metric.all_series[:curves]
        points = sum(min(len(series.points), most) for series in curved)
        size += _CHART_BYTES + _CURVE_BYTES * len(curved) + _POINT_BYTES * points
    return size


def _chart(metric: LoggedMetric, most: int, curves: int) -> MetricChart:
    curved = metric.all_series
    others = [*curved[curves:], *metric.others]
    curved = curved[:curves]
    points = [point for series in curved for point in series.points]
    by_time = len(points) > 1 and len({point.step for point in points}) == 1 and len(points) > len(curved)
    began_ms = min(point.at_ms for point in points)
    low, high = _axis(curved)
    first, last = _ends(points, began_ms, by_time=by_time)
    values, last_value = range_text(curved), format_value(metric.last)
    return MetricChart(
        name=metric.name,
        last=last_value,
        range="" if values == last_value else values,
        low=low,
        high=high,
        axis="seconds" if by_time else "step",
        begins=first,
        ends=last if last != first else "",
        curves=tuple(_curve(series, most, began_ms if by_time else None) for series in curved),
        others=_others_text(others),
    )


def _ends(points: Sequence[MetricPoint], began_ms: int, *, by_time: bool) -> tuple[str, str]:
    """Return the first and the last position in words."""
    if by_time:
        return "0 s", format_seconds((max(point.at_ms for point in points) - began_ms) / 1000)
    steps = [point.step for point in points]
    return f"step {min(steps):,}", f"step {max(steps):,}"


def _axis(series: Sequence[MetricSeries]) -> tuple[float, float]:
    """Return the ends of the vertical axis, which still differ when both are halved."""
    low, high = value_range(series)
    if low is None or high is None:
        return 0.0, 1.0
    if low / 2 < high / 2:
        return low, high
    margin = abs(low) / 2 or 1.0
    return max(low - margin, -_LARGEST), min(low + margin, _LARGEST)


def _curve(series: MetricSeries, most: int, began_ms: int | None) -> MetricCurve:
    points = _thinned(series.points, most)
    steps = [point.step if began_ms is None else round((point.at_ms - began_ms) / 1000, 3) for point in points]
    last = "" if series.last is None else format_value(series.last.value)
    return MetricCurve(
        rank=series.rank, last=last, steps=tuple(steps), values=tuple(_rounded(point.value) for point in points)
    )


def _thinned(points: Sequence[MetricPoint], most: int) -> list[MetricPoint]:
    """Return at most `most` points and the last one."""
    every = max(-(-len(points) // most), 1)
    kept = list(points[::every])
    return kept if (len(points) - 1) % every == 0 else [*kept, points[-1]]


def _rounded(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{_DIGITS}g}")
    # the largest numbers are rounded to infinity
    return rounded if math.isfinite(rounded) else value


def _others_text(others: Sequence[MetricSeries]) -> str:
    if not others:
        return ""
    values = [series.last.value for series in others if series.last is not None and math.isfinite(series.last.value)]
    count = count_of(len(others), "more rank")
    if not values:
        return count
    low, high = format_value(min(values)), format_value(max(values))
    return f"{count}, last {low}" if low == high else f"{count}, last {low} to {high}"


# ---------------------------------------------------------------- as static HTML


def metrics_html(metrics: RunMetrics, limit: int) -> str:
    """Return the charts behind a summary; "" if nothing was logged.

    Args:
        metrics: The run's metrics.
        limit: Bytes of the run's HTML, of which the charts get at most 30 %.
    """
    charts = [_chart_html(chart) for chart in metric_charts(metrics)]
    while charts and sum(map(len, charts)) > limit * _HTML_SHARE:
        del charts[-1]
    if not metrics.kept:
        return ""
    more = metrics.more(len(charts))
    body = "".join(charts) + (f'<div style="{SOFT}">{more}</div>' if more else "")
    return (
        f'<div style="border-top:1px solid {LINE}"><details class="sgpu-saved-fold" style="font-size:12px">'
        f'<summary style="cursor:pointer;padding:3px 12px"><b style="font-weight:600">Metrics</b> '
        f'<span style="{SOFT}">{safe(metrics_text(metrics, SUMMARY_METRICS))}</span></summary>'
        f'<div style="display:grid;grid-template-columns:repeat(auto-fill,minmax(min({_WIDTH}px,100%),1fr));'
        f'gap:10px 20px;padding:6px 12px 8px 28px;background:{PANEL}">{body}</div></details></div>'
    )


def _chart_html(chart: MetricChart) -> str:
    several = len(chart.curves) > 1
    of_range = f' <span style="{SOFT}">{safe(chart.range)}</span>' if chart.range else ""
    axis = f"<span>{chart.begins}</span>" + (f" <span>{chart.ends}</span>" if chart.ends else "")
    legend = " ".join(_legend(at, curve) for at, curve in enumerate(chart.curves)) if several else ""
    if chart.others:
        legend += f' <span style="{SOFT}">{chart.others}</span>'
    paths = "".join(_path(at, curve, chart) for at, curve in reversed(list(enumerate(chart.curves))))
    head = f'<b style="font-weight:600">{safe(chart.name)}</b> {chart.last}{of_range}'
    # hidden from screen readers, which get the text around it
    svg = (
        f'<svg aria-hidden="true" width="100%" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'preserveAspectRatio="none" style="display:block;border-bottom:1px solid {LINE}">{paths}</svg>'
    )
    return (
        f'<div style="min-width:0"><div style="overflow-wrap:anywhere">{head}</div>{svg}'
        f'<div style="display:flex;justify-content:space-between;font-size:11px;{FAINT}">{axis}</div>'
        + (f'<div style="display:flex;flex-wrap:wrap;gap:0 10px;font-size:11px">{legend}</div>' if legend else "")
        + "</div>"
    )


def _legend(at: int, curve: MetricCurve) -> str:
    mark = "─" if at < len(_COLOURS) else "╌"
    return (
        f'<span style="white-space:nowrap"><span style="color:{_COLOURS[at % len(_COLOURS)]}">{mark}{mark}</span> '
        f"rank {curve.rank} {curve.last}</span>"
    )


def _path(at: int, curve: MetricCurve, chart: MetricChart) -> str:
    first, last = axis_ends(chart)
    stretches: list[list[tuple[float, float]]] = [[]]
    for step, value in zip(curve.steps, curve.values, strict=True):
        if value is None:
            stretches.append([])
        else:
            x = _WIDTH * (step - first) / (last - first) if last > first else _WIDTH / 2
            stretches[-1].append((x, _height(value, chart)))
    dashes = f' stroke-dasharray="{_DASHES}"' if at >= len(_COLOURS) else ""
    return (
        f'<path d="{"".join(map(_line, stretches))}" fill="none" stroke="currentColor" stroke-width="1.4" '
        f'stroke-linecap="round"{dashes} vector-effect="non-scaling-stroke" '
        f'style="color:{_COLOURS[at % len(_COLOURS)]}"/>'
    )


def _line(points: Sequence[tuple[float, float]]) -> str:
    if len(points) == 1:
        # a single value is a short line, as a dot would be invisible
        (x, y) = points[0]
        x = min(max(x - _DOT / 2, 0), _WIDTH - _DOT)
        return f"M{x:.0f},{y:.0f}h{_DOT}"
    return f"M{' '.join(f'{x:.0f},{y:.0f}' for x, y in points)}" if points else ""


def axis_ends(chart: MetricChart) -> tuple[float, float]:
    """Return the first and the last position of a chart's curves."""
    return min(curve.steps[0] for curve in chart.curves), max(curve.steps[-1] for curve in chart.curves)


def _height(value: float, chart: MetricChart) -> float:
    # the difference of two large values may be infinite, that of their halves is not
    share = (value / 2 - chart.low / 2) / (chart.high / 2 - chart.low / 2)
    return _HEIGHT - _PAD - min(max(share, 0.0), 1.0) * (_HEIGHT - 2 * _PAD)
