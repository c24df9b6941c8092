"""Ray in the driver, rank 0: connects to the cluster, waits for the last lines of tasks and actors, and disconnects.

Also refuses Ray Serve, since the run's cluster ends with its driver and can't be reached from outside, and makes the
environment variables of the driver and of Ray's processes.
"""

# Ray's inner parts are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false, reportMissingImports=false

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from sgpu_magic.errors import EnvironmentFailed, UsageError
from sgpu_magic.wire.rank import PrivateRay
from sgpu_magic.worker.process.patches import around_import, map_cuda_in_task

# functions that start a Serve instance (ray/serve/api.py)
_STARTERS = ("run", "run_many", "start")
_REFUSAL = (
    "Ray Serve can't be started in a @ray_launch run (rank 0): the run's cluster ends with its driver, so it "
    "can't keep serving. Call the model in Ray tasks or actors of the run, and serve it from a permanent Ray cluster "
    "of your own."
)
_LOOK_S = 0.03
# the wait ends after this time without a new line; Ray's log monitor looks every 0.1 s
_QUIET_S = 1.5
_SHUTDOWN_S = 10.0
_OURS = "sgpu_count"
# Ray's marks in a worker's log, which don't count as lines (ray_constants.LOG_PREFIX_*)
_MARKS = (b":actor_name:", b":task_name:", b":job_id:")


def refuse_serve() -> None:
    """Make the functions that start Ray Serve fail in this process. Its other names stay: libraries import them."""
    around_import(("ray.serve", "ray.serve.api"), _execute_guarded)


def _execute_guarded(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        execute(module)
    except ImportError as error:
        # Serve's own dependencies are missing, and installing them would not help; optional imports catch this too
        raise ImportError(_REFUSAL, name=error.name) from error
    for name in _STARTERS:
        if hasattr(module, name):
            setattr(module, name, _refuse)


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    raise UsageError(_REFUSAL)


class Lines:
    """Counts the lines that Ray's log monitors have sent to the driver.

    Args:
        elsewhere: Returns the number of lines written on the other nodes.

    Attributes:
        logs: This node's log directory, None until Ray is up.
    """

    def __init__(self, elsewhere: Callable[[], int]) -> None:
        self._elsewhere = elsewhere
        self._come = 0
        self._came_at = 0.0
        self.logs: Path | None = None

    def take(self, batch: Any) -> None:
        """Count a batch of lines. Called in Ray's own thread."""
        if isinstance(batch, dict) and str(batch.get("pid", "")).isdigit():
            self._come += len(batch.get("lines", ()))
            self._came_at = time.monotonic()

    def wait(self) -> None:
        """Wait until all lines that workers have written have arrived, or none has arrived for 1.5 s."""
        if self.logs is None:
            return
        written = written_in(self.logs) + self._elsewhere()
        begin = time.monotonic()
        while self._come < written and time.monotonic() - max(begin, self._came_at) < _QUIET_S:
            time.sleep(_LOOK_S)


def written_in(logs: Path) -> int:
    """Count the lines that workers have written in a node's log directory."""
    lines = 0
    for path in (*logs.glob("worker-*.out"), *logs.glob("worker-*.err")):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        if data:
            lines += sum(not line.startswith(_MARKS) for line in data.removesuffix(b"\n").split(b"\n"))
    return lines


class Driver:
    """Ray in the driver's process, from its import to the end of the cell.

    Args:
        lines: Counts the lines that have arrived.
    """

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._connected: Any = None

    def begin(self) -> None:
        """Import Ray, which takes half a second. If Ray is missing, the node's process reports it."""
        refuse_serve()
        with contextlib.suppress(ImportError):
            self._prepare(importlib.import_module("ray"))

    def connect(self) -> None:
        """Connect to the cluster that `RAY_ADDRESS` names, so that calling `ray.init()` is optional.

        Raises:
            EnvironmentFailed: The cluster can't be reached.
        """
        ray: Any = importlib.import_module("ray")
        if ray.is_initialized():
            # unpickling a value has connected already
            return
        # Ray logs the address, which the run's own remark already has
        log = logging.getLogger("ray._private.worker")
        log.disabled = True
        try:
            self._connected = ray.init()
        except (OSError, RuntimeError) as error:
            raise EnvironmentFailed(f"rank 0 can't connect to the run's Ray cluster: {error}") from error
        finally:
            log.disabled = False

    def end(self) -> None:
        """Wait for the last lines and disconnect, if the cell has not done so."""
        ray: Any = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        # a broken cluster may never answer
        leaving = threading.Thread(target=ray.shutdown, name="sgpu-ray-leave", daemon=True)
        leaving.start()
        leaving.join(_SHUTDOWN_S)

    def _prepare(self, ray: ModuleType) -> None:
        try:
            from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher
        except ImportError:
            # another version keeps it elsewhere: then the last lines may be missing, as in plain Ray
            return
        dispatcher.add_handler(_OURS, self._lines.take)
        shutdown: Callable[..., Any] = ray.shutdown
        init: Callable[..., Any] = ray.init

        @functools.wraps(shutdown)
        def wait_and_shut_down(*args: Any, **kwargs: Any) -> Any:
            if ray.is_initialized():
                self._lines.wait()
            return shutdown(*args, **kwargs)

        @functools.wraps(init)
        def init_once_more(*args: Any, **kwargs: Any) -> Any:
            """Let the user's first `ray.init()` succeed, as if the driver were not connected yet."""
            connected, self._connected = self._connected, None
            if connected is not None and ray.is_initialized():
                if not args and not kwargs.keys() - {"ignore_reinit_error"}:
                    return connected
                shutdown()
            return init(*args, **kwargs)

        # `setattr`: a type checker does not know these attributes of a module
        setattr(ray, "shutdown", wait_and_shut_down)  # noqa: B010
        setattr(ray, "init", init_once_more)  # noqa: B010


# ---------------------------------------------------------------- variables


LOOPBACK = "127.0.0.1"

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
    return {**kept, **ray, **hook, "PYTHONPATH": os.pathsep.join(found)}


def forget_others() -> None:
    """Remove the variables of another cluster, which the notebook or the node may be in, from this environment."""
    for name in _OTHERS:
        os.environ.pop(name, None)
