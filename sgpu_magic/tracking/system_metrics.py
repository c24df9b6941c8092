"""System metrics of a run, under the names that MLflow gives them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sgpu_magic.wire.rank_events import RankSample, Sampled
from sgpu_magic.wire.tracking import MetricPoint

_EACH_S = 60.0
_WINDOW_S = 10.0
_NODE = "system/node0/"


class SystemMetrics:
    """Converts one run's samples to metric points.

    Args:
        cores: The node's number of cores, None if unknown.

    Attributes:
        each_s: Seconds from the beginning for which each sample is a point of its own.
    """

    def __init__(self, cores: int | None) -> None:
        self.each_s = _EACH_S
        self._cores = cores
        self._devices: tuple[str, ...] = ()
        self._uuids: dict[int, str] = {}
        self._totals: dict[int, int] = {}
        self._sums: dict[str, list[float]] = {}
        self._gathered_s = 0.0
        self._passed_s = 0.0
        self._step = 0
        self._at_ms = 0

    def set_devices(self, uuids: Sequence[str]) -> None:
        """Set the run's devices, in rank order."""
        self._devices = tuple(dict.fromkeys(uuids))

    def started_again(self) -> None:
        """Forget the ranks' devices after a restart: the first sample of each new process names its device again."""
        self._uuids, self._totals = {}, {}

    def add(self, sampled: Sampled, at: float) -> list[MetricPoint]:
        """Add samples and return the points that are due; `at` is their time in seconds since the epoch."""
        for sample in sampled.samples:
            if sample.uuid:
                self._uuids[sample.rank] = sample.uuid
            if sample.total_bytes:
                self._totals[sample.rank] = sample.total_bytes
        # ranks on one device have the same key
        values = {key: value for key, value in self._readings(sampled.samples) if value is not None}
        for key, value in values.items():
            self._sums.setdefault(key, []).append(value)
        self._gathered_s += sampled.seconds
        self._passed_s += sampled.seconds
        self._at_ms = int(at * 1000)
        if self._passed_s > self.each_s and self._gathered_s < _WINDOW_S:
            return []
        return self.rest()

    def rest(self) -> list[MetricPoint]:
        """Return the points for the samples since the last points."""
        points = [
            MetricPoint(_NODE + key, round(sum(values) / len(values), 1), self._at_ms, self._step)
            for key, values in self._sums.items()
        ]
        self._step += bool(points)
        self._sums, self._gathered_s = {}, 0.0
        return points

    def _readings(self, samples: Sequence[RankSample]) -> Iterator[tuple[str, float | None]]:
        for sample in samples:
            rank, gpu = f"rank_{sample.rank}", f"gpu_{self._index_of(sample.rank)}"
            if sample.kind != "cpu":
                yield f"{gpu}_utilization_percentage", sample.utilization_pct
                yield f"{gpu}_memory_usage_megabytes", _megabytes(sample.used_bytes)
                yield f"{gpu}_memory_usage_percentage", _percent(sample.used_bytes, self._totals.get(sample.rank))
                yield f"{gpu}_power_usage_watts", sample.power_w
            yield f"{rank}_cpu_utilization_percentage", _percent(sample.cpu_cores, 1)
            yield f"{rank}_memory_usage_megabytes", _megabytes(sample.rss_bytes)
        cores = [sample.cpu_cores for sample in samples if sample.cpu_cores is not None]
        yield "cpu_utilization_percentage", _percent(sum(cores) if cores else None, self._cores)
        held = [sample.rss_bytes for sample in samples if sample.rss_bytes is not None]
        yield "system_memory_usage_megabytes", _megabytes(sum(held) if held else None)

    def _index_of(self, rank: int) -> int:
        uuid = self._uuids.get(rank, "")
        return self._devices.index(uuid) if uuid in self._devices else rank


def _percent(part: float | None, whole: float | None) -> float | None:
    return 100 * part / whole if part is not None and whole else None


def _megabytes(count: int | None) -> float | None:
    return count / 1e6 if count is not None else None
