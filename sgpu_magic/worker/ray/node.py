"""Starts and watches Ray's processes on one node, and kills them with all their descendants.

    python -m sgpu_magic.worker.ray.node PRIVATE_RAY HEAD

A node's first rank runs this program as a `NodeProcess`. The program's standard input is a socket, to which it writes
one JSON record a line; when the rank shuts the other end down, it kills all processes and exits. As a subreaper it
adopts the orphans of Ray's processes, so none of them outlives it. If it is killed itself, the agent finds them by the
run's mark.

`ray start --block` can't hide a raylet's simulated GPUs from workers, and does not end together with the rank.
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
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.system import processes
from sgpu_magic.system.child_process import wait_or_kill
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.decoding import JsonDecoder, decode_json
from sgpu_magic.wire.run import PrivateRay

# more than the sum of Ray's own time limits, also on a machine that swaps
_START_S = 240.0
_STOP_S = 10.0
_POLL_S = 0.1
_STARTS = 3
_TAIL_LINES = 5
_TEMP = "r"
# `[2026-11-22 20:56:52,855 E 5600 5600] (raylet) ...` and the lines of its Python programs
_BAD = re.compile(r"^\[\S+ \S+ [EFC] |\b(ERROR|CRITICAL)\b|^\w*(Error|Exception)\b")
_FRAME = re.compile(r"\(\+0x[0-9a-f]+\)")
# without these the cluster can't work
_VITAL = ("gcs_server", "raylet")
# custom resource of nodes with simulated GPUs
_SIMULATED = "simulated"
# for these ports, 0 means any free port
_ANY_PORT = (
    "node_manager_port", "object_manager_port", "min_worker_port", "max_worker_port", "dashboard_agent_listen_port",
    "metrics_agent_port", "metrics_export_port", "runtime_env_agent_port",
)  # fmt: skip


class NodeStarted(Record, frozen=True, tag="node-started", kw_only=True):
    """Ray is up on this node.

    Args:
        address: The head's `host:port`.
        dashboard: The dashboard's `host:port`, "" if this node has none.
        metrics_port: Port of the node's metrics in Prometheus format, at the node's own address; 0 if it has none.
        session_directory: The directory of Ray's sockets and logs.
        ray_version: Ray's version.
    """

    address: str
    dashboard: str
    metrics_port: int
    session_directory: str
    ray_version: str


class NodeTroubled(Record, frozen=True, tag="node-troubled", kw_only=True):
    """Ray could not be started here, or one of its processes has died.

    Args:
        text: What has happened, a clause such as "Ray's raylet (5600) ended with status 1".
        log: The end of that process's log.
        missing: Whether the reason is that Ray is not installed in the ranks' Python.
    """

    text: str
    log: str = ""
    missing: bool = False


_words: JsonDecoder[NodeStarted | NodeTroubled] = JsonDecoder(NodeStarted | NodeTroubled)


class NodeProcess:
    """The program that runs Ray's processes on this node, a child process of the node's first rank.

    Args:
        order: The node's part of the cluster.
        head: The head's `host:port`; "" makes this node the head.
        environ: The environment of the program and of Ray's processes.

    Raises:
        OSError: No process or descriptor is left.
    """

    def __init__(self, order: PrivateRay, head: str, environ: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._lines = self._socket.makefile("rb")
        self._ending = False
        with theirs:
            # in the rank's own session, where the agent looks for its remaining processes
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sgpu_magic.worker.ray.node", msgspec.json.encode(order).decode(), head],
                stdin=theirs.fileno(),
                env=environ,
            )

    def fileno(self) -> int:
        """Return the socket's descriptor, which is readable when the program has written a record."""
        return self._socket.fileno()

    def started(self) -> NodeStarted:
        """Wait until Ray is up on this node.

        Raises:
            EnvironmentFailed: Ray can't be started, or is not up after 240 s.
        """
        if not select.select([self], [], [], _START_S)[0]:
            raise EnvironmentFailed(
                f"Ray did not start on the rank's node within {_START_S:.0f} s. Its logs are in the run's output; try "
                "a node with more memory or fewer other programs."
            )
        word = self.first_report()
        if isinstance(word, NodeTroubled):
            raise EnvironmentFailed(_why_not(word))
        return word

    def first_report(self) -> NodeStarted | NodeTroubled:
        """Return the program's next record. Blocks until there is one."""
        line = self._lines.readline()
        if not line:
            return NodeTroubled(text=f"the program that runs Ray ended with status {self._process.wait()}")
        return _words.decode(line)

    def watch(self, troubled: Callable[[NodeTroubled], None]) -> None:
        """Start a thread that calls `troubled` when one of Ray's processes dies."""

        def listen() -> None:
            word = self.first_report()
            if isinstance(word, NodeTroubled) and not self._ending:
                troubled(word)

        threading.Thread(target=listen, name="sgpu-ray-node", daemon=True).start()

    def stop(self) -> None:
        """Stop all of Ray's processes on this node, and return when they have ended."""
        self._ending = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        # if the program must be killed, the agent finds the remaining processes by the run's mark
        wait_or_kill(self._process, _STOP_S)


def _why_not(word: NodeTroubled) -> str:
    if word.missing:
        return (
            f"the ranks' Python ({sys.executable}) has no Ray: {word.text}. Install it in the notebook with "
            '%pip install "ray[default]" and run the cell again, or name an environment that has it with --env-version.'
        )
    return f"Ray does not start in the ranks' Python ({sys.executable}): {word.text}.\n{word.log}".rstrip()


# ---------------------------------------------------------------- the program


def main() -> None:
    """Run Ray until the rank shuts the socket down or one of Ray's vital processes ends."""
    order, head = decode_json(sys.argv[1], type=PrivateRay), sys.argv[2]
    # interrupts are for the driver
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda signum, frame: _end(order))
    processes.become_subreaper()
    link = socket.socket(fileno=os.dup(0))
    # Ray's processes must not inherit the socket, and their stdout is not the driver's output
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # Ray logs each attempt to reach its raylet
    logging.disable(logging.INFO)
    try:
        node, started = _start_patiently(order, head)
    except ImportError as error:
        _say(link, NodeTroubled(text=f"{error}", missing=error.name in ("ray", "ray._raylet")))
    except Exception as error:  # noqa: BLE001  a process's entry: the rank reports whatever Ray raises
        _say(link, NodeTroubled(text=f"Ray could not be started: {error}", log=_tails(order.directory)))
    else:
        _say(link, started)
        _watch(node, started.session_directory, link)
    _end(order)


def _end(order: PrivateRay) -> NoReturn:
    processes.end_children()
    # the agent removes them too, if it is alive
    for directory in (order.directory, order.disk_directory):
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def _say(link: socket.socket, word: NodeStarted | NodeTroubled) -> None:
    # an OSError means that the rank is gone
    with contextlib.suppress(OSError):
        link.sendall(msgspec.json.encode(word) + b"\n")


# ---------------------------------------------------------------- start


def _start_patiently(order: PrivateRay, head: str) -> tuple[Any, NodeStarted]:
    """Start Ray, and try again after a timeout.

    Ray gives its processes 15 s for their imports, which no setting changes. From a cold or shared disk the imports may
    take longer; the next attempt finds the files in memory.
    """
    for _ in range(_STARTS - 1):
        try:
            return _start(order, head)
        except Exception as error:
            if not re.search("timed out|Timeout after", str(error)):
                raise
        processes.end_children()
    return _start(order, head)


def _start(order: PrivateRay, head: str) -> tuple[Any, NodeStarted]:
    """Start Ray's processes, and return when they are up."""
    import ray
    from ray._private.node import Node
    from ray._private.parameter import RayParams
    from ray._private.utils import get_dashboard_dependency_error

    wanted: dict[str, Any] = {
        "node_ip_address": order.address,
        **dict.fromkeys(_ANY_PORT, 0),
        "num_cpus": order.cpus,
        "num_gpus": order.gpus,
        "object_store_memory": order.object_store_bytes,
        "object_spilling_directory": order.disk_directory,
        # Ray makes its own directory accessible to all (mode 0777); its parent is private
        "temp_dir": str(Path(order.directory) / _TEMP),
        "include_log_monitor": True,
        "log_to_stderr": False,
        "no_monitor": True,
    }
    if order.objects_on_disk:
        wanted["plasma_directory"] = order.disk_directory
    if order.simulated:
        wanted["resources"] = {_SIMULATED: order.gpus}
        wanted["env_vars"] = _no_gpus()
    is_head = not head
    if is_head:
        port = _free_port(order.address)
        head = f"[{order.address}]:{port}" if ":" in order.address else f"{order.address}:{port}"
        wanted |= {
            "gcs_server_port": port,
            # without `ray[default]` there is none
            "include_dashboard": order.dashboard and get_dashboard_dependency_error() is None,
            "dashboard_host": "127.0.0.1",
            "dashboard_port": _free_port("127.0.0.1"),
        }
    else:
        wanted["gcs_address"] = head
    # tasks must query this cluster, and not another one on this machine
    os.environ["RAY_ADDRESS"] = head
    # a Ray version without one of these parameters has no such port or process
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
    """Return the variables of workers with simulated GPUs, which hide real GPUs whatever Ray assigns."""
    # Ray itself must not see the empty list: it refuses more GPUs than are visible
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        # nothing to hide, and without these variables `ray.get_gpu_ids()` returns the simulated GPUs
        return {}
    return {"CUDA_VISIBLE_DEVICES": "", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def _free_port(address: str) -> int:
    """Return a port that is free now: not every version of Ray takes 0 for any free port."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])


# ---------------------------------------------------------------- watch


def _watch(node: Any, session_directory: str, link: socket.socket) -> None:
    """Return when the rank has shut the socket down or a vital process has died."""
    while not select.select([link], [], [], _POLL_S)[0]:
        for kind, process in node.dead_processes():
            if kind not in _VITAL:
                continue
            status = process.returncode
            ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            text, log = f"Ray's {kind} ({process.pid}) {ended}", _tail_of(Path(session_directory) / "logs", kind)
            _say(link, NodeTroubled(text=text, log=log))
            # also printed: the driver may die with it before it can report this
            print(f"sgpu: {text}.\n{log}".rstrip(), file=sys.stderr, flush=True)  # noqa: T201
            return


def _tails(directory: str) -> str:
    """Return the ends of the vital processes' logs, after a failed start."""
    logs = Path(directory) / _TEMP / "session_latest" / "logs"
    return "\n".join(f"{kind}: {text}" for kind in _VITAL if (text := _tail_of(logs, kind)))


def _tail_of(logs: Path, kind: str) -> str:
    """Return the last error lines of a process's logs, else the last lines; without stack frames."""
    files = (logs / f"{kind}.{suffix}" for suffix in ("out", "err", "log"))
    text = "\n".join(file.read_text(errors="replace") for file in files if file.is_file())
    lines = [line for line in text.splitlines() if line.strip() and not _FRAME.search(line)]
    return "\n".join(([line for line in lines if _BAD.search(line)] or lines)[-_TAIL_LINES:])


if __name__ == "__main__":
    main()
