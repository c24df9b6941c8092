"""What a Ray cluster's nodes are to the scheduler. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import msgspec

from sgpu_magic.errors import UsageError
from sgpu_magic.nodes.ray.driver_messages import LeasePart, NodeFacts
from sgpu_magic.wire.devices import ANY, Device, Inventory, Lease, Node, NodeShare, canonical_type, memory_of

OTHERS = "in use by others on the Ray cluster"
AWAY = "on a node that does not answer"
_COUNT = re.compile(r"(?P<type>[^:]+):\s*(?P<count>[0-9]{1,6})\s*")


def read_elastic(text: str) -> tuple[tuple[str, int], ...]:
    """Return what the setting `ray_elastic` says: (type, devices).

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
                f"the setting ray_elastic has {part!r}, which is no type with a count. Set it (or SGPU_RAY_ELASTIC) to "
                "what the autoscaler can bring at most, such as a10:16,h100:64."
            )
        found.append((kind, int(match["count"])))
    return tuple(found)


def type_of(facts: NodeFacts) -> str:
    """The type of a node's GPUs: by Ray's label, its resource, or NVML's name, in this order."""
    for name in (facts.label, facts.resource, *(device.name for device in facts.devices[:1])):
        if name:
            try:
                return canonical_type(name)
            except ValueError:
                return canonical_type(f"nvidia gpu {name}")
    return canonical_type("nvidia gpu")


def is_known(facts: NodeFacts) -> bool:
    """Whether somebody has looked at the node, or could not."""
    return facts.probed or bool(facts.problem)


def is_usable(facts: NodeFacts) -> bool:
    """Whether an agent can run there."""
    return facts.probed and not facts.lacks


def devices_of(facts: NodeFacts) -> tuple[Device, ...]:
    """A node's GPUs in Ray's order: real ones by NVML's UUIDs, others as what they are, simulated."""
    kind = type_of(facts) if facts.gpus else ""
    devices: list[Device] = []
    for number in range(facts.gpus):
        if number < len(facts.devices):
            real = facts.devices[number]
            device = Device(
                uuid=real.uuid,
                type=kind,
                name=real.name,
                index=number,
                memory_bytes=real.memory_bytes,
                node=facts.node,
            )
        else:
            device = Device(
                uuid=f"SIM-{kind}-{facts.node[:10]}-{number}",
                type=kind,
                name=f"simulated {kind}",
                index=number,
                memory_bytes=memory_of(kind),
                simulated=True,
                node=facts.node,
            )
        devices.append(device)
    return tuple(devices)


def inventory_of(
    name: str,
    nodes: Iterable[NodeFacts],
    leases: Iterable[Lease],
    elastic: tuple[tuple[str, int], ...] = (),
    *,
    coming: str = "",
    away: Collection[str] = (),
) -> Inventory:
    """Return the whole cluster as the scheduler sees it.

    Args:
        name: What it is called.
        nodes: Those that are alive.
        leases: The pool's own.
        elastic: What an autoscaler may bring.
        coming: What it is bringing.
        away: Nodes that do not answer.
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
    return Inventory(
        host=name,
        devices=tuple(devices),
        cpu_slots=sum(node.cpu_slots for node in there),
        cores=sum(node.cores for node in there),
        problem=" ".join(problems),
        driver=next((node.driver for node in there if node.driver), ""),
        nodes=tuple(there),
        elastic=elastic,
        coming=coming,
    )


def _problem(facts: NodeFacts) -> str:
    if facts.lacks:
        return (
            f"The node {facts.host} ({facts.address}) is not used: its Python lacks {', '.join(facts.lacks)}. Install "
            'what sgpu-magic needs there: pip install "sgpu-magic[ray]".'
        )
    return f"The node {facts.host} ({facts.address}) is not used: {facts.problem}"


def _marked(devices: tuple[Device, ...], outside: int, ours: Collection[str]) -> list[Device]:
    """Ray tells how many of a node's GPUs others use, not which: they are the last ones that are not ours."""
    marked = list(devices)
    for number in range(len(marked) - 1, -1, -1):
        if outside <= 0:
            break
        if marked[number].uuid not in ours:
            marked[number] = msgspec.structs.replace(marked[number], outside_use=OTHERS)
            outside -= 1
    return marked


def shares_of(parts: Iterable[LeasePart], nodes: Mapping[str, NodeFacts]) -> tuple[NodeShare, ...]:
    """Return a lease's shares as Ray has granted them.

    Raises:
        KeyError: A node is not known any more.
    """
    shares: list[NodeShare] = []
    for part in parts:
        facts = nodes[part.node]
        known = devices_of(facts)
        uuids = tuple(known[int(gpu)].uuid if gpu.isdigit() and int(gpu) < len(known) else gpu for gpu in part.gpus)
        shares.append(NodeShare(node=part.node, host=facts.host, address=facts.address, ranks=part.ranks, uuids=uuids))
    return tuple(shares)
