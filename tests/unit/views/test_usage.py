"""Resource use of ranks: curves that stay small and accurate, and the texts for measurements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpu_magic.views.fold import RunView
from sgpu_magic.views.usage import MAX_POINTS, RunUsage, Series, detail_lines, use_text
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.devices import Placement
from sgpu_magic.wire.events import AttemptFailed, Event, EventBody, RanksStarted, RunEnded
from sgpu_magic.wire.rank_events import DeviceBusy, DeviceIdle, Failure, RankSample, Sampled
from sgpu_magic.wire.run import CellSource, Owner, RunSpec

GB = 1_000_000_000
BUSY = RankSample(
    rank=0,
    kind="gpu",
    uuid="GPU-0",
    utilization_pct=94,
    own_utilization_pct=93,
    used_bytes=18_200_000_000,
    own_bytes=18 * GB,
    total_bytes=24 * GB,
    power_w=143,
    temperature_c=61,
    cpu_cores=1.21,
    rss_bytes=2 * GB,
)
ON_CPU = RankSample(rank=0, kind="cpu", cpu_cores=1.9, rss_bytes=400_000_000, total_bytes=8 * GB)
SLICE = RankSample(rank=0, kind="mig", uuid="MIG-0", used_bytes=4 * GB, total_bytes=20 * GB, cpu_cores=1, rss_bytes=GB)


# ---------------------------------------------------------------- series

spans = st.lists(
    st.tuples(st.floats(0.2, 30.0), st.one_of(st.none(), st.floats(0, 100))),
    min_size=1,
    max_size=400,
)


def series_of(pieces: Sequence[tuple[float, float | None]], began_s: float = 0.0) -> Series:
    series = Series(began_s, digits=6)
    at = began_s
    for seconds, value in pieces:
        series.add(at, at + seconds, value)
        at += seconds
    return series


@given(spans, st.floats(0, 1000))
def test_the_mean_of_a_curve_is_that_of_what_was_measured(pieces: list[tuple[float, float | None]], began_s: float):
    reported = [(seconds, value) for seconds, value in pieces if value is not None]
    mean = series_of(pieces, round(began_s, 3)).mean
    if not reported:
        assert mean is None
    else:
        expected = sum(seconds * value for seconds, value in reported) / sum(seconds for seconds, _ in reported)
        assert mean == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(spans)
def test_a_curve_is_never_longer_than_its_limit_and_covers_all_of_the_time(pieces: list[tuple[float, float | None]]):
    series = series_of(pieces)
    assert len(series.values) <= MAX_POINTS
    total_s = sum(seconds for seconds, _ in pieces)
    assert len(series.values) * series.step_s == pytest.approx(total_s, abs=series.step_s)
    reported = [value for _, value in pieces if value is not None]
    for value in series.values:
        assert value is None or min(reported) - 1e-5 <= value <= max(reported) + 1e-5


@given(st.lists(st.tuples(st.floats(0.2, 30.0), st.floats(0, 100)), min_size=1, max_size=400))
def test_what_rises_rises_in_the_curve(pieces: list[tuple[float, float]]):
    rising = sorted(value for _, value in pieces)
    values = series_of([(seconds, value) for (seconds, _), value in zip(pieces, rising, strict=True)]).values
    reported = [value for value in values if value is not None]
    assert len(reported) == len(values)
    assert all(later >= earlier - 1e-5 for earlier, later in itertools.pairwise(reported))


def test_a_curve_of_a_day_has_steps_of_a_quarter_of_an_hour():
    series = series_of([(1.0, 50.0)] * 600 + [(5.0, 100.0)] * 17_160)
    assert (len(series.values), series.step_s) == (85, 1024.0)
    assert series.values[0] == pytest.approx((600 * 50 + 424 * 100) / 1024, rel=1e-3)
    assert set(series.values[1:]) == {100.0}


def test_what_was_not_told_is_a_gap():
    assert series_of([(1.0, 5.0), (1.0, None), (1.0, 7.0)]).values == (5.0, None, 7.0)
    series = Series()
    series.add(0.0, 1.0, 5.0)
    series.add(4.0, 5.0, 9.0)
    assert series.values == (5.0, None, None, None, 9.0)


def test_timers_that_are_late_leave_neither_gaps_nor_slivers():
    values = series_of([(1.0037, 40.0)] * 100).values
    assert len(values) == 100
    assert set(values) == {40.0}


# ---------------------------------------------------------------- folding


def usage_of(*samples: RankSample, seconds: float = 1.0) -> RunUsage:
    usage = RunUsage()
    for number, sample in enumerate(samples, 1):
        usage.apply(Sampled(seconds=seconds, samples=(sample,)), 1000.0 + number * seconds, 1000.0)
    return usage


def changed(sample: RankSample, **changes: object) -> RankSample:
    return msgspec.structs.replace(sample, **changes)


def test_means_peaks_and_what_was_last():
    usage = usage_of(
        BUSY,
        changed(BUSY, uuid="", total_bytes=None, utilization_pct=50, used_bytes=20 * GB),
        changed(BUSY, uuid="", total_bytes=None, utilization_pct=0, used_bytes=GB, own_bytes=None),
    )
    rank = usage.ranks[0]
    assert rank.mean_utilization_pct == pytest.approx(48)
    assert (rank.peak_used_bytes, rank.peak_own_bytes) == (20 * GB, 18 * GB)
    assert rank.latest is not None
    assert (rank.latest.used_bytes, rank.latest.uuid, rank.latest.total_bytes) == (GB, "GPU-0", 24 * GB)
    assert usage.busy_pct == pytest.approx(48)


def test_the_use_of_a_run_is_the_mean_of_its_gpus():
    usage = RunUsage()
    usage.apply(Sampled(seconds=1, samples=(BUSY, changed(BUSY, rank=1, utilization_pct=6))), 1001, 1000)
    assert usage.busy_pct == pytest.approx(50)
    assert usage_of(ON_CPU).busy_pct is None
    assert usage_of(SLICE).busy_pct is None
    assert RunUsage().busy_pct is None


@pytest.mark.parametrize(
    ("sample", "first", "others"),
    [
        (
            BUSY,
            ("GPU", "%", 100.0),
            ["memory", "GPU, this run", "memory, this run", "power", "temperature", "CPU", "main memory"],
        ),
        (SLICE, ("memory", "GB", 20.0), ["CPU", "main memory"]),
        (ON_CPU, ("CPU", "cores", 1.9), ["memory"]),
        (changed(ON_CPU, cores=4), ("CPU", "cores", 4.0), ["memory"]),
    ],
    ids=["gpu", "mig", "cpu", "cpu of four cores"],
)
def test_the_first_curve_is_the_one_for_the_grid(
    sample: RankSample, first: tuple[str, str, float | None], others: list[str]
):
    curves = usage_of(sample, sample).ranks[0].curves()
    assert (curves[0].name, curves[0].unit, curves[0].top) == first
    assert [curve.name for curve in curves[1:]] == others
    assert all(len(curve.series.values) == 2 for curve in curves)


@pytest.mark.parametrize(("cores", "is_flat"), [(0.0, True), (0.04, True), (None, True), (0.06, False), (1.9, False)])
def test_a_curve_at_the_bottom_of_its_axis_is_flat(cores: float | None, is_flat: bool):
    sample = changed(ON_CPU, cpu_cores=cores)
    curve = next(iter(usage_of(changed(ON_CPU, cpu_cores=0.0), sample).ranks[0].curves()))
    assert (curve.name, curve.is_flat_zero) == ("CPU", is_flat)


def test_cores_are_told_once_and_stay():
    usage = usage_of(changed(ON_CPU, cores=2), ON_CPU)
    assert usage.ranks[0].latest == changed(ON_CPU, cores=2)


def test_before_anything_was_told_there_is_nothing_to_draw():
    usage = RunUsage()
    usage.apply(DeviceBusy(rank=0), 1001, 1000)
    assert usage.ranks[0].curves() == []
    assert usage.ranks[0].latest is None


def test_a_clock_that_is_set_back_leaves_the_curve_whole():
    usage = RunUsage()
    for at in (1001, 1002, 400, 401):
        usage.apply(Sampled(seconds=1, samples=(BUSY,)), at, 1000)
    series = usage.ranks[0].curves()[0].series
    assert (series.began_s, series.values) == (0.0, (94.0,) * 4)


def test_curves_begin_when_their_first_value_was_told():
    usage = usage_of(changed(BUSY, power_w=None), changed(BUSY, power_w=None), BUSY)
    began = {curve.name: (curve.series.began_s, curve.series.values) for curve in usage.ranks[0].curves()}
    assert began["power"] == (2.0, (143.0,))
    assert began["GPU"] == (0.0, (94.0,) * 3)


# ---------------------------------------------------------------- texts


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (BUSY, "94 % · 18.2 GB"),
        (changed(BUSY, utilization_pct=None), "18.2 GB"),
        (changed(BUSY, used_bytes=None), "94 %"),
        (changed(BUSY, utilization_pct=None, used_bytes=None), ""),
        (changed(BUSY, problem="it can't be read: it has fallen off the bus; reboot"), "can't be read"),
        (SLICE, "MIG · 4.0 GB"),
        (ON_CPU, "1.9 cores · 0.4 GB"),
        (changed(ON_CPU, cpu_cores=None), "0.4 GB"),
        (changed(ON_CPU, cpu_cores=None, rss_bytes=None), ""),
        (changed(ON_CPU, uuid="SIM-a10-0"), "1.9 cores · 0.4 GB"),
    ],
)
def test_use_in_a_few_words(sample: RankSample, text: str):
    assert use_text(sample) == text


def test_details_say_all_that_was_measured():
    assert detail_lines(BUSY) == [
        "device: GPU-0",
        "GPU: 94 %",
        "GPU, this run: 93 %",
        "memory: 18.2 of 24.0 GB",
        "memory, this run: 18.0 GB",
        "power: 143 W",
        "temperature: 61 °C",
        "CPU: 1.2 cores",
        "main memory: 2.0 GB",
    ]
    assert detail_lines(ON_CPU) == ["device: CPU", "CPU: 1.9 cores", "memory: 0.4 of 8.0 GB"]
    assert detail_lines(changed(ON_CPU, uuid="SIM-a10-0"))[0] == "device: CPU stands in for a simulated device"


def test_details_say_what_is_absent():
    lines = detail_lines(RankSample(rank=0, kind="gpu", uuid="GPU-0"))
    assert "power: not reported by this device" in lines
    assert "GPU: not reported by this device" in lines
    assert "CPU: unknown" in lines
    lines = detail_lines(SLICE)
    assert lines[0] == "device: a MIG slice, MIG-0"
    assert "power: reported for the whole GPU only, not for a MIG slice of it" in lines
    assert "memory: 4.0 of 20.0 GB" in lines
    lost = changed(BUSY, problem="it can't be read: it has fallen off the bus; reboot")
    assert detail_lines(lost)[1] == "it can't be read: it has fallen off the bus; reboot"


# ---------------------------------------------------------------- idle GPUs


def idle(*reported: tuple[int, float, str]) -> RunUsage:
    usage = RunUsage()
    for rank, seconds, waits_in in reported:
        usage.apply(DeviceIdle(rank=rank, seconds=seconds, waits_in=waits_in), 1060, 1000)
    return usage


def test_an_idle_gpu_is_named_with_its_cause():
    usage = idle((3, 60, "the DataLoader"))
    assert usage.idle_sentences == ["rank 3's GPU has been under 5 % for 60 s: it waits in the DataLoader"]
    assert usage.ranks[3].idle_text == "GPU under 5 % for 60 s: it waits in the DataLoader"
    assert idle((3, 60, "")).idle_sentences == ["rank 3's GPU has been under 5 % for 60 s"]


def test_ranks_with_one_cause_are_told_together():
    usage = idle(*((rank, 60 + rank, "the DataLoader") for rank in range(4)), (4, 90, "all_reduce"), (5, 70, ""))
    assert usage.idle_sentences == [
        "the GPUs of ranks 0-3 have been under 5 % for 60 s: they wait in the DataLoader",
        "rank 4's GPU has been under 5 % for 90 s: it waits in all_reduce",
        "rank 5's GPU has been under 5 % for 70 s",
    ]


def test_idle_time_grows_with_the_samples():
    usage = idle((0, 60, ""))
    usage.apply(Sampled(seconds=1, samples=(changed(BUSY, utilization_pct=0),)), 1140, 1000)
    assert usage.idle_sentences == ["rank 0's GPU has been under 5 % for 2 min 20 s"]


def test_a_gpu_that_works_again_stands_out_no_more():
    usage = idle((0, 60, ""), (1, 60, ""))
    usage.apply(DeviceBusy(rank=0), 1070, 1000)
    assert usage.idle_sentences == ["rank 1's GPU has been under 5 % for 60 s"]
    assert usage.ranks[0].idle_text == ""


# ---------------------------------------------------------------- in a view


def view_of(*bodies: EventBody) -> RunView:
    owner = Owner(pid=1, host="here", user="me")
    placement = Placement(ranks=1)
    spec = RunSpec(
        run_id="0" * 26,
        name="",
        cell=CellSource(body=""),
        placement=placement,
        outputs=(),
        owner=owner,
        timeout_s=60,
        retries=1,
    )
    view = RunView(spec)
    for number, body in enumerate(bodies):
        view.apply(Event(run_id=spec.run_id, seq=number + 1, at=1000.0 + number, body=body))
    return view


def test_a_view_folds_them_and_a_new_attempt_begins_anew():
    started = RanksStarted(pids=(1,), warm="zygote")
    sampled = Sampled(seconds=1.0, samples=(BUSY,))
    view = view_of(started, sampled, sampled, DeviceIdle(rank=0, seconds=60))
    assert view.usage.busy_pct == pytest.approx(94)
    assert view.usage.ranks[0].curves()[0].series.values == (94.0, 94.0)
    assert len(view.usage.idle_sentences) == 1
    failed = AttemptFailed(attempt=1, attempts=2, failure=Failure(kind=FailureKind.WORKER_DIED, message="it died"))
    view = view_of(started, sampled, DeviceIdle(rank=0, seconds=60), failed)
    assert view.usage.ranks == {}
    view = view_of(started, sampled, failed, started, sampled)
    assert view.usage.ranks[0].curves()[0].series.began_s == 0.0


def test_a_run_that_has_ended_keeps_its_curves_and_names_no_idle_gpu():
    started = RanksStarted(pids=(1,), warm="zygote")
    view = view_of(
        started, Sampled(seconds=1.0, samples=(BUSY,)), DeviceIdle(rank=0, seconds=60), RunEnded(state=RunState.FAILED)
    )
    assert view.usage.idle_sentences == []
    assert view.usage.ranks[0].latest == BUSY
