"""What a run's ranks and devices did, as metrics under the keys of MLflow's own system metrics. Pure.

    system/node0/gpu_0_utilization_percentage     the first of the run's own devices, in rank order
    system/node0/gpu_0_memory_usage_megabytes
    system/node0/gpu_0_memory_usage_percentage
    system/node0/gpu_0_power_usage_watts
    system/node0/cpu_utilization_percentage       of the run's processes together, of all cores of the node
    system/node0/system_memory_usage_megabytes    the same of memory
    system/node0/rank_0_cpu_utilization_percentage, rank_0_memory_usage_megabytes      of each rank; 100 is one core

In the first minute each sample is a point; later ten seconds are averaged into one, which is how often MLflow itself
looks. The same events make the same points however often they are read, so nothing is written twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from sgpu_magic.wire.rank_events import RankSample, Sampled
from sgpu_magic.wire.tracking import MetricPoint

_EACH_S = 60.0
_WINDOW_S = 10.0
_MB = 1e6
_NODE = "system/node0/"


class SystemMetrics:
    """Makes points of one run's samples.

    Args:
        cores: Of the node; None when not known.
    """

    def __init__(self, cores: int | None) -> None:
        self._cores = cores
        self._devices: tuple[str, ...] = ()
        self._uuids: dict[int, str] = {}
        self._totals: dict[int, int] = {}
        self._sums: dict[str, list[float]] = {}
        self._gathered_s = 0.0
        self._passed_s = 0.0
        self._step = 0
        self._at_ms = 0

    def placed(self, uuids: Sequence[str]) -> None:
        """The run's devices, in rank order."""
        self._devices = tuple(dict.fromkeys(uuids))

    def started_again(self) -> None:
        """Other processes are the ranks now; the first sample of each says again what its device is."""
        self._uuids, self._totals = {}, {}

    def take(self, sampled: Sampled, at: float) -> list[MetricPoint]:
        """Return the points that this makes.

        Args:
            sampled: What the ranks did.
            at: Wall-clock time, seconds since the epoch.
        """
        for sample in sampled.samples:
            if sample.uuid:
                self._uuids[sample.rank] = sample.uuid
            if sample.total_bytes:
                self._totals[sample.rank] = sample.total_bytes
        for key, value in self._values(sampled.samples).items():
            self._sums.setdefault(key, []).append(value)
        self._gathered_s += sampled.seconds
        self._passed_s += sampled.seconds
        self._at_ms = int(at * 1000)
        if self._passed_s > _EACH_S and self._gathered_s < _WINDOW_S:
            return []
        return self.rest()

    def rest(self) -> list[MetricPoint]:
        """Return what was gathered since the last points."""
        points = [
            MetricPoint(_NODE + key, round(sum(values) / len(values), 1), self._at_ms, self._step)
            for key, values in self._sums.items()
        ]
        self._step += bool(points)
        self._sums, self._gathered_s = {}, 0.0
        return points

    def _values(self, samples: Sequence[RankSample]) -> dict[str, float]:
        values: dict[str, float] = {}
        for sample in samples:
            if sample.kind != "cpu":
                self._of_device(sample, values)
            if sample.cpu_cores is not None:
                values[f"rank_{sample.rank}_cpu_utilization_percentage"] = 100 * sample.cpu_cores
            if sample.rss_bytes is not None:
                values[f"rank_{sample.rank}_memory_usage_megabytes"] = sample.rss_bytes / _MB
        cores = [sample.cpu_cores for sample in samples if sample.cpu_cores is not None]
        if cores and self._cores:
            values["cpu_utilization_percentage"] = 100 * sum(cores) / self._cores
        held = [sample.rss_bytes for sample in samples if sample.rss_bytes is not None]
        if held:
            values["system_memory_usage_megabytes"] = sum(held) / _MB
        return values

    def _of_device(self, sample: RankSample, values: dict[str, float]) -> None:
        gpu = f"gpu_{self._index_of(sample.rank)}"
        if sample.utilization_pct is not None:
            values[f"{gpu}_utilization_percentage"] = sample.utilization_pct
        if sample.used_bytes is not None:
            values[f"{gpu}_memory_usage_megabytes"] = sample.used_bytes / _MB
            total = self._totals.get(sample.rank)
            if total:
                values[f"{gpu}_memory_usage_percentage"] = 100 * sample.used_bytes / total
        if sample.power_w is not None:
            values[f"{gpu}_power_usage_watts"] = sample.power_w

    def _index_of(self, rank: int) -> int:
        uuid = self._uuids.get(rank, "")
        return self._devices.index(uuid) if uuid in self._devices else rank
