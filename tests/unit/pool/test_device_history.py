"""The use of devices in the last ten minutes, as the pool keeps it."""

from __future__ import annotations

import tracemalloc

from msgspec.structs import replace

from sgpu_magic.pool.device_history import DeviceHistories
from sgpu_magic.wire.devices import Device, Inventory, Lease
from sgpu_magic.wire.pool_status import HISTORY_POINTS, HISTORY_STEP_S
from sgpu_magic.wire.rank_events import RankSample

GB = 10**9
A10 = Device(uuid="GPU-0", type="a10", memory_bytes=24 * GB)


def measured(
    utilization_pct: float | None = None, used_gb: float | None = None, device: Device = A10, *others: Device
) -> Inventory:
    used = None if used_gb is None else int(used_gb * GB)
    return Inventory(
        host="box", cores=4, devices=(replace(device, utilization_pct=utilization_pct, used_bytes=used), *others)
    )


def use_of(histories: DeviceHistories, now: float) -> tuple[int | None, ...]:
    listed = histories.all_histories(16, now)
    return listed[0].utilization_pct if listed else ()


def test_a_point_is_the_mean_of_ten_seconds() -> None:
    histories = DeviceHistories()
    histories.add_inventory(measured(20.0, 6.0), 1000.0)
    histories.add_inventory(measured(61.0, 12.0), 1009.9)
    histories.add_inventory(measured(90.0, None), 1010.0)
    (history,) = histories.all_histories(16, 1019.0)
    assert (history.uuid, history.type, history.simulated) == ("GPU-0", "a10", False)
    assert history.utilization_pct == (40, 90)
    assert history.memory_pct == (38, None)


def test_time_without_measurements_is_a_gap_that_is_not_filled() -> None:
    histories = DeviceHistories()
    histories.add_inventory(measured(10.0), 1000.0)
    histories.add_inventory(measured(30.0), 1040.0)
    assert use_of(histories, 1065.0) == (10, None, None, None, 30, None, None)
    # a device whose driver reports nothing has no point
    histories.add_inventory(measured(None), 1070.0)
    assert use_of(histories, 1070.0)[-1] is None


def test_ten_minutes_are_kept() -> None:
    histories = DeviceHistories()
    for number in range(1, 131):
        histories.add_inventory(measured(float(number % 100)), number * HISTORY_STEP_S)
    used = use_of(histories, 1300.0)
    assert used == tuple(number % 100 for number in range(71, 131))
    assert len(used) == HISTORY_POINTS
    # the oldest leave one by one, and after ten minutes nothing is left
    assert use_of(histories, 1320.0) == (*used[2:], None, None)
    assert use_of(histories, 1300.0 + HISTORY_POINTS * HISTORY_STEP_S - 1) == (30, *[None] * 59)
    assert histories.all_histories(16, 1300.0 + HISTORY_POINTS * HISTORY_STEP_S) == ()


def test_a_pause_longer_than_the_history_leaves_only_what_came_after() -> None:
    histories = DeviceHistories()
    for number in range(30):
        histories.add_inventory(measured(50.0), number * HISTORY_STEP_S)
    histories.add_inventory(measured(7.0), 100_000.0)
    assert use_of(histories, 100_000.0) == (7,)
    # a call that was late by the clock belongs to the newest point
    histories.add_inventory(measured(9.0), 99_950.0)
    assert use_of(histories, 100_000.0) == (8,)


def test_devices_that_are_gone_are_dropped() -> None:
    histories = DeviceHistories()
    other = Device(uuid="GPU-1", type="a10", memory_bytes=24 * GB, utilization_pct=5.0)
    histories.add_inventory(measured(10.0, None, A10, other), 1000.0)
    assert [each.uuid for each in histories.all_histories(16, 1000.0)] == ["GPU-0", "GPU-1"]
    histories.add_inventory(Inventory(host="box", devices=(other,)), 1010.0)
    assert [each.uuid for each in histories.all_histories(16, 1010.0)] == ["GPU-1"]
    # samples of a run that still reports on it are ignored
    lease = Lease(lease_id="1", device_type="a10", ranks=1, uuids=("GPU-0",))
    histories.add_samples(lease, [RankSample(rank=0, kind="gpu", utilization_pct=50.0)], 1011.0)
    histories.add_inventory(measured(20.0, None, A10, other), 1020.0)
    assert histories.all_histories(16, 1020.0)[0].utilization_pct == (20,)


def test_samples_of_runs_count_for_the_devices_of_their_ranks() -> None:
    histories = DeviceHistories()
    second = replace(A10, uuid="GPU-1")
    histories.add_inventory(measured(None, None, A10, second), 1000.0)
    lease = Lease(lease_id="1", device_type="a10", ranks=2, uuids=("GPU-1", "GPU-0"))
    samples = [
        RankSample(rank=0, kind="gpu", utilization_pct=80.0, used_bytes=12 * GB),
        # a rank on a CPU slot has no device
        RankSample(rank=2, kind="gpu", utilization_pct=30.0),
    ]
    histories.add_samples(lease, samples, 1000.0)
    (history,) = histories.all_histories(16, 1000.0)
    assert (history.uuid, history.utilization_pct, history.memory_pct) == ("GPU-1", (80,), (50,))


def test_simulated_devices_have_the_cpu_time_and_memory_of_their_ranks() -> None:
    histories = DeviceHistories()
    device = Device(uuid="SIM-a10-0", type="a10", memory_bytes=24 * GB, simulated=True)
    histories.add_inventory(Inventory(host="box", cores=4, devices=(device,)), 1000.0)
    lease = Lease(lease_id="1", device_type="a10", ranks=2, uuids=("SIM-a10-0",), simulated=True)
    sample = RankSample(rank=0, kind="cpu", cpu_cores=1.0, rss_bytes=6 * GB)
    # two ranks share four cores
    histories.add_samples(lease, [sample], 1000.0)
    (history,) = histories.all_histories(16, 1000.0)
    assert (history.simulated, history.utilization_pct, history.memory_pct) == (True, (50,), (25,))
    histories.add_samples(lease, [replace(sample, cpu_cores=9.0)], 1010.0)
    assert use_of(histories, 1010.0) == (50, 100)


def test_of_many_devices_each_type_has_the_mean() -> None:
    histories = DeviceHistories()
    devices = [replace(A10, uuid=f"GPU-{number}", utilization_pct=10.0 * number) for number in range(4)]
    h100 = Device(uuid="GPU-h", type="h100", utilization_pct=7.0)
    idle = Device(uuid="GPU-i", type="l4")
    inventory = Inventory(host="box", devices=(*devices, h100, idle))
    histories.add_inventory(inventory, 1000.0)
    # a device without a measurement does not count
    assert [each.uuid for each in histories.all_histories(5, 1000.0)] == [*(each.uuid for each in devices), "GPU-h"]
    assert [(each.uuid, each.type, each.utilization_pct) for each in histories.all_histories(4, 1000.0)] == [
        ("", "a10", (15,)),
        ("", "h100", (7,)),
    ]


def test_the_history_of_a_large_pool_is_small() -> None:
    devices = tuple(replace(A10, uuid=f"GPU-{number}", utilization_pct=50.0, used_bytes=GB) for number in range(1000))
    histories = DeviceHistories()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(100):
            histories.add_inventory(Inventory(host="box", devices=devices), number * HISTORY_STEP_S)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (used - before) / len(devices) < 1000
