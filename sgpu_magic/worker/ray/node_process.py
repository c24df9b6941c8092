"""Ray's node as its rank holds it: what the two say to each other, one JSON record a line; its numbers for MLflow.

    system/node0/ray_cpu_utilization_percentage      of the node's CPUs (ray_node_cpu_utilization)
    system/node0/ray_memory_usage_megabytes          of the node (ray_node_mem_used)
    system/node0/ray_object_store_megabytes          memory of Ray's objects here (ray_object_store_used_memory)
    system/node0/ray_tasks_running                   tasks that workers here execute (ray_tasks, Source executor)
    system/node0/ray_actors                          actors that live here (ray_actors, Source executor)
    system/node0/ray_cpus_in_use, ray_gpus_in_use    of those that Ray gives away (ray_resources)

They are read from the node's own metrics agent, in Prometheus' format, every five seconds, by the node's first rank.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

import msgspec

from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.system.child_process import wait_or_kill
from sgpu_magic.wire.rank import MetricsReported
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.tracking import MetricPoint

M = TypeVar("M")


class StartNode(Record, frozen=True, tag="start-node", kw_only=True):
    """Start Ray's processes of this node; the first line on the program's standard input.

    Args:
        head: The head's `host:port`; "" makes this node the head.
        directory: Sockets and logs.
        address: Where the node is reached.
        cpus: CPUs that Ray may give away.
        gpus: The same of GPUs.
        simulated: The GPUs are simulated.
        object_store_bytes: Most memory of objects.
        objects_directory: Where objects lie; "" is `/dev/shm`.
        spill_directory: Where they go when memory is full.
        dashboard: The head has a dashboard.
    """

    head: str
    directory: str
    address: str
    cpus: int
    gpus: int
    simulated: bool
    object_store_bytes: int
    objects_directory: str
    spill_directory: str
    dashboard: bool


class NodeStarted(Record, frozen=True, tag="node-started", kw_only=True):
    """Ray is up on this node.

    Args:
        address: The head's `host:port`.
        dashboard: The dashboard's `host:port`, "" where this node has none.
        metrics_port: Of the node's metrics in Prometheus' format, on `address`; 0 where there are none.
        session_directory: Of Ray's sockets and logs.
        ray_version: Ray's.
    """

    address: str
    dashboard: str
    metrics_port: int
    session_directory: str
    ray_version: str


class NodeTroubled(Record, frozen=True, tag="node-troubled", kw_only=True):
    """Ray could not be started here, or one of its processes has died.

    Args:
        text: What has happened, a clause: "Ray's raylet ended with status 1".
        log: The end of that process's log.
        missing: Ray is not installed in the ranks' Python.
    """

    text: str
    log: str = ""
    missing: bool = False


FromNode = NodeStarted | NodeTroubled


def line_of(word: Record) -> bytes:
    """One word as it is sent."""
    return msgspec.json.encode(word) + b"\n"


class LineReader(Generic[M]):
    """Puts words together from what a socket or pipe gives.

    Args:
        decoder: Of the words that come.
    """

    def __init__(self, decoder: msgspec.json.Decoder[M]) -> None:
        self._decoder = decoder
        self._rest = b""

    def feed(self, data: bytes) -> list[M]:
        """Take what has come and return the words that are whole.

        Raises:
            ValueError: It is no word.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [self._decoder.decode(line) for line in lines if line]


node_words: msgspec.json.Decoder[FromNode] = msgspec.json.Decoder(FromNode)
start_words: msgspec.json.Decoder[StartNode] = msgspec.json.Decoder(StartNode)


# Ray's own limits add up to less, also on a machine that swaps
_START_S = 240.0
_STOP_S = 10.0
_PROGRAM = "sgpu_magic.worker.ray.node"
_CHUNK_BYTES = 1 << 16


class NodeProcess:
    """Ray's processes on this node, as the child of the rank that leads here.

    Args:
        order: What is to be started.
        environ: Their environment.

    Raises:
        OSError: The system has no process or descriptor left.
    """

    def __init__(self, order: StartNode, environ: Mapping[str, str]) -> None:
        # in the rank's own session: the agent finds all that is left of it there
        self._process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, bufsize=0
        )
        self._reader = LineReader(node_words)
        self._ending = False
        if self._process.stdin is not None:
            # one that died at once is told of by its end
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(line_of(order))

    def fileno(self) -> int:
        """Readable when the program has something to say."""
        return self._process.stdout.fileno() if self._process.stdout is not None else -1

    def started(self) -> NodeStarted:
        """Wait until Ray is up here.

        Raises:
            EnvironmentFailed: It can't be started.
        """
        until = time.monotonic() + _START_S
        while True:
            if not select.select([self], [], [], max(0.0, until - time.monotonic()))[0]:
                raise EnvironmentFailed(
                    f"Ray was not up on the rank's node after {_START_S:.0f} s. Its logs are in the run's output; a "
                    "node with more memory or fewer other programs may do."
                )
            word = self.heard()
            if isinstance(word, NodeStarted):
                return word
            if word is not None:
                raise EnvironmentFailed(_why_not(word))

    def heard(self) -> NodeStarted | NodeTroubled | None:
        """Read what the program has said; None for half a word. To be called when there is something to read."""
        data = os.read(self.fileno(), _CHUNK_BYTES)
        if not data:
            status = self._process.wait()
            return NodeTroubled(text=f"the program that holds Ray's processes ended with status {status}")
        words = self._reader.feed(data)
        return words[0] if words else None

    def watch(self, troubled: Callable[[NodeTroubled], None]) -> None:
        """Have it told, in a thread, when one of Ray's processes dies."""

        def listen() -> None:
            with contextlib.suppress(OSError, ValueError):
                while not self._ending:
                    word = self.heard()
                    if isinstance(word, NodeTroubled):
                        if not self._ending:
                            troubled(word)
                        return

        threading.Thread(target=listen, name="sgpu-ray-node", daemon=True).start()

    def stop(self) -> None:
        """End all of Ray's processes here; return when they are gone."""
        self._ending = True
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        # what one that is killed leaves the agent finds by the run's mark
        wait_or_kill(self._process, _STOP_S)


def _why_not(word: NodeTroubled) -> str:
    if word.missing:
        return (
            f"the ranks' Python ({sys.executable}) has no Ray: {word.text}. Install it in the notebook with "
            '%pip install "ray[default]" and run the cell again, or name an environment that has it with --env-version.'
        )
    log = f"\n{word.log}" if word.log else ""
    return f"Ray does not start in the ranks' Python ({sys.executable}): {word.text}.{log}"


# ---------------------------------------------------------------- Ray's numbers


_EACH_S = 5.0
_TIMEOUT_S = 3.0
_MB = 1e6
_LINE = re.compile(r"^(?P<name>ray_\w+)(?:\{(?P<labels>.*)\})? (?P<value>[-+.\deEnNaAifI]+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_GONE_STATES = ("DEAD", "PENDING_CREATION", "DEPENDENCIES_UNREADY", "RESTARTING")


class RayMetrics:
    """Reads the node's numbers while the run goes on.

    Args:
        address: Where the node is reached.
        port: Its metrics agent's.
        node: The node's number in the run.
        say: Tells the agent.
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
        """Read once more, and no longer: what is said after this is another cell's."""
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
                    # the agent is gone, and this rank goes too
                    return
            if over:
                return

    def _read(self) -> dict[str, float]:
        """The numbers now; none where the metrics agent does not answer."""
        try:
            with urllib.request.urlopen(self._url, timeout=_TIMEOUT_S) as answer:
                text = answer.read().decode("utf-8", "replace")
        except (OSError, urllib.error.URLError, ValueError):
            return {}
        return values_in(text)


def values_in(text: str) -> dict[str, float]:
    """Return the numbers that stand in a metrics agent's answer, by our keys."""
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
