"""A Ray node's metrics for the MLflow run, read from the node's metrics agent in Prometheus format.

    system/node0/ray_cpu_utilization_percentage      of the node's CPUs (ray_node_cpu_utilization)
    system/node0/ray_memory_usage_megabytes          of the node (ray_node_mem_used)
    system/node0/ray_object_store_megabytes          memory of Ray's objects on the node (ray_object_store_used_memory)
    system/node0/ray_tasks_running                   tasks running on the node (ray_tasks, Source executor)
    system/node0/ray_actors                          actors alive on the node (ray_actors, Source executor)
    system/node0/ray_cpus_in_use, ray_gpus_in_use    of those that Ray allocates (ray_resources)

The node's first rank reads them every five seconds.
"""

from __future__ import annotations

import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping

from sgpu_magic.wire.rank import MetricsReported
from sgpu_magic.wire.tracking import MetricPoint

_EACH_S = 5.0
_TIMEOUT_S = 3.0
_MB = 1e6
_LINE = re.compile(r"^(?P<name>ray_\w+)(?:\{(?P<labels>.*)\})? (?P<value>[-+.\deEnNaAifI]+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_GONE_STATES = ("DEAD", "PENDING_CREATION", "DEPENDENCIES_UNREADY", "RESTARTING")


class RayMetrics:
    """Reads a node's metrics in a thread while the run goes on.

    Args:
        address: The node's address.
        port: The port of its metrics agent.
        node: The node's number in the run.
        say: Sends a message to the agent.
    """

    def __init__(self, address: str, port: int, node: int, say: Callable[[MetricsReported], None]) -> None:
        self._url = f"http://{address}:{port}/metrics"
        self._prefix = f"system/node{node}/"
        self._say = say
        self._over = threading.Event()
        self._step = 0
        self._thread = threading.Thread(target=self._read_on, name="sgpu-ray-metrics", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Read once more and stop: later metrics would belong to another cell."""
        self._over.set()
        self._thread.join(2 * _TIMEOUT_S)

    def _read_on(self) -> None:
        while True:
            over = self._over.wait(_EACH_S)
            values = self._read()
            if values:
                at_ms = int(time.time() * 1000)
                points = tuple(
                    MetricPoint(self._prefix + key, round(value, 1), at_ms, self._step)
                    for key, value in sorted(values.items())
                )
                self._step += 1
                try:
                    self._say(MetricsReported(metrics=points))
                except OSError:
                    # the agent is gone, and this rank ends too
                    return
            if over:
                return

    def _read(self) -> dict[str, float]:
        """Return the current values, none if the metrics agent does not answer."""
        try:
            with urllib.request.urlopen(self._url, timeout=_TIMEOUT_S) as answer:
                text = answer.read().decode("utf-8", "replace")
        except (OSError, urllib.error.URLError, ValueError):
            return {}
        return values_in(text)


def values_in(text: str) -> dict[str, float]:
    """Return the values in a metrics agent's answer, by the names above without their prefix."""
    values: dict[str, float] = {}
    for name, labels, value in _samples(text):
        match name:
            case "ray_node_cpu_utilization":
                values["ray_cpu_utilization_percentage"] = value
            case "ray_node_mem_used":
                values["ray_memory_usage_megabytes"] = value / _MB
            case "ray_object_store_used_memory":
                values["ray_object_store_megabytes"] = value / _MB
            case "ray_tasks" if labels.get("Source") == "executor":
                running = value if labels.get("State", "").startswith("RUNNING") else 0.0
                values["ray_tasks_running"] = values.get("ray_tasks_running", 0.0) + running
            case "ray_actors" if labels.get("Source") == "executor":
                there = 0.0 if labels.get("State") in _GONE_STATES else value
                values["ray_actors"] = values.get("ray_actors", 0.0) + there
            case "ray_resources" if labels.get("State") == "USED" and labels.get("Name") in ("CPU", "GPU"):
                values[f"ray_{labels['Name'].lower()}s_in_use"] = value
            case _:
                pass
    return values


def _samples(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is not None:
            try:
                value = float(found["value"])
            except ValueError:
                continue
            if value == value:
                yield found["name"], dict(_LABEL.findall(found["labels"] or "")), value
