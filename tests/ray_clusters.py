"""Ray clusters of this machine for tests: fake nodes of one machine, and raylets with addresses of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from homes import Home
from process_table import is_alive, process_table
from waiting import eventually

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")

_START_S = 60.0


class FakeCluster:
    """A head without GPUs and fake nodes, all raylets of this machine with this machine's address.

    Args:
        gpus: GPUs of each node.
        cpus: CPUs of each node.
        label: Their `ray.io/accelerator-type`; "" declares the resource `accelerator_type:` instead.
        resource: See `label`.
    """

    def __init__(self, gpus: tuple[int, ...] = (2, 2), cpus: int = 4, label: str = "A10G", resource: str = "") -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from ray.cluster_utils import Cluster

            self._cluster: Any = Cluster(
                initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False}
            )
            self.nodes: list[Any] = []
            for count in gpus:
                self.add(count, cpus, label, resource)
        self.address: str = self._cluster.address

    def add(self, gpus: int, cpus: int = 4, label: str = "A10G", resource: str = "") -> Any:
        """Add a node, as an autoscaler would."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            node = self._cluster.add_node(
                num_cpus=cpus,
                num_gpus=gpus,
                labels={"ray.io/accelerator-type": label} if label else None,
                resources={f"accelerator_type:{resource}": 1} if resource else None,
            )
        self.nodes.append(node)
        return node

    def kill(self, node: Any) -> None:
        """The machine is gone from one moment to the next."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._cluster.remove_node(node, allow_graceful=False)
        self.nodes.remove(node)

    def left(self, namespace_prefix: str = "sgpu-") -> dict[str, Any]:
        """What of ours is in the cluster: living actors and placement groups. Asked in a process of its own."""
        code = f"""
import json, ray
ray.init(address={self.address!r}, namespace="looker", log_to_driver=False, logging_level="ERROR")
from ray.util.placement_group import placement_group_table
actors = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"].startswith("sgpu-")]
groups = [g["name"] for g in placement_group_table().values() if g["state"] != "REMOVED"]
print(json.dumps([actors, groups]))
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        actors, groups = json.loads(done.stdout.strip().splitlines()[-1])
        return {kind: names for kind, names in (("actors", actors), ("groups", groups)) if names}

    def close(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._cluster.shutdown()
        eventually(lambda: not _rays(), 20, lambda: f"Ray's processes are left: {_rays()}")


def _rays() -> list[str]:
    """Processes of Ray below this one."""
    mine = os.getpid()
    table = process_table()

    def below(pid: int) -> bool:
        while pid in table and pid != mine:
            pid = table[pid].parent
        return pid == mine

    names = ("raylet", "gcs_server", "ray::", "sgpu_magic.agent")
    return [
        str(process)
        for pid, process in table.items()
        if process.state != "Z" and any(name in process.command for name in names) and below(pid)
    ]


class RayPool:
    """A pool service on a cluster, with directories of its own; clients of this machine reach it by `home`.

    Args:
        address: The cluster's.
        variables: Further settings, `SGPU_...`.
    """

    def __init__(self, address: str, variables: dict[str, str] | None = None) -> None:
        self.home = Home(
            {
                "SGPU_RAY_ADDRESS": address,
                "SGPU_RAY_SAME_FILES": "1",
                "SGPU_RAY_AGENT_IDLE_S": "3",
                "SGPU_ADOPT_TIMEOUT_S": "20",
                "SGPU_RAY_NODE_LISTEN": "tcp://0.0.0.0:0",
                "SGPU_POOL": f"t{os.getpid()}",
                "RAY_USAGE_STATS_ENABLED": "0",
                # a client's process must not be reported as one of this pool's
                **(variables or {}),
            }
        )
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def log(self) -> Path:
        return self.home.state / "pool.log"

    def start(self) -> None:
        """Start the service, and wait until clients find it."""
        program = Path(__file__).parent / "ray_pool.py"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(program)], env=self.home.environ, stdout=log, stderr=log, cwd="/"
            )
        eventually(lambda: self.home.pool_pid() is not None, _START_S, lambda: self.log.read_text())

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and is_alive(self.process.pid):
            self.process.terminate()
            self.process.wait(60)

    def close(self) -> None:
        self.stop()
        self.home.close()


@contextlib.contextmanager
def ray_pool(address: str, **variables: str) -> Iterator[RayPool]:
    pool = RayPool(address, {f"SGPU_{name.upper()}": value for name, value in variables.items()})
    try:
        yield pool
    finally:
        pool.close()
