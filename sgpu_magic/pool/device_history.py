"""Use and memory of the pool's devices in the last ten minutes, from inventories and from the samples of runs.

Nothing is measured for it: while no run uses a device and no client asks for the pool's status, it has no points.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sgpu_magic.wire.devices import Device, Inventory, Lease
from sgpu_magic.wire.pool_status import HISTORY_POINTS, HISTORY_STEP_S, DeviceHistory
from sgpu_magic.wire.rank_events import RankSample

# a byte that is not a percentage: nothing was measured
_GAP = 255
_NO_POINTS = bytes([_GAP]) * HISTORY_POINTS


class DeviceHistories:
    """The history of each device of the pool.

    Times are seconds of a monotonic clock, so that setting the machine's clock has no effect. A history takes
    about 0.5 kB of memory.
    """

    def __init__(self) -> None:
        self._inventory = Inventory(host="")
        self._rings: dict[str, _Ring] = {}
        # the mean of each type, and the number of the interval in which it was computed
        self._means: tuple[int, tuple[DeviceHistory, ...]] = (-1, ())

    def add_inventory(self, inventory: Inventory, now: float) -> None:
        """Add what the nodes have measured, and drop devices that no longer exist."""
        number = _number_of(now)
        if inventory is not self._inventory:
            self._inventory = inventory
            self._keep(inventory.devices)
        for device in inventory.devices:
            if device.utilization_pct is not None or device.used_bytes is not None:
                memory_pct = _percentage(device.used_bytes, device.memory_bytes)
                self._rings[device.uuid].add(number, device.utilization_pct, memory_pct)

    def add_samples(self, lease: Lease, samples: Iterable[RankSample], now: float) -> None:
        """Add what the ranks of a run have measured; on simulated devices, their CPU time and memory."""
        number = _number_of(now)
        for sample in samples:
            ring = self._rings.get(lease.uuids[sample.rank]) if sample.rank < len(lease.uuids) else None
            if ring is None:
                continue
            if lease.simulated:
                pct = sample.cpu_pct(max(1.0, self._inventory.cores / lease.ranks))
                ring.add(number, pct, _percentage(sample.rss_bytes, ring.memory_bytes))
            else:
                ring.add(number, sample.utilization_pct, _percentage(sample.used_bytes, ring.memory_bytes))

    def all_histories(self, most: int, now: float) -> tuple[DeviceHistory, ...]:
        """Return the history of each device that was measured; of more than `most` devices, the mean of each type.

        Means are computed once in each interval.
        """
        number = _number_of(now)
        measured = [device for device in self._inventory.devices if self._rings[device.uuid].is_known(number)]
        if len(measured) > most:
            if self._means[0] != number:
                self._means = number, self._means_of(measured, number)
            return self._means[1]
        histories: list[DeviceHistory] = []
        for device in measured:
            use, memory = self._rings[device.uuid].points(number)
            histories.append(_history(device, _values(use), _values(memory), uuid=device.uuid))
        return tuple(histories)

    def _keep(self, devices: Sequence[Device]) -> None:
        """Keep the rings of these devices only."""
        rings = self._rings
        if len(rings) == len(devices) and all(device.uuid in rings for device in devices):
            return
        self._rings = {device.uuid: rings.get(device.uuid) or _Ring(device.memory_bytes) for device in devices}

    def _means_of(self, devices: Iterable[Device], number: int) -> tuple[DeviceHistory, ...]:
        types: dict[tuple[str, bool], list[Device]] = {}
        for device in devices:
            types.setdefault((device.type, device.simulated), []).append(device)
        histories: list[DeviceHistory] = []
        for of_type in types.values():
            points = [self._rings[device.uuid].points(number) for device in of_type]
            use, memory = (_mean_values(each) for each in zip(*points, strict=True))
            histories.append(_history(of_type[0], use, memory))
        return tuple(histories)


class _Ring:
    """The last points of one device, each the mean of an interval.

    Args:
        memory_bytes: The device's memory; 0 if unknown.
    """

    __slots__ = ("_memory", "_newest", "_points", "_use", "memory_bytes")

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        # use, then memory, each at the interval's number modulo `HISTORY_POINTS`; None before the first point
        self._points: bytearray | None = None
        self._newest = 0
        # mean and number of the values in the newest interval
        self._use: tuple[float, int] = (0.0, 0)
        self._memory: tuple[float, int] = (0.0, 0)

    def add(self, number: int, utilization_pct: float | None, memory_pct: float | None) -> None:
        """Add values in percent to an interval; those of an earlier interval than the newest count as the newest's."""
        if self._points is None:
            self._points = bytearray(2 * _NO_POINTS)
            self._newest = number
        if number > self._newest:
            for gap in range(max(self._newest + 1, number - HISTORY_POINTS + 1), number + 1):
                at = gap % HISTORY_POINTS
                self._points[at] = self._points[HISTORY_POINTS + at] = _GAP
            self._newest, self._use, self._memory = number, (0.0, 0), (0.0, 0)
        at = self._newest % HISTORY_POINTS
        if utilization_pct is not None:
            self._use = _with_value(self._use, utilization_pct)
            self._points[at] = round(self._use[0])
        if memory_pct is not None:
            self._memory = _with_value(self._memory, memory_pct)
            self._points[HISTORY_POINTS + at] = round(self._memory[0])

    def is_known(self, number: int) -> bool:
        """Whether there is a point in the intervals up to this one."""
        return self._points is not None and number - self._newest < HISTORY_POINTS

    def points(self, number: int) -> tuple[bytes, bytes]:
        """Return use and memory in the intervals up to this one, oldest first."""
        points = 2 * _NO_POINTS if self._points is None else bytes(self._points)
        first = (self._newest + 1) % HISTORY_POINTS
        missing = max(0, min(number - self._newest, HISTORY_POINTS))

        def ordered(ring: bytes) -> bytes:
            return (ring[first:] + ring[:first] + _NO_POINTS)[missing : missing + HISTORY_POINTS]

        return ordered(points[:HISTORY_POINTS]), ordered(points[HISTORY_POINTS:])


def _number_of(now: float) -> int:
    return int(now // HISTORY_STEP_S)


def _percentage(used_bytes: int | None, total_bytes: int) -> float | None:
    return None if used_bytes is None or total_bytes <= 0 else 100.0 * used_bytes / total_bytes


def _with_value(mean: tuple[float, int], value: float) -> tuple[float, int]:
    count = mean[1] + 1
    value = min(100.0, max(0.0, value))
    return mean[0] + (value - mean[0]) / count, count


def _values(points: bytes) -> tuple[int | None, ...]:
    return tuple(None if point == _GAP else point for point in points)


def _mean_values(rings: Sequence[bytes]) -> tuple[int | None, ...]:
    """Return the mean of several devices in each interval."""
    means: list[int | None] = []
    for column in zip(*rings, strict=True):
        known = [point for point in column if point != _GAP]
        means.append(round(sum(known) / len(known)) if known else None)
    return tuple(means)


def _history(
    device: Device, use: tuple[int | None, ...], memory: tuple[int | None, ...], uuid: str = ""
) -> DeviceHistory:
    """Return a history, which begins with the first interval in which anything was measured."""
    pairs = zip(use, memory, strict=True)
    first = next((at for at, pair in enumerate(pairs) if pair != (None, None)), len(use))
    return DeviceHistory(
        uuid=uuid,
        type=device.type,
        simulated=device.simulated,
        utilization_pct=use[first:],
        memory_pct=memory[first:],
    )
