"""Starts Ray's processes of one node, watches them, and ends them with all that they have started.

    python -m sgpu_magic.worker.ray.node

Its standard input begins with a `StartNode` and then stays open: at its end all is killed. What it has to say are
lines on its standard output. As a subreaper it gets what Ray's processes leave behind, so nothing of them outlives it;
when it is killed itself, the agent finds them by the run's mark.

`ray start` would do, but for its client server on a fixed port and the autoscaler's monitor, which a private cluster
needs neither of.
"""

# Ray's inner parts are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false, reportMissingImports=false, reportUnknownParameterType=false

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import select
import shutil
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from sgpu_magic.system import processes
from sgpu_magic.wire.record import Record
from sgpu_magic.worker.ray.node_process import NodeStarted, NodeTroubled, StartNode, line_of, start_words

_LOOK_S = 0.1
_STARTS = 3
_TAIL_LINES = 5
_TEMP = "r"
# `[2026-11-22 20:56:52,855 E 5600 5600] (raylet) ...` and the lines of its Python programs
_BAD = re.compile(r"^\[\S+ \S+ [EFC] |\b(ERROR|CRITICAL)\b|^\w*(Error|Exception)\b")
_FRAME = re.compile(r"\(\+0x[0-9a-f]+\)")
# without these the cluster can't do anything
_VITAL = ("gcs_server", "raylet")
SIMULATED = "simulated"
"""Custom resource of nodes whose GPUs are simulated."""


def main() -> None:
    """Be the node until standard input ends, or Ray's own processes do."""
    # an interrupt is the driver's
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.become_subreaper()
    words = os.fdopen(os.dup(1), "wb", buffering=0)
    # whatever Ray prints is no word of ours, and how often it has looked for its raylet is nobody's
    os.dup2(2, 1)
    logging.disable(logging.INFO)
    order = start_words.decode(sys.stdin.buffer.readline())

    def leave(signum: int, frame: FrameType | None) -> None:
        os._exit(_ended(order))

    signal.signal(signal.SIGTERM, leave)
    try:
        node, started = _start_patiently(order)
    except ImportError as error:
        _say(words, NodeTroubled(text=f"{error}", missing=error.name in ("ray", "ray._raylet")))
    except Exception as error:  # noqa: BLE001  a process's entry: whatever Ray raises is told by the rank
        _say(words, NodeTroubled(text=f"Ray could not be started: {error}", log=_tails(order.directory)))
    else:
        _say(words, started)
        _watch(node, started.session_directory, words)
    os._exit(_ended(order))


def _ended(order: StartNode) -> int:
    processes.kill_descendants()
    # the agent does it too, when it is alive
    for directory in (order.directory, order.spill_directory):
        shutil.rmtree(directory, ignore_errors=True)
    return 0


def _say(words: Any, word: Record) -> None:
    # the rank is gone: nobody is left to tell
    with contextlib.suppress(OSError):
        words.write(line_of(word))


# ---------------------------------------------------------------- start


def _start_patiently(order: StartNode) -> tuple[Any, NodeStarted]:
    """Start, and again where it took too long.

    Ray gives its processes 15 s to import what they need, and no setting changes that: from a cold or shared disk it
    may take longer, and then the next time finds it in memory.
    """
    for _ in range(_STARTS - 1):
        try:
            return _start(order)
        except Exception as error:
            if "timed out" not in str(error):
                raise
        processes.kill_descendants()
    return _start(order)


def _start(order: StartNode) -> tuple[Any, NodeStarted]:
    """Start Ray's processes and return when they are there."""
    import ray
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    is_head = not order.head
    wanted: dict[str, Any] = {
        "node_ip_address": order.address,
        "node_manager_port": 0,
        "object_manager_port": 0,
        # 0 is any free port
        "min_worker_port": 0,
        "max_worker_port": 0,
        "dashboard_agent_listen_port": 0,
        "metrics_agent_port": 0,
        "metrics_export_port": 0,
        "runtime_env_agent_port": 0,
        "num_cpus": order.cpus,
        "num_gpus": order.gpus,
        "object_store_memory": order.object_store_bytes,
        "object_spilling_directory": order.spill_directory,
        # Ray opens its own directory to all (mode 0777); the one around it is private
        "temp_dir": str(Path(order.directory) / _TEMP),
        "include_log_monitor": True,
        "log_to_stderr": False,
        "no_monitor": True,
    }
    if order.objects_directory:
        wanted["plasma_directory"] = order.objects_directory
    if order.simulated:
        wanted["resources"] = {SIMULATED: order.gpus}
        wanted["env_vars"] = _no_gpus()
    if is_head:
        port = _free_port(order.address)
        # what tasks ask Ray about is asked here, and not of another cluster on this machine
        os.environ["RAY_ADDRESS"] = f"[{order.address}]:{port}" if ":" in order.address else f"{order.address}:{port}"
        wanted |= {
            "gcs_server_port": port,
            "include_dashboard": order.dashboard and _has_dashboard(),
            "dashboard_host": "127.0.0.1",
            "dashboard_port": _free_port("127.0.0.1"),
        }
    else:
        os.environ["RAY_ADDRESS"] = wanted["gcs_address"] = order.head
    # a version that does not know one has no such port or process
    known = inspect.signature(RayParams.__init__).parameters
    params = RayParams(**{name: value for name, value in wanted.items() if name in known})
    node = Node(params, head=is_head, shutdown_at_exit=False, spawn_reaper=False)
    return node, NodeStarted(
        address=node.gcs_address,
        dashboard=(node.webui_url or "") if is_head else "",
        metrics_port=int(node.metrics_export_port or 0),
        session_directory=node.get_session_dir_path(),
        ray_version=ray.__version__,
    )


def _no_gpus() -> dict[str, str]:
    """Variables of workers whose GPUs are simulated: they find none, whatever Ray gives them."""
    # Ray itself must not see the empty list: it refuses to count more GPUs than are visible
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        # nothing is to be hidden, and `ray.get_gpu_ids()` tells the simulated ones
        return {}
    return {"CUDA_VISIBLE_DEVICES": "", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def _has_dashboard() -> bool:
    """Whether `ray[default]` is there, whose parts the dashboard needs."""
    import ray._private.utils as found

    utils: Any = found
    if hasattr(utils, "get_dashboard_dependency_error"):
        return utils.get_dashboard_dependency_error() is None
    return bool(utils.check_dashboard_dependencies_installed())


def _free_port(address: str) -> int:
    """A port that is free now. 0 would do where Ray takes it for any; not every version does."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])


# ---------------------------------------------------------------- watch


def _watch(node: Any, session_directory: str, words: Any) -> None:
    """Return when standard input ends, or a process has died without which nothing goes on."""
    while True:
        ready, _, _ = select.select([0], [], [], _LOOK_S)
        if ready and not os.read(0, 4096):
            return
        for kind, process in node.dead_processes():
            if kind not in _VITAL:
                continue
            status = process.returncode
            ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            text = f"Ray's {kind} ({process.pid}) {ended}"
            log = _tail_of(Path(session_directory) / "logs", kind)
            _say(words, NodeTroubled(text=text, log=log))
            # the driver may go down with it before it can tell
            sys.stderr.write(f"sgpu: {text}.{chr(10) + log if log else ''}\n")
            sys.stderr.flush()
            return


def _tails(directory: str) -> str:
    """What the logs of Ray's processes that did not start end with."""
    logs = Path(directory) / _TEMP / "session_latest" / "logs"
    found = [(kind, _tail_of(logs, kind)) for kind in _VITAL]
    return "\n".join(f"{kind}: {text}" for kind, text in found if text)


def _tail_of(logs: Path, kind: str) -> str:
    """The last lines that tell of errors; without such the last ones, but for the frames of a stack."""
    lines: list[str] = []
    for suffix in ("out", "err", "log"):
        with contextlib.suppress(OSError):
            lines += (logs / f"{kind}.{suffix}").read_text(errors="replace").splitlines()
    lines = [line for line in lines if line.strip() and not _FRAME.search(line)]
    return "\n".join(([line for line in lines if _BAD.search(line)] or lines)[-_TAIL_LINES:])


if __name__ == "__main__":
    main()
