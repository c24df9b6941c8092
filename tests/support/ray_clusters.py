"""Ray clusters on this machine: fake nodes of one machine, and raylets with their own addresses."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from homes import Home
from pool_client import PoolClient, set_environ
from process_table import Process, below, is_alive, process_table
from waiting import eventually

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")

_START_S = 90.0
_ANSWER = "answer: "
_STARTS = 4


class FakeCluster:
    """A head and fake nodes, all raylets on this machine with this machine's address.

    Args:
        gpus: GPUs of each node.
        head_gpus: GPUs of the head. If it has some, it serves as a node too, which saves a raylet: 4 s of CPU time.
        cpus: CPUs of each node.
        label: Label `ray.io/accelerator-type` of the nodes; "" declares the resource `accelerator_type:` instead.
        resource: See `label`.
    """

    def __init__(
        self,
        gpus: tuple[int, ...] = (2, 2),
        cpus: int = 4,
        label: str = "A10G",
        resource: str = "",
        *,
        head_gpus: int = 0,
    ) -> None:
        self.nodes: list[Any] = []
        self._environ = dict(os.environ)
        # short: a socket's path ends at 108 bytes
        self._directory = Path(tempfile.mkdtemp(prefix="src", dir="/tmp"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from ray._common.utils import get_ray_address_file
            from ray.cluster_utils import Cluster

            # Ray notes the newest cluster's address there, but makes the folder only for clusters that lie in it
            Path(get_ray_address_file(None)).parent.mkdir(exist_ok=True)
            self._cluster: Any = Cluster()
        labels = {"ray.io/accelerator-type": label} if head_gpus else None
        self._add(
            num_cpus=cpus if head_gpus else 1, num_gpus=head_gpus, labels=labels, include_dashboard=False,
            include_log_monitor=False, temp_dir=str(self._directory),
        )  # fmt: skip
        for count in gpus:
            self.add(count, cpus, label, resource)
        self.address: str = self._cluster.address
        self._looker: subprocess.Popen[str] | None = None

    def add(self, gpus: int, cpus: int = 4, label: str = "A10G", resource: str = "") -> Any:
        """Add a node, as an autoscaler does."""
        node = self._add(
            num_cpus=cpus,
            num_gpus=gpus,
            labels={"ray.io/accelerator-type": label} if label else None,
            resources={f"accelerator_type:{resource}": 1} if resource else None,
        )
        self.nodes.append(node)
        return node

    def _add(self, **arguments: Any) -> Any:
        """Add a node, with retries: Ray gives a raylet's processes 15 s for imports, then raises a plain exception."""
        for left in reversed(range(_STARTS)):
            before, here = set(_ray_pids()), dict(os.environ)
            on_term = signal.getsignal(signal.SIGTERM)
            # otherwise the node would be counted as part of the current test's home
            set_environ(self._environ)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return self._cluster.add_node(**arguments)
            except Exception as error:
                if not left or not any(word in str(error) for word in ("timed out", "Deadline", "cannot find")):
                    raise
                for pid in set(_ray_pids()) - before:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            finally:
                # otherwise Ray's handler would get a SIGTERM that a later test sends
                signal.signal(signal.SIGTERM, on_term)
                set_environ(here)
        raise AssertionError("not reached")

    def left_nothing(self, pool: str) -> None:
        """Wait until the cluster has no actor and no placement group of a pool."""
        eventually(lambda: self.left(pool) == {}, 30, lambda: f"left in the cluster: {self.left(pool)}", poll_s=1.0)

    def kill(self, node: Any) -> None:
        """Kill all processes at once, as when a machine fails."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._cluster.remove_node(node, allow_graceful=False)
        self.nodes.remove(node)

    def left(self, pool: str) -> dict[str, list[str]]:
        """Return the living actors and placement groups of a pool."""
        actors, groups = self._ask({"left": pool})
        return {kind: names for kind, names in (("actors", actors), ("groups", groups)) if names}

    def free_gpus(self) -> float:
        """Return the free GPUs as Ray's scheduler sees them, a little later than a placement group's end."""
        return self._ask({"free": True})

    def hold(self, bundles: list[dict[str, float]]) -> None:
        """Occupy devices, as another user of the cluster does."""
        self._ask({"hold": bundles})

    def release(self) -> None:
        """Release the devices that `hold` occupied."""
        self._ask({"release": True})

    def _ask(self, question: dict[str, Any]) -> Any:
        looker = self._looker or self._look()
        assert looker.stdin is not None
        assert looker.stdout is not None
        looker.stdin.write(f"{json.dumps(question)}\n")
        looker.stdin.flush()
        for line in looker.stdout:
            # skip the autoscaler's messages, which Ray prints too
            if line.startswith(_ANSWER):
                return json.loads(line.removeprefix(_ANSWER))
        raise AssertionError("the driver that looks has ended")

    def _look(self) -> subprocess.Popen[str]:
        """Query Ray in a separate driver, whose fork handlers and threads would otherwise be in every test."""
        code = f"""
import json, sys, ray
ray.init(address={self.address!r}, namespace="looker", log_to_driver=False, logging_level="ERROR")
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
held = []
for line in sys.stdin:
    question, answer = json.loads(line), None
    if "hold" in question:
        held.append(placement_group(question["hold"], strategy="PACK"))
        answer = held[-1].wait(60)
    elif "release" in question:
        while held:
            remove_placement_group(held.pop())
    elif "free" in question:
        answer = ray.available_resources().get("GPU", 0)
    else:
        pool = question["left"]
        named = ray.util.list_named_actors(all_namespaces=True)
        actors = [a["name"] for a in named if a["namespace"] == "sgpu-" + pool]
        rows = placement_group_table().values()
        groups = [g["name"] for g in rows if g["state"] != "REMOVED"]
        answer = actors, [name for name in groups if name.startswith("sgpu:" + pool + ":")]
    print({_ANSWER!r} + json.dumps(answer), flush=True)
"""
        self._looker = subprocess.Popen(
            [sys.executable, "-c", code],
            env=self._environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return self._looker

    def close(self) -> None:
        if self._looker is not None:
            with self._looker as looker:
                looker.kill()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._cluster.shutdown()
        eventually(lambda: not _rays(), 20, lambda: f"Ray's processes are left: {_rays()}")
        shutil.rmtree(self._directory, ignore_errors=True)


def _rays() -> list[str]:
    """Return descendants of this process that must not outlive a cluster, such as raylets."""
    table = process_table()
    names = ("raylet", "gcs_server", "ray::", "sgpu_magic.agent", "agent_main.py")
    return [str(table[pid]) for pid in _ray_pids() if pid in table and any(name in str(table[pid]) for name in names)]


def _ray_pids() -> list[int]:
    """Return the pids of all of Ray's processes among this process's descendants."""
    table = process_table()
    found = below([os.getpid()], table)
    return [pid for pid in found if table[pid].state != "Z" and "ray" in table[pid].command]


_AGENT = "-m sgpu_magic.agent "
_ZYGOTE = "-m sgpu_magic.worker.process.zygote "


def _is_agent_of(pool: str, process: Process) -> bool:
    if _AGENT not in process.command:
        return False
    try:
        return f"sgpu-{os.getuid()}-{pool}-" in os.readlink(f"/proc/{process.pid}/fd/2")
    except OSError:
        return False


class RayPool:
    """A pool service on a cluster, with its own directories; clients on this machine reach it through `home`.

    Args:
        address: The cluster's address.
        variables: Further settings, `SGPU_...`.
        home: Its home; None makes one.
    """

    def __init__(self, address: str, variables: dict[str, str] | None = None, home: Home | None = None) -> None:
        self.name = f"t{os.getpid()}{secrets.token_hex(2)}"
        self.home = home or Home()
        # its port for nodes is open to other machines
        self.home.pool_listens = True
        self.home.environ |= {
            "SGPU_RAY_ADDRESS": address,
            "SGPU_RAY_SAME_FILES": "1",
            "SGPU_RAY_AGENT_IDLE_S": "3",
            "SGPU_ADOPT_TIMEOUT_S": "90",
            "SGPU_RAY_NODE_LISTEN": "tcp://0.0.0.0:0",
            "SGPU_POOL": self.name,
            "RAY_USAGE_STATS_ENABLED": "0",
            **(variables or {}),
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def log(self) -> Path:
        return self.home.state / "pool.log"

    def node_processes(self) -> dict[int, Process]:
        """Return this pool's agents and their descendants on this machine's nodes; Ray starts them, not the home."""
        table = process_table()
        agents = {pid for pid, process in table.items() if _is_agent_of(self.name, process)}
        return {pid: table[pid] for pid in agents | below(agents, table) if table[pid].state != "Z"}

    def agent_pids(self) -> list[int]:
        return [pid for pid, process in self.node_processes().items() if _is_agent_of(self.name, process)]

    def rank_pids(self) -> list[int]:
        """Return the pids of runs' ranks; standby ranks have no working directory yet."""
        found, agents = self.node_processes(), self.agent_pids()
        zygotes = {pid for pid, process in found.items() if _ZYGOTE in process.command and process.parent in agents}
        return [pid for pid, process in found.items() if process.parent in zygotes and process.cwd != "/"]

    def node_files(self) -> list[str]:
        """Return the directories of this pool on this machine's nodes."""
        return [str(path) for path in Path("/tmp").glob(f"sgpu-{os.getuid()}-{self.name}-*")]

    def start(self) -> None:
        """Start the service, and wait until clients find it."""
        program = Path(__file__).parent / "ray_pool.py"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(program)], env=self.home.environ, stdout=log, stderr=log, cwd="/"
            )
        eventually(lambda: self.home.pool_pid() is not None, _START_S, lambda: self.log.read_text())

    def client(self) -> PoolClient:
        """Return a client once the nodes have answered.

        On a busy machine Ray starts its workers for longer than the pool lets a run wait for its nodes.
        """
        client = PoolClient(self.home)
        eventually(lambda: client.pool.status().problem is None, 60, lambda: f"{client.pool.status().problem}")
        return client

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and is_alive(self.process.pid):
            self.process.terminate()
            self.process.wait(60)

    def close(self) -> None:
        """Stop the service and check that nothing of it is left on the nodes."""
        try:
            self.stop()
            eventually(lambda: not self.node_processes(), 20, lambda: f"left on nodes: {self.node_processes()}")
            eventually(lambda: not self.node_files(), 20, lambda: f"left on nodes: {self.node_files()}")
        finally:
            self.home.close()


@contextlib.contextmanager
def ray_pool(address: str, **variables: str) -> Iterator[RayPool]:
    pool = RayPool(address, {f"SGPU_{name.upper()}": value for name, value in variables.items()})
    try:
        yield pool
    finally:
        pool.close()
