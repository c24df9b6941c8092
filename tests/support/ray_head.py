"""A Ray head as an operator starts it: `ray start --head` with a dashboard and token authentication."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from free_ports import free_ports
from process_table import below, is_alive, process_table
from waiting import eventually

_START_S = 120.0
_STARTS = 4
_STARTED = b"Ray runtime started"
RAY = str(Path(sys.executable).with_name("ray"))


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


class RayNode:
    """`ray start --block`: a raylet and its processes, in their own session.

    Args:
        arguments: Further arguments of `ray start`.
        ip: The node's address.
        log: The file for its output.
        environ: The environment of its processes.
        inside: Prefix of the command, such as `ip netns exec NAME`.
        gpus: Number of simulated GPUs.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        ip: str,
        log: Path,
        environ: Mapping[str, str],
        inside: Sequence[str] = (),
        gpus: int = 2,
    ) -> None:
        self.ip = ip
        self.log = log
        for left in reversed(range(_STARTS)):
            # give Ray these ports: it waits for those that it finds itself
            grpc, listen, runtime_env, metrics = free_ports(4)
            sent = log.stat().st_size if log.exists() else 0
            with open(log, "ab") as words:
                self.process = subprocess.Popen(
                    [
                        *inside, RAY, "start", "--block", "--disable-usage-stats", f"--node-ip-address={ip}",
                        f"--dashboard-agent-grpc-port={grpc}", f"--dashboard-agent-listen-port={listen}",
                        f"--runtime-env-agent-port={runtime_env}", f"--metrics-export-port={metrics}", "--num-cpus=4",
                        f"--num-gpus={gpus}", "--object-store-memory=100000000", *arguments,
                        *(["--labels=ray.io/accelerator-type=A10G"] if gpus else []),
                    ],
                    env=dict(environ), stdout=words, stderr=words, stdin=subprocess.DEVNULL, cwd="/",
                    start_new_session=True,
                )  # fmt: skip
            if self._has_started(sent):
                return
            # Ray gives a raylet's processes 15 s for their imports, which a busy machine may exceed once
            self.kill()
            assert left, log.read_text()[-3000:]

    def _has_started(self, sent: int) -> bool:
        def over() -> bool:
            return self.process.poll() is not None or _STARTED in self.log.read_bytes()[sent:]

        eventually(over, _START_S, lambda: self.log.read_text()[-3000:], poll_s=0.2)
        return self.process.poll() is None

    def below(self) -> dict[int, str]:
        """Return the node's processes with their descendants; orphans are found by the node's session."""
        table = process_table()
        found = {pid for pid in table if _session(pid) == self.process.pid}
        found |= below({self.process.pid, *found}, table) | {self.process.pid}
        return {pid: str(table[pid]) for pid in found if pid in table and table[pid].state != "Z"}

    def kill(self) -> None:
        """Kill all processes at once, as when a machine fails."""
        # stop all of them first, so that none sees another one end
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.below():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        self.process.wait()

    def close(self) -> None:
        """Stop the node and wait until all of its processes are gone."""
        left = self.below()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)
        eventually(
            lambda: not any(map(is_alive, left)), 30, lambda: str([name for pid, name in left.items() if is_alive(pid)])
        )


class RayHead:
    """A cluster's head, with two simulated GPUs by default.

    Args:
        ip: Its address.
        token: Whether it requires a token and has a dashboard.
        gpus: Number of simulated GPUs.

    Attributes:
        token: The token for its clients.
        dashboard: `http://127.0.0.1:PORT`.
        variables: Environment variables for its clients.
        home: The home directory of all of its processes.
    """

    def __init__(self, ip: str = "127.0.0.1", *, token: bool = True, gpus: int = 2) -> None:
        # short: a socket's path ends at 108 bytes
        self.home = Path(tempfile.mkdtemp(prefix="srh", dir="/tmp"))
        self.token = secrets.token_hex(32)
        gcs, dashboard, client = free_ports(3)
        self.dashboard = f"http://127.0.0.1:{dashboard}"
        self.address = f"{ip}:{gcs}"
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token} if token else {}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SGPU_", "RAY_"))}
        self.environ = {
            **inherited,
            **self.variables,
            "HOME": str(self.home),
            "RAY_USAGE_STATS_ENABLED": "0",
            # for the dashboard's nine processes, which import Ray at the same time: 30 s are too few on two busy cores
            "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": str(_START_S),
            "RAY_DASHBOARD_STARTUP_TIMEOUT_S": f"{_START_S:.0f}",
            # the entrypoint of a job is looked for there
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        seen = ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"] if token else []
        arguments = [
            "--head", f"--port={gcs}", f"--include-dashboard={str(token).lower()}", *seen,
            f"--ray-client-server-port={client}", f"--temp-dir={self.home / 'ray'}",
        ]  # fmt: skip
        self.node = RayNode(arguments, ip, self.home / "log", self.environ, gpus=gpus)
        if token:
            eventually(self._answers, _START_S, lambda: (self.home / "log").read_text()[-3000:], poll_s=0.5)

    def _answers(self) -> bool:
        assert self.node.process.poll() is None, (self.home / "log").read_text()[-3000:]
        request = urllib.request.Request(
            f"{self.dashboard}/api/jobs/", headers={"Authorization": f"Bearer {self.token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=10):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def below(self) -> dict[int, str]:
        """Return the processes of the cluster."""
        return self.node.below()

    def close(self) -> None:
        """Stop the head and remove its directory."""
        try:
            self.node.close()
        finally:
            shutil.rmtree(self.home, ignore_errors=True)
