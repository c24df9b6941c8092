"""The cluster as Ray tells it: nodes, the actors on them, what placement groups have there. All calls may block."""

from __future__ import annotations

import re
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from sgpu_magic.nodes.ray import on_node
from sgpu_magic.nodes.ray.driver import AskLease, LeasePart, NodeFacts, StartAgent, package_archive
from sgpu_magic.nodes.ray.groups import (
    RayError,
    accelerators,
    autoscaler_status,
    groups_named,
    placement_groups,
    ray,
    state,
    strategies,
)

_TYPE_LABEL = "ray.io/accelerator-type"
_TYPE_RESOURCE = "accelerator_type:"
_TYPE_NAME = re.compile(r"[A-Z][A-Z0-9-]{1,15}")
_AGENT = "agent:"
_START_S = 60.0
_END_S = 25.0
_AGAIN_S = 0.2
_GPU_IDS_S = 60.0


def connect(address: str, namespace: str) -> str:
    """Become a driver of the cluster.

    Args:
        address: Ray's, `auto` for the one of this machine.
        namespace: Where the pool's actors and groups have their names.

    Returns:
        This machine's address as the nodes reach it.

    Raises:
        ConnectionError: No cluster is there.
        RuntimeError: It does not let us in, or has another version of Ray or Python.
    """
    ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    # its functions and its class go to nodes that may not have our package
    ray.cloudpickle.register_pickle_by_value(on_node)
    return _own_address(str(ray.get_runtime_context().gcs_address))


def _own_address(gcs: str) -> str:
    """This machine's address on the cluster's network: Ray's own guess is that of the way to the internet."""
    host, _, port = gcs.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as way:
            # nothing is sent
            way.connect((host, int(port)))
            return str(way.getsockname()[0])
    except (OSError, ValueError):
        return str(ray.util.get_node_ip_address())


def nodes(prefix: str, known: Mapping[str, NodeFacts]) -> tuple[NodeFacts, ...]:
    """Return the nodes that are alive.

    Args:
        prefix: Of the names of the pool's placement groups, whose devices are not in others' use.
        known: What was told of them before, by id.
    """
    free = state.available_resources_per_node()
    ours = _held(prefix)
    found: list[NodeFacts] = []
    for row in cast("list[dict[str, Any]]", ray.nodes()):
        if not row["Alive"]:
            continue
        node, total = str(row["NodeID"]), cast("Mapping[str, float]", row["Resources"])
        left = free.get(node, {})
        base = known.get(node) or NodeFacts(node=node, host="", address="")
        labels = cast("Mapping[str, str]", row.get("Labels") or {})
        resource = next((name for name in total if name.startswith(_TYPE_RESOURCE)), "")
        found.append(
            msgspec.structs.replace(
                base,
                host=str(row["NodeManagerHostname"]),
                address=str(row["NodeManagerAddress"]),
                gpus=int(total.get("GPU", 0)),
                gpus_outside=_outside(total, left, ours[node, "GPU"], "GPU"),
                cpus=int(total.get("CPU", 0)),
                cpus_outside=_outside(total, left, ours[node, "CPU"], "CPU"),
                label=labels.get(_TYPE_LABEL, ""),
                resource=resource.removeprefix(_TYPE_RESOURCE),
            )
        )
    return tuple(found)


def _held(prefix: str) -> Counter[tuple[str, str]]:
    """What the pool's own groups hold, by node and resource."""
    held: Counter[tuple[str, str]] = Counter()
    for row in groups_named(prefix).values():
        for bundle, node in row["bundles_to_node_id"].items():
            for name, amount in row["bundles"][bundle].items():
                held[node, name] += amount
    return held


def _outside(total: Mapping[str, float], left: Mapping[str, float], ours: float, name: str) -> int:
    used = total.get(name, 0.0) - left.get(name, 0.0) - ours
    # a part of a GPU is in use as well
    return max(0, int(used) + (used > int(used) + 1e-6))


def look_at(node: NodeFacts) -> NodeFacts:
    """Have a task tell what Ray does not: the GPUs' UUIDs, the packages."""
    task = ray.remote(on_node.look).options(
        num_cpus=0, max_retries=0, scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node.node, soft=False)
    )
    try:
        told: Mapping[str, Any] = ray.get(task.remote(), timeout=_START_S)
    except RayError as error:
        return msgspec.structs.replace(node, problem=_first_line(error))
    return msgspec.convert({**msgspec.structs.asdict(node), **told, "probed": True, "problem": ""}, NodeFacts)


def coming() -> str:
    """What an autoscaler is bringing, as a sentence without a full stop; "" when nothing, or there is none."""
    try:
        status = autoscaler_status()
    except (RayError, RuntimeError, ValueError, OSError):
        return ""
    failed: Sequence[Any] = status.failed_launches
    launches: Counter[str] = Counter()
    for launch in status.pending_launches:
        launches[launch.ray_node_type_name] += launch.count
    for node in status.pending_nodes:
        launches[node.ray_node_type_name] += 1
    words = [f"{count} of {kind}" for kind, count in sorted(launches.items())]
    sentences = [f"the autoscaler is bringing {', '.join(words)}"] if words else []
    sentences += [f"the autoscaler could not bring {one.ray_node_type_name}: {one.details}" for one in failed[-1:]]
    return "; ".join(sentences)


def type_names() -> tuple[str, ...]:
    """Ray's own names of GPU types, as its labels have them."""
    names = cast("dict[str, object]", vars(accelerators)).values()
    return tuple(sorted({name for name in names if isinstance(name, str) and _TYPE_NAME.fullmatch(name)}))


# ---------------------------------------------------------------- agents


def agent_nodes(namespace: str) -> tuple[str, ...]:
    """Nodes that have an actor of this pool."""
    named = cast("list[dict[str, str]]", ray.util.list_named_actors(all_namespaces=True))
    return tuple(
        one["name"].removeprefix(_AGENT)
        for one in named
        if one["namespace"] == namespace and one["name"].startswith(_AGENT)
    )


def start_agent(order: StartAgent) -> None:
    """Start the actor of a node and wait for it; one that is there stays as it is, one that is leaving is awaited.

    Raises:
        RayError: It does not come.
    """
    deadline = time.monotonic() + _START_S
    while True:
        was_there = _agent(order.order.node) is not None
        try:
            if _start(order):
                return
        except RayError:
            # it was just leaving
            if not was_there or time.monotonic() > deadline:
                raise
        if time.monotonic() > deadline:
            ray.kill(ray.get_actor(f"{_AGENT}{order.order.node}"))
        time.sleep(_AGAIN_S)


def _agent(node: str) -> Any:
    try:
        return ray.get_actor(f"{_AGENT}{node}")
    except ValueError:
        return None


def _start(order: StartAgent) -> bool:
    node = order.order.node
    actor = ray.remote(on_node.NodeAgent).options(
        name=f"{_AGENT}{node}",
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=0,
        max_concurrency=4,
        scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node, soft=False),
    )
    package = ray.put(package_archive()) if order.ship else None
    handle = actor.remote(msgspec.msgpack.encode(order.order), package)
    return bool(ray.get(handle.ready.remote(), timeout=_START_S))


def end_agents(nodes: Iterable[str]) -> None:
    """End actors with all that they have, all at once; killed when they do not end in order."""
    found = [agent for node in nodes if (agent := _agent(node)) is not None]
    waiting = [agent.end.remote() for agent in found]
    if waiting:
        # the actor leaves by itself when its agent is over; one that can't is killed
        ray.wait(waiting, num_returns=len(waiting), timeout=_END_S)
    for agent in found:
        ray.kill(agent)


def _first_line(error: RayError) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# ---------------------------------------------------------------- leases


def parts_of(group: Any, order: AskLease) -> tuple[LeasePart, ...]:
    """Return what a group that is there has on which nodes, the node with the most ranks first.

    Raises:
        ray.exceptions.RayError: A node that has a part of it does not answer.
    """
    row: Mapping[str, Any] = placement_groups.placement_group_table(group)
    where: dict[int, str] = row["bundles_to_node_id"]
    size = order.ranks // order.nodes if order.nodes else 1
    by_node: dict[str, list[int]] = {}
    for bundle, node in sorted(where.items()):
        by_node.setdefault(node, []).append(bundle)
    gpus = _gpus_of(group, by_node, size) if order.gpus else {}
    parts = [
        LeasePart(node=node, ranks=len(bundles) * size, gpus=gpus.get(node, ())) for node, bundles in by_node.items()
    ]
    # stable: nodes with as many keep the order of their bundles
    return tuple(sorted(parts, key=lambda part: -part.ranks))


def _gpus_of(group: Any, by_node: Mapping[str, Sequence[int]], size: int) -> dict[str, tuple[str, ...]]:
    """Ask a tiny task in each bundle which GPUs it has.

    The bundles of a node one after the other: they share one worker process then, 3 ms each, and none starts another.
    """
    task = ray.remote(on_node.own_gpus)
    asked: dict[str, list[str]] = {node: [] for node in by_node}
    for turn in range(max(map(len, by_node.values()))):
        now = {node: bundles[turn] for node, bundles in by_node.items() if turn < len(bundles)}
        refs = [
            task.options(
                num_cpus=0,
                num_gpus=size,
                max_retries=0,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle
                ),
            ).remote()
            for bundle in now.values()
        ]
        answers: list[list[str]] = ray.get(refs, timeout=_GPU_IDS_S)
        for node, answer in zip(now, answers, strict=True):
            asked[node] += answer
    return {node: tuple(sorted(ids, key=_by_number)) for node, ids in asked.items()}


def _by_number(gpu: str) -> tuple[int, str]:
    return (int(gpu), "") if gpu.isdigit() else (1 << 30, gpu)
