"""The driver process, which connects to Ray: its messages with the engine over a socketpair, and its restarts.

It is restarted whenever it exits. A cluster that hangs blocks only this process. It starts the agents: one when a run
needs its node; an agent without runs is ended after an idle time.
"""

from __future__ import annotations

import functools
import io
import os
import sys
import time
import zipfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from sgpu_magic.nodes.ray.uplink import AgentOrder
from sgpu_magic.packages.code_files import archive_entry
from sgpu_magic.system import child_process
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.decoding import MsgpackDecoder

_AGAIN_S = (1.0, 2.0, 5.0, 10.0)
END_S = 40.0
"""Seconds to wait for the driver process when the pool ends."""

# longer than the 60 s after which the driver process gives up an actor
_COME_S = 90.0
_NOT_SHIPPED = ("labextension", "__pycache__")


class WatchNodes(Record, frozen=True, tag="watch", kw_only=True):
    """Poll the nodes now, and then at this interval in seconds."""

    every_s: float


class AskLease(Record, frozen=True, tag="ask-lease", kw_only=True):
    """Create a placement group for a run, or find the existing one.

    Args:
        run_id: The run.
        ranks: The number of ranks.
        gpus: Whether each rank has a GPU; otherwise it has one CPU.
        cpus: CPUs of each rank with a GPU.
        labels: The label selector of each bundle.
        resources: Additional resources of each bundle.
        strategy: Ray's strategy: `PACK`, `STRICT_PACK`, `SPREAD` or `STRICT_SPREAD`.
        nodes: Spread the ranks evenly over this many nodes, with one bundle per node; 0 for one bundle per rank.
    """

    run_id: str
    ranks: int
    gpus: bool
    cpus: float = 1.0
    labels: dict[str, str] = {}
    resources: dict[str, float] = {}
    strategy: str = "PACK"
    nodes: int = 0


class DropLease(Record, frozen=True, tag="drop-lease", kw_only=True):
    """Remove the run's placement group, or stop waiting for it."""

    run_id: str


class StartAgent(Record, frozen=True, tag="start-agent", kw_only=True):
    """Start the agent actor of a node, or find the existing one.

    Args:
        order: The actor's configuration.
        ship: Ship this package: the node has none, or another version.
    """

    order: AgentOrder
    ship: bool = False


class EndAgents(Record, frozen=True, tag="end-agents", kw_only=True):
    """End the agent actors of these nodes, with their agents and ranks."""

    nodes: tuple[str, ...]


class EndAll(Record, frozen=True, tag="end-all", kw_only=True):
    """The pool ends: remove all its actors and placement groups, then exit."""


ToCluster = WatchNodes | AskLease | DropLease | StartAgent | EndAgents | EndAll


class ClusterFound(Record, frozen=True, tag="cluster-found", kw_only=True):
    """The process has connected to the cluster.

    Args:
        address: This machine's address as the cluster's nodes reach it.
        types: Ray's names of GPU types.
        agents: Nodes that already have an agent actor of this pool.
        leases: Runs that already have a placement group of this pool.
    """

    address: str
    types: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    leases: tuple[str, ...] = ()


class ClusterLost(Record, frozen=True, tag="cluster-lost", kw_only=True):
    """Ray can't be reached; the process exits after this message.

    Args:
        why: The cause.
        silent: Whether Ray did not answer, as a busy cluster may; otherwise it refused.
    """

    why: str
    silent: bool = False


class NodeDevice(Record, frozen=True, kw_only=True):
    """A GPU as NVML reports it on its node, and the id by which Ray names it there."""

    uuid: str
    name: str
    memory_bytes: int
    ray_id: str = ""


class NodeFacts(Record, frozen=True, kw_only=True):
    """One node, as reported by Ray and by a probe on the node.

    Args:
        node: Ray's node id.
        host: The host name.
        address: The IP address.
        gpus: GPUs that Ray counts there.
        gpus_outside: GPUs used by others than this pool.
        cpus: CPUs that Ray counts there.
        cpus_outside: CPUs used by others than this pool.
        label: The value of Ray's label `ray.io/accelerator-type`, "" if absent.
        resource: X of the resource `accelerator_type:X`, "" if absent.
        probed: The node was probed: the following fields are known.
        devices: The GPUs that Ray counts, in its order; empty if Ray's GPUs are not real ones.
        driver: The NVIDIA driver's version.
        cores: CPU cores.
        version: The version of sgpu-magic there, "" if it is not installed.
        lacks: Packages that the agent needs and the node lacks.
        problem: Why the probe failed.
    """

    node: str
    host: str
    address: str
    gpus: int = 0
    gpus_outside: int = 0
    cpus: int = 0
    cpus_outside: int = 0
    label: str = ""
    resource: str = ""
    probed: bool = False
    devices: tuple[NodeDevice, ...] = ()
    driver: str = ""
    cores: int = 1
    version: str = ""
    lacks: tuple[str, ...] = ()
    problem: str | None = None


class NodesSeen(Record, frozen=True, tag="nodes-seen", kw_only=True):
    """The nodes that are alive, and those that an autoscaler is adding, as a sentence."""

    nodes: tuple[NodeFacts, ...]
    coming: str | None = None


class LeasePart(Record, frozen=True, kw_only=True):
    """The part of a placement group on one node.

    Args:
        node: Ray's node id.
        ranks: The number of ranks.
        gpus: Ray's ids of their GPUs (`NodeDevice.ray_id`).
    """

    node: str
    ranks: int
    gpus: tuple[str, ...] = ()


class LeaseReady(Record, frozen=True, tag="lease-ready", kw_only=True):
    run_id: str
    parts: tuple[LeasePart, ...]


class LeaseWaits(Record, frozen=True, tag="lease-waits", kw_only=True):
    """A placement group is still pending after some seconds. Sent again when Ray reports another state of it."""

    run_id: str


class LeaseFailed(Record, frozen=True, tag="lease-failed", kw_only=True):
    """The placement group can't be created, or was removed."""

    run_id: str
    why: str


class AgentFailed(Record, frozen=True, tag="agent-failed", kw_only=True):
    """The node's agent actor can't be started or ended."""

    node: str
    why: str


FromCluster = ClusterFound | ClusterLost | NodesSeen | LeaseReady | LeaseWaits | LeaseFailed | AgentFailed

to_cluster = MsgpackDecoder[ToCluster](ToCluster)
from_cluster = MsgpackDecoder[FromCluster](FromCluster)


def start_driver(
    arguments: Sequence[str], log: Path, on_message: Callable[[FromCluster], None]
) -> child_process.ChildProcess[FromCluster]:
    """Start the driver process. Messages sent while there is none are dropped: resend requests after `ClusterFound`.

    Args:
        arguments: Arguments of the process: Ray's address, the namespace, the prefix of names.
        log: The file for Ray's output.
        on_message: Called with each message.
    """
    # don't send usage statistics to Ray's authors on behalf of the cluster's users, and don't warn about imports
    environ = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1", **os.environ}
    command = [sys.executable, "-m", "sgpu_magic.nodes.ray"]
    start = functools.partial(child_process.start, command, arguments, environ=environ, log=log)
    driver = child_process.ChildProcess(start, from_cluster, on_message, pauses_s=_AGAIN_S)
    driver.begin()
    return driver


# ---------------------------------------------------------------- agents of the nodes


class NodeAgents:
    """Requests agent actors, and tracks which are starting and which are ending.

    Args:
        order: Creates the agent configuration for a node.
        send: Sends to the driver process.
        idle_s: Seconds without a run after which an agent is ended.

    Attributes:
        leaving: Nodes whose agents were told to end and have not exited yet.
    """

    def __init__(self, order: Callable[[str], AgentOrder], send: Callable[[ToCluster], None], idle_s: float) -> None:
        self._order = order
        self._send = send
        self._idle_s = idle_s
        # seconds of a monotonic clock
        self._starting: dict[str, float] = {}
        self.leaving: set[str] = set()
        # seconds of the caller's clock
        self._idle_since: dict[str, float] = {}

    def need(self, node: NodeFacts, package: str) -> None:
        """Start the agent of a node for a run, unless it is starting already.

        Args:
            node: The node.
            package: The version of this package.
        """
        self._idle_since.pop(node.node, None)
        if node.node not in self._starting:
            self._starting[node.node] = time.monotonic()
            self._send(StartAgent(order=self._order(node.node), ship=node.version != package))

    def agent_connected(self, node: str) -> None:
        """Record that the node's agent has connected."""
        self._starting.pop(node, None)

    def exited(self, node: str) -> None:
        """Record that the node's agent has exited, or could not be started."""
        self._starting.pop(node, None)
        self.leaving.discard(node)
        self._idle_since.pop(node, None)

    def retire(self, there: Collection[str], busy: Collection[str], now: float) -> None:
        """End the agents of nodes that have been idle for `idle_s`.

        Args:
            there: Nodes that have an agent.
            busy: Nodes that have, or will have, a run.
            now: Seconds of a monotonic clock.
        """
        for node in busy:
            self._idle_since.pop(node, None)
        idle = [node for node in there if node not in busy and node not in self.leaving]
        unused = [node for node in idle if now - self._idle_since.setdefault(node, now) >= self._idle_s]
        if unused:
            self.leaving.update(unused)
            self._send(EndAgents(nodes=tuple(unused)))

    def late(self, now: float) -> list[str]:
        """Return nodes whose agents did not connect in time; they count as gone from now on."""
        late = [node for node, since in self._starting.items() if now - since > _COME_S]
        for node in late:
            self.exited(node)
        return late

    def connected(self) -> None:
        """The driver process is a new one: earlier requests may be lost, so forget or repeat them."""
        self._starting.clear()
        if self.leaving:
            self._send(EndAgents(nodes=tuple(self.leaving)))


def package_archive() -> bytes:
    """Return this package as a zip archive with `sgpu_magic/` at its top: the same bytes for the same package."""
    here = Path(__file__).parents[2]
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(here.rglob("*")):
            if path.is_file() and not any(part in _NOT_SHIPPED for part in path.relative_to(here).parts):
                archive.writestr(archive_entry(str(path.relative_to(here.parent))), path.read_bytes())
    return data.getvalue()
