"""What a run's placement group asks of Ray, and why one that was asked for is not there. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set

import msgspec

from sgpu_magic.nodes.ray.driver_messages import AskLease, NodeFacts
from sgpu_magic.nodes.ray.inventory import is_usable, type_of
from sgpu_magic.wire.devices import CPU, Lease, Placement, canonical_type

_LABEL = "ray.io/accelerator-type"
_NODE_LABEL = "ray.io/node-id"
_RESOURCE = "accelerator_type:"
# enough to be counted by the autoscaler, and never used up
_A_LITTLE = 0.001
_STRATEGIES = {"pack": "PACK", "strict_pack": "STRICT_PACK", "spread": "SPREAD"}


def request_of(
    run_id: str,
    lease: Lease,
    placement: Placement,
    nodes: Mapping[str, NodeFacts],
    *,
    cpus: float,
    select: str,
    names: Iterable[str],
    avoid: Set[str] = frozenset(),
) -> AskLease:
    """Return the request for a run's placement group.

    Args:
        run_id: The run.
        lease: What the scheduler proposes.
        placement: What the run asks for.
        nodes: The cluster's.
        cpus: CPUs with each GPU.
        select: The setting `ray_select`.
        names: Ray's own names of GPUs, for types that no node has yet.
        avoid: Nodes that do not answer, whatever Ray thinks of them.
    """
    gpus = not lease.cpu_slots
    order = AskLease(
        run_id=run_id,
        ranks=lease.ranks,
        gpus=gpus,
        cpus=_cpus_that_fit(lease.device_type, nodes.values(), cpus) if gpus else 1.0,
        strategy=_STRATEGIES[placement.strategy],
        nodes=placement.nodes if placement.nodes > 1 and lease.ranks % placement.nodes == 0 else 0,
    )
    if placement.nodes == 1:
        order = _with(order, strategy="STRICT_PACK")
    here = sorted(avoid & nodes.keys())
    there = [facts for node, facts in nodes.items() if node not in avoid]
    labels, resources = _selectors(lease.device_type, there, select, names) if gpus else ({}, {})
    if here:
        labels = {_NODE_LABEL: _none_of(here)} | labels
    return _with(order, labels=labels, resources=resources)


def _with(order: AskLease, **changes: object) -> AskLease:
    return msgspec.structs.replace(order, **changes)


def _cpus_that_fit(kind: str, nodes: Iterable[NodeFacts], cpus: float) -> float:
    """No more CPUs with each GPU than such a node has for each."""
    has = [facts.cpus / facts.gpus for facts in nodes if facts.gpus and type_of(facts) == kind]
    return min([cpus, *(float(int(each)) for each in has)])


def _selectors(
    kind: str, nodes: Iterable[NodeFacts], select: str, names: Iterable[str]
) -> tuple[dict[str, str], dict[str, float]]:
    """Label selector and further resources of each bundle."""
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
    # neither label nor resource tells these nodes from others: they are named
    return ({_NODE_LABEL: _any_of(sorted(facts.node for facts in have))} if have else {}), {}


def _is(name: str, kind: str) -> bool:
    try:
        return canonical_type(name) == kind
    except ValueError:
        return False


def _any_of(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"in({','.join(values)})"


def _none_of(values: list[str]) -> str:
    return f"!{values[0]}" if len(values) == 1 else f"!in({','.join(values)})"


def why_not(order: AskLease, lease: Lease, nodes: Iterable[NodeFacts], leases: Iterable[Lease], coming: str) -> str:
    """Why Ray does not grant what was asked for, as a sentence without a full stop.

    Args:
        order: What was asked.
        lease: What the scheduler proposed.
        nodes: The cluster's, a moment ago.
        leases: The pool's own.
        coming: What an autoscaler is bringing.
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
    where = {"STRICT_PACK": " on one node", "STRICT_SPREAD": ""}.get(order.strategy, "")
    if order.nodes > 1:
        where = f" on {order.nodes} nodes"
    name = "CPU slots" if kind == CPU else kind.upper()
    text = f"Ray has not granted {order.ranks} {name}{where}: {sum(free.values())} of {sum(total.values())} are free"
    if total:
        largest = max(total, key=lambda node: (free[node], total[node]))
        text += f", the largest node ({hosts[largest]}) has {free[largest]} free of {total[largest]}"
    if order.gpus and order.cpus:
        text += f"; each needs {order.cpus:g} CPU beside it"
    return f"{text}; {coming}" if coming else text
