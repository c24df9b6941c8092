"""The Ray engine: leases are placement groups, agents are detached actors, ranks are children of the agents."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec

import msgspec

from sgpu_magic import __version__
from sgpu_magic.config import Settings, private_dir
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.nodes.engine_reports import EngineListener
from sgpu_magic.nodes.ray import leases
from sgpu_magic.nodes.ray.agent_listener import AgentListener, NodeKeys, NodeLink, keep_port, listen_address
from sgpu_magic.nodes.ray.driver import (
    END_S,
    AgentFailed,
    AskLease,
    ClusterFound,
    ClusterLost,
    DropLease,
    EndAll,
    FromCluster,
    LeaseFailed,
    LeaseReady,
    LeaseWaits,
    NodeAgents,
    NodeFacts,
    NodesSeen,
    ToCluster,
    WatchNodes,
    start_driver,
)
from sgpu_magic.nodes.ray.uplink import AgentOrder
from sgpu_magic.system.child_process import ChildProcess
from sgpu_magic.system.secure_sockets import kept_key_pair, reached_at
from sgpu_magic.wire.devices import Inventory, Lease
from sgpu_magic.wire.node import AgentReady, FromAgent, Launch
from sgpu_magic.wire.pool_status import PROTOCOL_VERSION

# intervals at which Ray's nodes are polled: while runs are active or queued, and otherwise
_BUSY_S, _IDLE_S = 1.0, 5.0
P = ParamSpec("P")
_TEND_S = 1.0
# a granted lease waits at most this long for the probe of a node that has just joined
_PROBE_PATIENCE_S = 15.0
# number of retries for a cluster that does not answer, before the pool gives up
_SILENT_TRIES = 2
# an inventory request is answered with the last known one if Ray does not answer within this time
_ANSWER_TIMEOUT_S = 2.0


class RayEngine(Engine):
    """An engine on an existing Ray cluster. Create and use it in the loop's thread only.

    Args:
        settings: The pool's settings, as `engine_settings` returns them.

    Raises:
        UsageError: A setting can't be parsed.
    """

    # set by `start`
    _agent_listener: AgentListener
    _driver: ChildProcess[FromCluster]
    _tending: asyncio.TimerHandle

    def __init__(self, settings: Settings) -> None:
        self._elastic = leases.read_elastic(settings.ray_elastic)
        name = settings.pool or "local"
        super().__init__(settings, name)
        self._prefix, self._namespace = f"sgpu:{name}:", f"sgpu-{name}"
        self._directory = private_dir(settings.state_path / "ray")
        self._pair = kept_key_pair(self._directory / "door.key")
        self._keys = NodeKeys(self._directory / "nodes.json")
        self._agents = NodeAgents(self._agent_order, self._send_to_cluster, settings.ray_agent_idle_s)
        self._host = ""
        self._types: tuple[str, ...] = ()
        self._facts: dict[str, NodeFacts] = {}
        self._coming = ""
        self._known: Inventory | None = None
        self._asked_for_inventory = self._found = False
        # seconds of the loop's clock when the cluster was first seen
        self._seen_at = 0.0
        # pending lease requests with their launches; granted ones that wait for a node's old agent to exit
        self._asked: dict[str, tuple[AskLease, Launch, Sequence[bytes]]] = {}
        self._granted: dict[str, tuple[Launch, Sequence[bytes]]] = {}
        # granted on nodes that are not probed yet: when, in seconds of the loop's clock, and Ray's answer
        self._early: dict[str, tuple[float, LeaseReady]] = {}
        # unreachable nodes that Ray still lists: disconnected, or dead and Ray has not noticed yet
        self._away: set[str] = set()

    # ------------------------------------------------------------ for the pool service (Engine)

    def start(self, listener: EngineListener) -> None:
        settings = self._settings
        address = listen_address(settings.ray_node_listen, self._directory)
        self._agent_listener = AgentListener(
            address, self._pair, functools.partial(self._guarded, self._on_node_message), self._link_lost
        )
        keep_port(self._agent_listener.address, self._directory)
        self._agent_listener.admit(self._keys.nodes)
        arguments = (settings.ray_address or "auto", self._namespace, self._prefix)
        self._driver = start_driver(
            arguments, settings.state_path / "ray.log", functools.partial(self._guarded, self._on_cluster_message)
        )
        self._tending = self._loop.call_later(_TEND_S, self._tend)
        super().start(listener)

    def take_inventory(self) -> None:
        if not self._asked_for_inventory:
            self._asked_for_inventory = True
            # if Ray hangs, the last known inventory is sent
            self._loop.call_later(_ANSWER_TIMEOUT_S, self._publish_inventory)
        self._watch()

    def _publish_inventory(self) -> None:
        if self._asked_for_inventory and self._found:
            self._asked_for_inventory = False
            self.inventory_changed()

    def inventory(self) -> Inventory | None:
        if not self._found:
            return None
        # a node on which a given-up run is being ended becomes usable again: runs that need it wait
        away = {node for node in self._facts if node in self._away or node in self._stale.nodes}
        ours, facts = self._leases.values(), self._facts.values()
        return leases.inventory_of(self._name, facts, ours, self._elastic, self._coming, away)

    def close(self) -> None:
        if self._begun:
            self._tending.cancel()
            # end the agents through their actors, which know when the agents have exited
            self._driver.end(EndAll(), END_S)
        super().close()
        if self._begun:
            self._agent_listener.close()

    # ------------------------------------------------------------ leases

    def start_run(self, launch: Launch, frames: Sequence[bytes]) -> None:
        order = leases.request_of(launch, self._facts, self._settings, self._types, self._away)
        self._asked[order.run_id] = (order, launch, frames)
        self._send_to_cluster(order)
        self._watch()

    def withdraw(self, run_id: str) -> None:
        self._asked.pop(run_id, None)
        self._granted.pop(run_id, None)
        self._send_to_cluster(DropLease(run_id=run_id))

    def lease_free(self, run_id: str, lease: Lease) -> None:
        self._send_to_cluster(DropLease(run_id=run_id))
        self._watch()

    def _ready(self, ready: LeaseReady) -> None:
        since, _ = self._early.pop(ready.run_id, (self._loop.time(), ready))
        known = all(part.node in self._facts and leases.is_known(self._facts[part.node]) for part in ready.parts)
        if ready.run_id in self._asked and not known and self._loop.time() - since < _PROBE_PATIENCE_S:
            # a node has just joined: wait for the probe of its GPUs
            self._early[ready.run_id] = since, ready
            self._watch()
            return
        asked = self._asked.pop(ready.run_id, None)
        if asked is None:
            self._send_to_cluster(DropLease(run_id=ready.run_id))
            return
        _, launch, frames = asked
        try:
            shares = leases.shares_of([part for part in ready.parts if part.node not in self._away], self._facts)
            if len(shares) < len(ready.parts):
                raise KeyError("it is out of reach")
        except KeyError:
            self._send_to_cluster(DropLease(run_id=ready.run_id))
            self._refuse_asked(launch, "a node that Ray granted is already gone")
            return
        uuids = tuple(uuid for share in shares for uuid in share.uuids)
        # a node that an autoscaler has added may have simulated GPUs only
        simulated = leases.simulated_in(self._facts[share.node] for share in shares)
        is_simulated = launch.lease.simulated or (bool(uuids) and simulated.issuperset(uuids))
        lease = msgspec.structs.replace(launch.lease, shares=shares, uuids=uuids, simulated=is_simulated)
        for share in shares:
            if share.node not in self._channels and share.node not in self._agents.leaving:
                self._need(share.node)
        self._granted[ready.run_id] = (msgspec.structs.replace(launch, lease=lease), frames)
        self._start_granted()

    def _start_granted(self) -> None:
        """Start granted runs, except those on a node whose old agent is still exiting."""
        for run_id, (launch, frames) in list(self._granted.items()):
            if not any(share.node in self._agents.leaving for share in launch.lease.shares):
                del self._granted[run_id]
                self.start_parts(launch, frames)

    def _waits(self, waits: LeaseWaits) -> None:
        order, launch, _ = self._asked.get(waits.run_id, (None, None, ()))
        if order is None or launch is None:
            return
        kind = "cpu" if launch.lease.cpu_slots else launch.lease.device_type
        if any(kind == elastic for elastic, _ in self._elastic):
            # the pending group is the request to the autoscaler: keep it until the run is placed or withdrawn
            return
        why = leases.why_not(order, launch.lease, self._facts.values(), self._leases.values(), self._coming)
        self._send_to_cluster(DropLease(run_id=waits.run_id))
        self._refuse_asked(launch, why)

    def _refuse_asked(self, launch: Launch, why: str) -> None:
        self._asked.pop(launch.spec.run_id, None)
        self.refuse_lease(launch.spec.run_id, launch.lease.uuids, why)

    def _guarded(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Handle a message of an agent or of the driver process. A fault costs that message only."""
        try:
            call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001
            self._listener.failed("", error)

    # ------------------------------------------------------------ the cluster

    def _on_cluster_message(self, message: FromCluster) -> None:
        match message:
            case ClusterFound():
                self._connected(message)
            case ClusterLost():
                self._cluster_lost(message)
            case NodesSeen():
                self._on_nodes_seen(message)
            case LeaseReady():
                self._ready(message)
            case LeaseWaits():
                self._waits(message)
            case LeaseFailed(run_id=run_id, why=why):
                if run_id in self._asked:
                    self._refuse_asked(self._asked[run_id][1], f"Ray could not create its placement group: {why}")
            case AgentFailed(node=node, why=why):
                self._agents.exited(node)
                self.node_lost(node, f"its agent could not be started: {why}")

    def _connected(self, found: ClusterFound) -> None:
        self._host, self._types, self._coming = found.address, found.types, ""
        self._agents.connected()
        for order, _, _ in self._asked.values():
            self._send_to_cluster(order)
        for node in {share.node for lease in self._leases.values() for share in lease.shares}:
            if node not in self._channels and node in self._facts:
                self._need(node)
        if not self._found:
            # agents that outlived the last service reconnect by themselves, with the runs that they hold
            self.await_nodes(found.agents)
            self._loop.call_later(self.come_back_s + _TEND_S, self._drop_others, found.leases)
        self._watch()

    def _drop_others(self, runs: Sequence[str]) -> None:
        """Remove placement groups of an earlier service whose runs were not adopted."""
        for run_id in runs:
            if run_id not in self._leases and run_id not in self._placing:
                self._send_to_cluster(DropLease(run_id=run_id))

    def _cluster_lost(self, lost: ClusterLost) -> None:
        if not self._found and not (lost.silent and self._driver.ends < _SILENT_TRIES):
            address = self._settings.ray_address or "RAY_ADDRESS, or the cluster of this machine"
            self._listener.broken(
                f"the pool can't join the Ray cluster ({address}): {lost.why}. Is it running, and does it have this "
                f"Python's version of Ray? Ray's messages are in {self._settings.state_path / 'ray.log'}."
            )

    def _on_nodes_seen(self, seen: NodesSeen) -> None:
        self._driver.well()
        alive = {facts.node: facts for facts in seen.nodes}
        dead = [node for node in self._facts if node not in alive]
        self._facts, self._coming = alive, seen.coming
        for node in dead:
            self._away.discard(node)
            self._agents.exited(node)
            self.node_lost(node, "Ray reports that it is dead")
        if dead:
            self._keys.forget_others(alive)
        # the pool reports no inventory until its nodes are probed; a slow node does not delay it forever
        self._seen_at = self._seen_at or self._loop.time()
        self._found = self._found or leases.is_worth_a_note(seen.nodes, self._loop.time() - self._seen_at)
        for _, ready in list(self._early.values()):
            self._ready(ready)
        inventory = self.inventory()
        if inventory is not None and (inventory != self._known or self._asked_for_inventory):
            self._known, self._asked_for_inventory = inventory, False
            self.inventory_changed()

    def _send_to_cluster(self, message: ToCluster) -> None:
        self._driver.send(message)

    # ------------------------------------------------------------ nodes

    def _need(self, node: str) -> None:
        self._agents.need(self._facts[node], __version__)
        self._agent_listener.admit(self._keys.nodes)

    def _agent_order(self, node: str) -> AgentOrder:
        pair = self._keys.pair_of(node)
        return AgentOrder(
            node=node,
            prefix=self._prefix,
            namespace=self._namespace,
            address=reached_at(self._agent_listener.address, self._host),
            server_key=self._pair.public,
            public=pair.public,
            secret=pair.secret,
            settings=msgspec.json.encode(self._settings),
        )

    def _on_node_message(self, link: NodeLink, message: FromAgent, frames: Sequence[bytes]) -> None:
        node = link.node
        match message:
            case AgentReady(protocol_version=version) if version != PROTOCOL_VERSION:
                # the agent was left by a service of another version of sgpu-magic: its runs can't be adopted
                self._agents.exited(node)
                self.node_lost(node, "its agent had another version of sgpu-magic")
            case AgentReady():
                self._away.discard(node)
                self._agents.agent_connected(node)
                facts = self._facts.get(node)
                self.on_node_connected(link, message, facts.address if facts is not None else "")
            case _:
                self.on_node_message(node, message, frames)

    def _link_lost(self, node: str, why: str, silent: bool) -> None:
        self._agents.exited(node)
        if silent and node in self._facts:
            # nothing is placed there until an agent connects: the old one or, if only that died, a new one
            self._away.add(node)
        self.node_lost(node, why)
        needed = {share.node for lease in self._leases.values() for share in lease.shares}
        if node in self._facts and (node in self._away or node in needed):
            self._need(node)
        self._start_granted()

    def _watch(self) -> None:
        going = any(not run.has_ended for run in self._runs.values())
        self._send_to_cluster(WatchNodes(every_s=_BUSY_S if going or self._asked else _IDLE_S))

    def _tend(self) -> None:
        self._tending = self._loop.call_later(_TEND_S, self._tend)
        busy = {node for run in self._runs.values() if not run.has_ended for node in run.nodes}
        busy |= {share.node for launch, _ in self._granted.values() for share in launch.lease.shares}
        if self._settled:
            # before that it is unknown which runs the agents of the last service hold
            self._agents.retire(self._channels.keys(), busy, time.monotonic())
        address = reached_at(self._agent_listener.address, self._host)
        for node in self._agents.late(time.monotonic()):
            self.node_lost(node, f"its agent can't reach the pool at {address}")
