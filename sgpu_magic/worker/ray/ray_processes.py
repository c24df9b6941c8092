"""Ray's processes on a node, as its ranks see them: their environment variables, lines of output and metrics.

Metrics go to the MLflow run. The node's first rank reads them every five seconds from the node's metrics agent, in
Prometheus format:

    system/node0/ray_cpu_utilization_percentage      of the node's CPUs (ray_node_cpu_utilization)
    system/node0/ray_memory_usage_megabytes          of the node (ray_node_mem_used)
    system/node0/ray_object_store_megabytes          memory of Ray's objects on the node (ray_object_store_used_memory)
    system/node0/ray_tasks_running                   tasks running on the node (ray_tasks, Source executor)
    system/node0/ray_actors                          actors alive on the node (ray_actors, Source executor)
    system/node0/ray_cpus_in_use, ray_gpus_in_use    of those that Ray allocates (ray_resources)
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from sgpu_magic.wire.rank import MetricsReported, PrivateRay
from sgpu_magic.wire.tracking import MetricPoint
from sgpu_magic.worker.process.stand_in import map_cuda_in_task

LOOPBACK = "127.0.0.1"

# seconds for the dashboard's start, unless the user has set them: its nine processes import Ray at the same time, which
# takes longer than Ray's 30 s on few cores
_PATIENCE = {"RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "75", "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "75"}
# where Ray's workers find `worker_process_setup_hook` of a runtime environment, which code may set to another
_SETUP_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"

# variables of another cluster, which the notebook or the node's pool may be in
_OTHERS = frozenset({
    "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH",
    "RAY_CLIENT_MODE", "RAY_CLUSTER_ID", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_JOB_ID", "RAY_LAUNCHER", "RAY_NAMESPACE", "RAY_NODE_ID", "RAY_NODE_IP_ADDRESS", "RAY_OVERRIDE_JOB_RUNTIME_ENV",
    "RAY_RAYLET_PID", "RAY_RUNTIME_ENV_HOOK", "RAY_SERIALIZED_RUNTIME_ENV_CONTEXT", "RAY_START_HOOK", "RAY_TMPDIR",
    "RAY_USE_TLS",
})  # fmt: skip
# a task is not a rank: code that reads these would wait for peers that never come
_OF_RANKS = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
    # set from the rank's share of the cores; Ray sets it from what a task asks for
    "OMP_NUM_THREADS",
})  # fmt: skip
# Ray's marks in a worker's log, which don't count as lines (ray_constants.LOG_PREFIX_*)
_MARKS = (b":actor_name:", b":task_name:", b":job_id:")
_EACH_S = 5.0
_TIMEOUT_S = 3.0
_MB = 1e6
# a value may also be `NaN`, which counts as none
_LINE = re.compile(
    r"^(?P<name>ray_\w+)(?:\{(?P<labels>.*)\})? (?P<value>[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)$", re.MULTILINE
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_GONE_STATES = ("DEAD", "PENDING_CREATION", "DEPENDENCIES_UNREADY", "RESTARTING")


def write_token(directory: str, token: str) -> str:
    """Write the token to a file of mode 0600, from which Ray's processes on this node read it. Returns its path.

    Raises:
        OSError: The file can't be written.
    """
    path = Path(directory, "token")
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(token)
    return str(path)


def of_ray(token_file: str, order: PrivateRay) -> dict[str, str]:
    """Return the environment variables of the driver and of Ray's own processes.

    Args:
        token_file: The file with the token.
        order: The node's part of the cluster.
    """
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": token_file,
        "RAY_USAGE_STATS_ENABLED": "0",
        # show repeated lines
        "RAY_DEDUP_LOGS": "0",
        # no fixed port: two clusters may be on one machine
        "DASHBOARD_METRIC_PORT": "0",
    }
    if order.address == LOOPBACK:
        # else `ray.init()` replaces the loopback address by the machine's own (services.py, resolve_ip_for_localhost),
        # where nothing listens
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return variables


def of_processes(
    environ: Mapping[str, str], ray: Mapping[str, str], paths: Collection[str], package: str, *, maps_cuda: bool = False
) -> dict[str, str]:
    """Return the environment of Ray's processes on a node.

    Args:
        environ: The rank's environment.
        ray: The variables from `of_ray`.
        paths: Entries of the rank's `sys.path` outside its Python installation, from which tasks import modules.
        package: The directory that contains this package.
        maps_cuda: Map cuda to the CPU in tasks and actors.
    """
    kept = {name: value for name, value in environ.items() if name not in _OTHERS | _OF_RANKS}
    found = [*paths, *([] if package in paths else [package])]
    hook = {_SETUP_HOOK: f"{map_cuda_in_task.__module__}.{map_cuda_in_task.__name__}"} if maps_cuda else {}
    return {**_PATIENCE, **kept, **ray, **hook, "PYTHONPATH": os.pathsep.join(found)}


def forget_others() -> None:
    """Remove the variables of another cluster, which the notebook or the node may be in, from this environment."""
    for name in _OTHERS:
        os.environ.pop(name, None)


# ---------------------------------------------------------------- lines


def written_in(logs: Path) -> int:
    """Count the lines that workers have written in a node's log directory."""
    lines = 0
    for path in (*logs.glob("worker-*.out"), *logs.glob("worker-*.err")):
        with contextlib.suppress(OSError):
            if data := path.read_bytes():
                lines += sum(not line.startswith(_MARKS) for line in data.removesuffix(b"\n").split(b"\n"))
    return lines


# ---------------------------------------------------------------- metrics


class RayMetrics:
    """Reads a node's metrics in a thread until `end`.

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
        self._stopped = threading.Event()
        self._step = 0
        self._thread = threading.Thread(target=self._read_on, name="sgpu-ray-metrics", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Read once more and stop: later metrics would belong to another cell."""
        self._stopped.set()
        self._thread.join(2 * _TIMEOUT_S)

    def _read_on(self) -> None:
        while True:
            is_last = self._stopped.wait(_EACH_S)
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
            if is_last:
                return

    def _read(self) -> dict[str, float]:
        """Return the current values, none if the metrics agent does not answer."""
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(self._url, timeout=_TIMEOUT_S) as answer:
            return values_in(answer.read().decode("utf-8", "replace"))
        return {}


def values_in(text: str) -> dict[str, float]:
    """Return the values in a metrics agent's answer, by the names above without their prefix."""
    values: dict[str, float] = {}
    for found in _LINE.finditer(text):
        labels, value = dict(_LABEL.findall(found["labels"] or "")), float(found["value"])
        match found["name"]:
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
