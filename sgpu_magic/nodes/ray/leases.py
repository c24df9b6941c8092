"""Translates between the scheduler and Ray: inventory, lease requests, reasons for refusals. No I/O."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.errors import UsageError
from sgpu_magic.nodes.engine_reports import inventory_with
from sgpu_magic.nodes.ray.driver import AskLease, LeasePart, NodeFacts
from sgpu_magic.wire.devices import (
    ANY,
    CPU,
    Device,
    Inventory,
    Lease,
    Node,
    NodeShare,
    canonical_type,
    memory_of,
    type_label,
    type_named,
)
from sgpu_magic.wire.node import Launch

OTHERS = "in use by others on the Ray cluster"
AWAY = "on a node that does not answer"
# time that a starting pool waits for unprobed nodes: if other nodes are already probed, and if none is
_SOME_S, _NONE_S = 15.0, 45.0
# device types and how many of each an autoscaler may add
Elastic = tuple[tuple[str, int], ...]
_COUNT = re.compile(r"(?P<type>[^:]+):\s*(?P<count>[0-9]{1,6})\s*")
_LABEL = "ray.io/accelerator-type"
_NODE_LABEL = "ray.io/node-id"
_RESOURCE = "accelerator_type:"
# enough for the autoscaler to count it, and too little to exhaust the resource
_A_LITTLE = 0.001
_STRATEGIES = {"pack": "PACK", "strict_pack": "STRICT_PACK", "spread": "SPREAD"}


def read_elastic(text: str) -> Elastic:
    """Parse the setting `ray_elastic` into pairs of device type and number of devices.

    Raises:
        UsageError: A part is not `type:count`.
    """
    found: list[tuple[str, int]] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _COUNT.fullmatch(part)
        try:
            kind = canonical_type(match["type"]) if match else ANY
        except ValueError:
            kind = ANY
        if match is None or kind == ANY:
            raise UsageError(
                f"the setting ray_elastic has {part!r}, which is not a type with a count. Set it (or SGPU_RAY_ELASTIC) "
                "to the most that the autoscaler can add, such as a10:16,h100:64."
            )
        found.append((kind, int(match["count"])))
    return tuple(found)


def type_of(facts: NodeFacts) -> str:
    """The type of a node's GPUs, from Ray's label, its resource, or NVML's name, in this order."""
    names = (facts.label, facts.resource, *(device.name for device in facts.devices[:1]))
    return type_named(next(filter(None, names), ""))


def is_known(facts: NodeFacts) -> bool:
    """Whether the node was probed, or its probe failed."""
    return facts.probed or bool(facts.problem)


def is_worth_a_note(nodes: Collection[NodeFacts], waited_s: float) -> bool:
    """Whether the pool may report its inventory.

    It waits 15 s for nodes that are slow to answer; 45 s if no node has answered yet, since the machines are busy then.

    Args:
        nodes: The cluster's nodes.
        waited_s: Seconds since the cluster was first seen.
    """
    known = [is_known(facts) for facts in nodes]
    return all(known) or waited_s >= (_SOME_S if any(known) else _NONE_S)


def is_usable(facts: NodeFacts) -> bool:
    """Whether an agent can run there."""
    return facts.probed and not facts.lacks


def devices_of(facts: NodeFacts) -> tuple[Device, ...]:
    """A node's GPUs in Ray's order: real ones with NVML's UUIDs, others marked as simulated."""
    kind = type_of(facts) if facts.gpus else ""
    real = [*facts.devices[: facts.gpus], *[None] * (facts.gpus - len(facts.devices))]
    return tuple(
        Device(
            uuid=one.uuid if one else f"SIM-{kind}-{facts.node[:10]}-{number}",
            type=kind,
            name=one.name if one else f"simulated {kind}",
            index=number,
            memory_bytes=one.memory_bytes if one else memory_of(kind),
            simulated=one is None,
            node=facts.node,
        )
        for number, one in enumerate(real)
    )


def inventory_of(
    name: str,
    nodes: Iterable[NodeFacts],
    leases: Iterable[Lease],
    elastic: Elastic,
    coming: str | None,
    away: Collection[str],
) -> Inventory:
    """Return the inventory of the whole cluster for the scheduler.

    Args:
        name: The cluster's display name.
        nodes: The nodes that are alive.
        leases: The pool's own leases.
        elastic: Device types and numbers that an autoscaler may add.
        coming: The nodes that the autoscaler is adding now, a sentence; None for none.
        away: Ids of nodes that do not answer.
    """
    ours = frozenset(uuid for lease in leases for uuid in lease.uuids)
    there: list[Node] = []
    devices: list[Device] = []
    problems: list[str] = []
    for facts in nodes:
        if facts.problem or facts.lacks:
            problems.append(_problem(facts))
        if not is_usable(facts):
            continue
        there.append(
            Node(
                node=facts.node,
                host=facts.host,
                address=facts.address,
                cores=facts.cores,
                cpu_slots=facts.cpus,
                cpu_slots_free=0 if facts.node in away else max(0, facts.cpus - facts.cpus_outside),
                driver=facts.driver,
            )
        )
        own = devices_of(facts)
        if facts.node in away:
            devices += [msgspec.structs.replace(device, outside_use=AWAY) for device in own]
        else:
            devices += _marked(own, facts.gpus_outside, ours)
    whole = inventory_with(name, there, devices, " ".join(problems) or None)
    return msgspec.structs.replace(whole, elastic=elastic, coming=coming)


def simulated_in(nodes: Iterable[NodeFacts]) -> frozenset[str]:
    """Return the UUIDs of the nodes' simulated GPUs."""
    return frozenset(device.uuid for facts in nodes for device in devices_of(facts) if device.simulated)


def _problem(facts: NodeFacts) -> str:
    if facts.lacks:
        return (
            f"The node {facts.host} ({facts.address}) is not used: its Python lacks {', '.join(facts.lacks)}. Install "
            'what sgpu-magic needs there: pip install "sgpu-magic[ray]".'
        )
    return f"The node {facts.host} ({facts.address}) is not used: {facts.problem}"


def _marked(devices: tuple[Device, ...], outside: int, ours: Collection[str]) -> list[Device]:
    """Mark GPUs as used by others. Ray reports only their number: mark the last ones not leased by this pool."""
    last = [device for device in reversed(devices) if device.uuid not in ours][: max(0, outside)]
    return [msgspec.structs.replace(one, outside_use=OTHERS) if one in last else one for one in devices]


def shares_of(parts: Iterable[LeasePart], nodes: Mapping[str, NodeFacts]) -> tuple[NodeShare, ...]:
    """Return the shares of a lease as granted by Ray.

    Raises:
        KeyError: A node is no longer known.
    """
    shares: list[NodeShare] = []
    for part in parts:
        facts = nodes[part.node]
        uuids = tuple(_uuid_of(gpu, facts) for gpu in part.gpus)
        shares.append(NodeShare(node=part.node, host=facts.host, address=facts.address, ranks=part.ranks, uuids=uuids))
    return tuple(shares)


def _uuid_of(gpu: str, facts: NodeFacts) -> str:
    """The UUID of a GPU by Ray's id. Ids of GPUs that are not real are their places among all."""
    by_id = {device.ray_id: device.uuid for device in facts.devices if device.ray_id}
    if gpu in by_id:
        return by_id[gpu]
    known = devices_of(facts)
    return known[int(gpu)].uuid if gpu.isdigit() and int(gpu) < len(known) else gpu


def request_of(
    launch: Launch, nodes: Mapping[str, NodeFacts], settings: Settings, names: Iterable[str], avoid: Set[str]
) -> AskLease:
    """Return the request for a run's placement group.

    Args:
        launch: The launch, with the lease that the scheduler proposes.
        nodes: The cluster's nodes, by id.
        settings: The pool's settings.
        names: Ray's names of GPU types, for types that no node has yet.
        avoid: Ids of nodes that do not answer, even if Ray considers them alive.
    """
    lease, placement = launch.lease, launch.spec.placement
    gpus = not lease.cpu_slots
    away = sorted(avoid & nodes.keys())
    there = [facts for node, facts in nodes.items() if node not in avoid]
    labels, resources = _selectors(lease.device_type, there, settings.ray_select, names) if gpus else ({}, {})
    if away:
        labels = {_NODE_LABEL: f"!{_any_of(away)}"} | labels
    return AskLease(
        run_id=launch.spec.run_id,
        ranks=lease.ranks,
        gpus=gpus,
        cpus=_cpus_that_fit(lease.device_type, nodes.values(), settings.ray_cpus_per_gpu) if gpus else 1.0,
        labels=labels,
        resources=resources,
        strategy="STRICT_PACK" if placement.nodes == 1 else _STRATEGIES[placement.strategy],
        nodes=placement.nodes if placement.nodes > 1 and lease.ranks % placement.nodes == 0 else 0,
    )


def _cpus_that_fit(kind: str, nodes: Iterable[NodeFacts], cpus: float) -> float:
    """CPUs per GPU, limited to what every node of this type has per GPU."""
    has = [facts.cpus / facts.gpus for facts in nodes if facts.gpus and type_of(facts) == kind]
    return min([cpus, *(float(int(each)) for each in has)])


def _selectors(
    kind: str, nodes: Iterable[NodeFacts], select: str, names: Iterable[str]
) -> tuple[dict[str, str], dict[str, float]]:
    """The label selector and additional resources of each bundle."""
    have = [facts for facts in nodes if facts.gpus and is_usable(facts) and type_of(facts) == kind]
    known = [name for name in names if _is(name, kind)]
    labels = sorted({facts.label for facts in have if facts.label} or set(known))
    resources = sorted({facts.resource for facts in have if facts.resource} or set(known))
    by_label = all(facts.label for facts in have)
    if select == "resource" or (select == "auto" and not by_label and all(facts.resource for facts in have)):
        if resources:
            return {}, {f"{_RESOURCE}{resources[0]}": _A_LITTLE}
    elif labels and (select == "label" or by_label):
        return {_LABEL: _any_of(labels)}, {}
    # neither label nor resource distinguishes these nodes: select them by id
    return ({_NODE_LABEL: _any_of(sorted(facts.node for facts in have))} if have else {}), {}


def _is(name: str, kind: str) -> bool:
    try:
        return canonical_type(name) == kind
    except ValueError:
        return False


def _any_of(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"in({','.join(values)})"


def why_not(
    order: AskLease, lease: Lease, nodes: Iterable[NodeFacts], leases: Iterable[Lease], coming: str | None
) -> str:
    """Why Ray has not granted a request, as a sentence without a full stop.

    Args:
        order: The request.
        lease: The lease that the scheduler proposed.
        nodes: The cluster's nodes as last seen.
        leases: The pool's own leases.
        coming: The nodes that an autoscaler is adding, a sentence; None for none.
    """
    kind = CPU if lease.cpu_slots else lease.device_type
    ours: Counter[str] = Counter()
    for held in leases:
        ours.update({share.node: share.ranks for share in held.shares if bool(share.uuids) == order.gpus})
    total: Counter[str] = Counter()
    free: Counter[str] = Counter()
    hosts: dict[str, str] = {}
    for facts in nodes:
        if not is_usable(facts) or (kind != CPU and type_of(facts) != kind):
            continue
        has, outside = (facts.cpus, facts.cpus_outside) if kind == CPU else (facts.gpus, facts.gpus_outside)
        if has:
            total[facts.node], hosts[facts.node] = has, facts.host
            free[facts.node] = max(0, has - outside - ours.get(facts.node, 0))
    on_one = " on one node" if order.strategy == "STRICT_PACK" else ""
    where = f" on {order.nodes} nodes" if order.nodes > 1 else on_one
    name = "CPU ranks" if kind == CPU else type_label(kind)
    text = f"Ray has not granted {order.ranks} {name}{where}: {sum(free.values())} of {sum(total.values())} are free"
    if total:
        largest = max(total, key=lambda node: (free[node], total[node]))
        text += f", the largest node ({hosts[largest]}) has {free[largest]} free of {total[largest]}"
    if order.gpus and order.cpus:
        text += f"; each also needs {order.cpus:g} CPU"
    return f"{text}; {coming}" if coming else text
