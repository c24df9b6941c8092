"""Metrics that a cell logs: curves of bounded size that keep what matters, and charts that can always be drawn."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from stories import Run, points

from sgpu_magic.views.html import render_html
from sgpu_magic.views.live.messages import json_bytes
from sgpu_magic.views.live.schema import MetricChart
from sgpu_magic.views.metric_charts import metric_charts
from sgpu_magic.views.metrics import MAX_CURVES, MAX_METRICS, MAX_POINTS, MetricSeries, RunMetrics, format_value
from sgpu_magic.wire.base import FailureKind
from sgpu_magic.wire.events import AttemptFailed
from sgpu_magic.wire.rank_events import Failure, MetricsLogged
from sgpu_magic.wire.tracking import MetricPoint


def logged(**values: Sequence[float]) -> RunMetrics:
    """Return metrics that rank 0 has logged, one point a step."""
    metrics = RunMetrics()
    for name, each in values.items():
        metrics.apply(MetricsLogged(rank=0, metrics=points(name, each)))
    return metrics


def chart(metrics: RunMetrics) -> MetricChart:
    (only,) = metric_charts(metrics)
    return only


# ---------------------------------------------------------------- thinning


@given(st.integers(1, 5000), st.floats(-1e6, 1e6))
@example(1, 0.0)
@example(199, 0.5)
@example(200, 0.5)
@example(201, 0.5)
@example(4999, 0.5)
def test_a_series_keeps_its_ends_and_its_extremes_in_200_points(count: int, seed: float) -> None:
    values = [math.sin(seed + 12.9898 * at * at) for at in range(count)]
    series = MetricSeries(0)
    for point in points("loss", values):
        series.add(point)
    kept = series.points
    assert len(kept) <= MAX_POINTS
    assert [point.step for point in (kept[0], kept[-1])] == [0, count - 1]
    assert all(point.value == values[point.step] for point in kept)
    assert (series.smallest, series.largest) == (min(values), max(values))
    # at even distances, of which there are never fewer than half of what there is room for
    gaps = {later.step - earlier.step for earlier, later in pairwise(kept[:-1])}
    assert len(gaps) <= 1
    assert len(kept) >= min(count, MAX_POINTS // 2)


def test_points_are_in_the_order_of_mlflow_and_repeated_steps_are_kept() -> None:
    metrics = RunMetrics()
    for step, at_ms, value in ((5, 1, 0.5), (3, 2, 0.3), (5, 3, 0.55), (4, 4, 0.4)):
        metrics.apply(MetricsLogged(rank=0, metrics=(MetricPoint("loss", value, at_ms, step),)))
    drawn = chart(metrics)
    assert drawn.curves[0].steps == (3, 4, 5, 5)
    assert drawn.curves[0].values == (0.3, 0.4, 0.5, 0.55)
    assert (drawn.last, drawn.begins, drawn.ends) == ("0.55", "step 3", "step 5")


def test_points_without_a_step_are_drawn_over_time() -> None:
    metrics = RunMetrics()
    metrics.apply(MetricsLogged(rank=0, metrics=points("rows/s", [1.0, 2.0, 3.0], step=0)))
    drawn = chart(metrics)
    assert (drawn.begins, drawn.ends, drawn.curves[0].steps) == ("0 s", "20 ms", (0.0, 0.01, 0.02))


def test_another_attempt_continues_the_curves_as_in_mlflow() -> None:
    run = Run().start().apply(MetricsLogged(rank=0, metrics=points("loss", [3.0, 2.0])))
    failure = Failure(kind=FailureKind.WORKER_DIED, message="was killed")
    run.apply(AttemptFailed(attempt=1, attempts=2, failure=failure))
    again = tuple(MetricPoint("loss", value, 1000 + step, step) for step, value in ((1, 1.9), (2, 1.0)))
    run.apply(MetricsLogged(rank=0, metrics=again))
    assert chart(run.view.metrics).curves[0].values == (3.0, 2.0, 1.9, 1.0)


# ---------------------------------------------------------------- numbers


def test_what_is_not_finite_is_a_gap_and_is_said_of_the_last_value() -> None:
    drawn = chart(logged(norm=[0.5, math.nan, 3.25, math.inf]))
    assert drawn.curves[0].values == (0.5, None, 3.25, None)
    assert (drawn.last, drawn.range, drawn.low, drawn.high) == ("inf", "0.5 to 3.25", 0.5, 3.25)
    drawn = chart(logged(norm=[math.nan]))
    assert (drawn.last, drawn.range, drawn.curves[0].values) == ("NaN", "", (None,))


@pytest.mark.parametrize("value", [0.0, -1.5, sys.float_info.max, -sys.float_info.max, 5e-324])
@pytest.mark.parametrize("other", [0.0, sys.float_info.max, -sys.float_info.max])
def test_every_number_can_be_drawn(value: float, other: float) -> None:
    metrics = logged(odd=[value, other])
    drawn = chart(metrics)
    assert drawn.low < drawn.high
    assert all(map(math.isfinite, (drawn.low, drawn.high)))
    html = render_html(Run().start().apply(MetricsLogged(rank=0, metrics=points("odd", [value, other]))).end().view)
    (path,) = re.findall(r'<path d="([^"]*)" fill="none" stroke="currentColor" stroke-width="1.4"', html)
    numbers = list(map(float, re.findall(r"[-\d.]+", path)))
    assert len(numbers) == 4
    assert all(0 <= number <= 240 for number in numbers)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.03124, "0.03124"), (0.1 + 0.2, "0.3"), (40.0, "40"), (-0.0, "0"), (1234.56, "1234.6"), (1.2e-5, "1.2e-05"),
        (1e9, "1e+09"), (9_999_999.0, "9999999"), (math.nan, "NaN"), (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_values_are_short(value: float, text: str) -> None:
    assert format_value(value) == text


# ---------------------------------------------------------------- bounds


def test_of_many_ranks_eight_are_drawn_whichever_logs_first() -> None:
    metrics = RunMetrics()
    for rank in reversed(range(20)):
        metrics.apply(MetricsLogged(rank=rank, metrics=points("loss", [float(rank), rank + 0.5])))
    drawn = chart(metrics)
    assert [curve.rank for curve in drawn.curves] == list(range(MAX_CURVES))
    assert drawn.last == "0.5"
    assert drawn.others == "12 more ranks, last 8.5 to 19.5"
    assert len(drawn.curves[0].values) == 2


def test_of_many_metrics_the_first_24_are_drawn_and_the_others_are_counted() -> None:
    metrics = RunMetrics()
    names = [f"m{number}" for number in range(5000)]
    for first in range(0, 5000, 100):
        batch = tuple(MetricPoint(name, 1.0, 0, 0) for name in [*names[first : first + 100], "system/cpu"])
        metrics.apply(MetricsLogged(rank=0, metrics=batch * 2))
    assert [each.name for each in metric_charts(metrics)] == names[:MAX_METRICS]
    assert metrics.more(MAX_METRICS) == "and at least 976 more"


def test_names_of_the_system_are_not_drawn() -> None:
    metrics = RunMetrics()
    metrics.apply(MetricsLogged(rank=0, metrics=(MetricPoint("system/gpu_0_power", 200.0, 0, 0),)))
    metrics.apply(MetricsLogged(rank=0, params=(("lr", "0.1"),)))
    assert metric_charts(metrics) == ()
    html = render_html(Run().start().say(0, "x\n").apply(MetricsLogged(rank=0, params=(("lr", "0.1"),))).end().view)
    assert "Metrics" not in html


@pytest.mark.parametrize(("count", "ranks"), [(1, 1), (24, 1), (24, 8), (24, 64)])
def test_charts_fit_into_16_kb_whatever_is_logged(count: int, ranks: int) -> None:
    run = Run(ranks=ranks).start()
    for number in range(count):
        for rank in range(ranks):
            values = [1e5 * math.sin(at * rank) for at in range(199)]
            run.apply(MetricsLogged(rank=rank, metrics=points(f"{number}{'é' * 240}", values)))
    charts = metric_charts(run.view.metrics)
    assert json_bytes(charts) <= 16_000
    assert len(charts) == count
    assert all(drawn.curves and len(drawn.curves[0].values) >= min(12, 199) for drawn in charts)
    run.say(0, "a line\n" * 5000)
    assert len(render_html(run.end().view).encode()) <= 75_000
