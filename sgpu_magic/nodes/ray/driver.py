"""The process that speaks to Ray: what the engine and it say to each other over a socketpair, and how it is kept alive.

It is started, listened to, and started again when it ends; a cluster that hangs hangs nothing else. Agents are ordered
of it: one is started when a run needs it, and ended some time after the last one.
"""

from __future__ import annotations

import io
import os
import sys
import time
import zipfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.nodes.ray.uplink import AgentOrder
from sgpu_magic.system import child_process
from sgpu_magic.wire.record import Record


class Watch(Record, frozen=True, tag="watch", kw_only=True):
    """Look at the nodes so often, in seconds, and now."""

    every_s: float


class AskLease(Record, frozen=True, tag="ask-lease", kw_only=True):
    """Make a placement group for a run, or find the one that it has.

    Args:
        run_id: The run.
        ranks: How many bundles.
        gpus: Whether each has a GPU; else one CPU.
        cpus: CPUs of each bundle with a GPU.
        labels: Label selector of each bundle.
        resources: Further resources of each bundle.
        strategy: Ray's: `PACK`, `STRICT_PACK`, `SPREAD`, `STRICT_SPREAD`.
        nodes: The ranks are spread over so many nodes evenly: the group has one bundle for each; 0 for one per rank.
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
    """Start the actor of a node, or find the one that it has.

    Args:
        order: For the actor.
        ship: Bring our package along: the node has none, or another one.
    """

    order: AgentOrder
    ship: bool = False


class EndAgents(Record, frozen=True, tag="end-agents", kw_only=True):
    """End these nodes' actors with all that they have."""

    nodes: tuple[str, ...]


class EndAll(Record, frozen=True, tag="end-all", kw_only=True):
    """The pool ends: no actor and no placement group of it stays. The process ends after it."""


ToCluster = Watch | AskLease | DropLease | StartAgent | EndAgents | EndAll


class ClusterFound(Record, frozen=True, tag="cluster-found", kw_only=True):
    """Connected.

    Args:
        address: This machine's, as the cluster's nodes reach it.
        types: Ray's own names of GPU types.
        agents: Nodes that have an actor of this pool from before.
        leases: Runs that have a placement group of this pool from before.
    """

    address: str
    types: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    leases: tuple[str, ...] = ()


class ClusterLost(Record, frozen=True, tag="cluster-lost", kw_only=True):
    """Ray can't be reached; the process ends after it."""

    why: str


class NodeDevice(Record, frozen=True, kw_only=True):
    """A GPU as NVML tells it on its node."""

    uuid: str
    name: str
    memory_bytes: int


class NodeFacts(Record, frozen=True, kw_only=True):
    """What Ray and a look on the node tell of one node.

    Args:
        node: Ray's id.
        host: Its name.
        address: Its IP address.
        gpus: GPUs that Ray has there.
        gpus_outside: Those in use, and not by this pool.
        cpus: CPUs that Ray has there.
        cpus_outside: Those in use, and not by this pool.
        label: Ray's `ray.io/accelerator-type`, "" without.
        resource: Its resource `accelerator_type:X`, without that beginning; "" without.
        probed: Somebody has looked on the node: what follows is known.
        devices: By NVML, in its order; empty when Ray's GPUs are none that exist.
        driver: The NVIDIA driver's version.
        cores: CPU cores.
        version: Of sgpu-magic there, "" when it is not installed.
        lacks: Packages that are missing for the agent.
        problem: Why nobody could look.
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
    problem: str = ""


class NodesSeen(Record, frozen=True, tag="nodes-seen", kw_only=True):
    """The nodes that are alive, and what an autoscaler is bringing, as a sentence."""

    nodes: tuple[NodeFacts, ...]
    coming: str = ""


class LeasePart(Record, frozen=True, kw_only=True):
    """What a placement group has on one node.

    Args:
        node: Ray's id.
        ranks: How many.
        gpus: Ray's ids of their GPUs: NVML's numbers, or UUIDs.
    """

    node: str
    ranks: int
    gpus: tuple[str, ...] = ()


class LeaseReady(Record, frozen=True, tag="lease-ready", kw_only=True):
    run_id: str
    parts: tuple[LeasePart, ...]


class LeaseWaits(Record, frozen=True, tag="lease-waits", kw_only=True):
    """It is asked for, and not there after some seconds; Ray goes on. Said again when Ray has another word for it."""

    run_id: str


class LeaseFailed(Record, frozen=True, tag="lease-failed", kw_only=True):
    """It can't be made, or is gone."""

    run_id: str
    why: str


class AgentFailed(Record, frozen=True, tag="agent-failed", kw_only=True):
    """The node's actor can't be started, or has died."""

    node: str
    why: str


FromCluster = ClusterFound | ClusterLost | NodesSeen | LeaseReady | LeaseWaits | LeaseFailed | AgentFailed

to_cluster = msgspec.msgpack.Decoder[ToCluster](ToCluster)
from_cluster = msgspec.msgpack.Decoder[FromCluster](FromCluster)


_AGAIN_S = (1.0, 2.0, 5.0, 10.0)
END_S = 40.0
"""Seconds for which the process is awaited when the pool ends."""


def start_driver(
    arguments: Sequence[str], log: Path, on_message: Callable[[FromCluster], None]
) -> child_process.ChildProcess[FromCluster]:
    """Start it. While there is no process nothing is sent: what is wanted is said again when it has connected.

    Args:
        arguments: Of the process: Ray's address, the namespace, the prefix of names.
        log: Where Ray's words go.
        on_message: Called with what it says.
    """
    # neither telling the makers of Ray about the cluster's users nor advice about imports is our affair
    environ = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1", **os.environ}
    command = [sys.executable, "-m", "sgpu_magic.nodes.ray"]
    driver = child_process.ChildProcess(
        lambda: child_process.start(command, arguments, environ=environ, log=log),
        from_cluster,
        on_message,
        pauses_s=_AGAIN_S,
    )
    driver.begin()
    return driver


# ---------------------------------------------------------------- the agents that are ordered of it

# an actor is given up after a minute
_COME_S = 90.0


class NodeAgents:
    """Orders actors, and knows which are on their way.

    Args:
        order: Makes the order for a node.
        send: To the process that speaks to Ray.
        idle_s: Seconds without a run after which an agent is to leave.

    Attributes:
        leaving: Nodes whose agents were told to end and have not yet.
    """

    def __init__(
        self,
        order: Callable[[str], AgentOrder],
        send: Callable[[ToCluster], None],
        idle_s: float,
    ) -> None:
        self._order = order
        self._send = send
        self._idle_s = idle_s
        # seconds of a monotonic clock
        self._starting: dict[str, float] = {}
        self.leaving: set[str] = set()
        # seconds of the caller's clock
        self._idle_since: dict[str, float] = {}

    def need(self, node: NodeFacts, package: str) -> None:
        """A run will be there.

        Args:
            node: Where.
            package: The version of our own package.
        """
        self._idle_since.pop(node.node, None)
        if node.node not in self._starting:
            self._starting[node.node] = time.monotonic()
            self._send(StartAgent(order=self._order(node.node), ship=node.version != package))

    def came(self, node: str) -> None:
        """Its agent has said its first word."""
        self._starting.pop(node, None)

    def gone(self, node: str) -> None:
        """Its agent is over, or could not be started."""
        self._starting.pop(node, None)
        self.leaving.discard(node)
        self._idle_since.pop(node, None)

    def retire(self, there: Collection[str], busy: Collection[str], now: float) -> None:
        """Let go of nodes that had no run for long.

        Args:
            there: Nodes that have an agent.
            busy: Those that have a run, or will have one.
            now: Seconds of a monotonic clock.
        """
        for node in busy:
            self._idle_since.pop(node, None)
        idle = [node for node in there if node not in busy and node not in self.leaving]
        over = [node for node in idle if now - self._idle_since.setdefault(node, now) >= self._idle_s]
        if over:
            self.leaving.update(over)
            self._send(EndAgents(nodes=tuple(over)))

    def late(self, now: float) -> list[str]:
        """Nodes whose agents were ordered long ago and have not come; they count as gone."""
        late = [node for node, since in self._starting.items() if now - since > _COME_S]
        for node in late:
            self.gone(node)
        return late

    def connected(self) -> None:
        """The process that speaks to Ray is a new one: what was ordered may not have arrived."""
        self._starting.clear()
        if self.leaving:
            self._send(EndAgents(nodes=tuple(self.leaving)))


_NOT_SHIPPED = ("labextension", "__pycache__")
# of every file: the same package is the same archive, byte for byte
_THEN = (1980, 1, 1, 0, 0, 0)


def package_archive() -> bytes:
    """Return the archive; it has `sgpu_magic/` at its top."""
    here = Path(__file__).parents[2]
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(here.rglob("*")):
            if path.is_file() and not any(part in _NOT_SHIPPED for part in path.relative_to(here).parts):
                info = zipfile.ZipInfo(str(path.relative_to(here.parent)), _THEN)
                info.compress_type = zipfile.ZIP_DEFLATED
                info.external_attr = 0o644 << 16
                archive.writestr(info, path.read_bytes())
    return data.getvalue()
