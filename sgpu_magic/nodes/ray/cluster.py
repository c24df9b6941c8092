"""The cluster through Ray's API: nodes, agent actors, and placement groups, which hold the devices of runs.

Ray's modules are untyped here, as their own type hints are incomplete: tests check their uses. All calls may block;
make none in an event loop's thread.
"""

from __future__ import annotations

import importlib
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec
from ray.exceptions import RayError as RayError

from sgpu_magic.nodes.ray import agent_main
from sgpu_magic.nodes.ray.driver import AskLease, LeasePart, NodeFacts, StartAgent, package_archive
from sgpu_magic.wire.decoding import convert

ray: Any = importlib.import_module("ray")
placement_groups: Any = importlib.import_module("ray.util.placement_group")
strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
accelerators: Any = importlib.import_module("ray.util.accelerators")
# the only source of each node's free resources that does not need the dashboard
state: Any = importlib.import_module("ray._private.state")

# a `PlacementGroup`
Group = Any

THERE = "CREATED"
GONE = "REMOVED"
_TYPE_LABEL = "ray.io/accelerator-type"
_TYPE_RESOURCE = "accelerator_type:"
_TYPE_NAME = re.compile(r"[A-Z][A-Z0-9-]{1,15}")
_AGENT = "agent:"
_START_S = 60.0
_END_S = 25.0
_AGAIN_S = 0.2
_GPU_IDS_S = 60.0


def connect(address: str, namespace: str) -> str:
    """Connect to the cluster as a driver.

    Args:
        address: Ray's address; `auto` for the cluster of this machine.
        namespace: The Ray namespace of the pool's actors and groups.

    Returns:
        This machine's address as the nodes reach it.

    Raises:
        ConnectionError: There is no cluster.
        RuntimeError: The cluster refuses the connection, or has another version of Ray or Python.
    """
    ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    # its functions and class run on nodes that may not have this package
    ray.cloudpickle.register_pickle_by_value(agent_main)
    return _own_address(str(ray.get_runtime_context().gcs_address))


def _own_address(gcs: str) -> str:
    """This machine's address on the cluster's network; Ray itself guesses the one used to reach the internet."""
    host, _, port = gcs.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as way:
            # connecting a UDP socket sends nothing
            way.connect((host, int(port)))
            return str(way.getsockname()[0])
    except (OSError, ValueError):
        return str(ray.util.get_node_ip_address())


def nodes(prefix: str, known: Mapping[str, NodeFacts]) -> tuple[NodeFacts, ...]:
    """Return the nodes that are alive.

    Args:
        prefix: The prefix of the pool's placement groups; their devices don't count as used by others.
        known: The facts known before, by node id.
    """
    free = state.available_resources_per_node()
    ours = _held_devices(prefix)
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


def _held_devices(prefix: str) -> Counter[tuple[str, str]]:
    """The resources that the pool's own groups hold, by node and resource name."""
    held: Counter[tuple[str, str]] = Counter()
    for row in groups_named(prefix).values():
        for bundle, node in row["bundles_to_node_id"].items():
            for name, amount in row["bundles"][bundle].items():
                held[node, name] += amount
    return held


def _outside(total: Mapping[str, float], left: Mapping[str, float], ours: float, name: str) -> int:
    used = total.get(name, 0.0) - left.get(name, 0.0) - ours
    # a GPU that is used in part counts as used
    return max(0, int(used) + (used > int(used) + 1e-6))


def inspect_node(node: NodeFacts) -> NodeFacts:
    """Probe a node with a Ray task for what Ray does not report: the GPUs' UUIDs, installed packages."""
    task = ray.remote(agent_main.inspect_node).options(
        num_cpus=0, max_retries=0, scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node.node, soft=False)
    )
    try:
        facts: Mapping[str, Any] = ray.get(task.remote(), timeout=_START_S)
    except RayError as error:
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        return msgspec.structs.replace(node, problem=first[:300])
    return convert({**msgspec.structs.asdict(node), **facts, "probed": True, "problem": None}, NodeFacts)


def coming() -> str | None:
    """The nodes that an autoscaler is adding, as a sentence without a full stop; None if there are none."""
    try:
        sdk: Any = importlib.import_module("ray.autoscaler.v2.sdk")
        status = sdk.get_cluster_status(str(ray.get_runtime_context().gcs_address), timeout=2)
    except (RayError, RuntimeError, ValueError, OSError):
        return None
    failed: Sequence[Any] = status.failed_launches
    launches: Counter[str] = Counter(node.ray_node_type_name for node in status.pending_nodes)
    for launch in status.pending_launches:
        launches[launch.ray_node_type_name] += launch.count
    words = [f"{count} of {kind}" for kind, count in sorted(launches.items())]
    sentences = [f"the autoscaler is adding {', '.join(words)}"] if words else []
    sentences += [f"the autoscaler could not add {one.ray_node_type_name}: {one.details}" for one in failed[-1:]]
    return "; ".join(sentences) or None


def type_names() -> tuple[str, ...]:
    """Ray's names of GPU types, as used in its labels."""
    names = cast("dict[str, object]", vars(accelerators)).values()
    return tuple(sorted({name for name in names if isinstance(name, str) and _TYPE_NAME.fullmatch(name)}))


# ---------------------------------------------------------------- agents


def agent_nodes(namespace: str) -> tuple[str, ...]:
    """The ids of nodes that have an agent actor of this pool."""
    named = cast("list[dict[str, str]]", ray.util.list_named_actors(all_namespaces=True))
    return tuple(
        one["name"].removeprefix(_AGENT)
        for one in named
        if one["namespace"] == namespace and one["name"].startswith(_AGENT)
    )


def start_agent(order: StartAgent) -> None:
    """Start the agent actor of a node and wait until it is ready.

    A running actor is kept. If it is just exiting, wait for that and start a new one.

    Raises:
        RayError: The actor does not start.
    """
    deadline = time.monotonic() + _START_S
    while True:
        was_there = _get_named(ray.get_actor, f"{_AGENT}{order.order.node}") is not None
        try:
            if _start(order):
                return
        except RayError:
            # the old actor was just exiting
            if not was_there or time.monotonic() > deadline:
                raise
        if time.monotonic() > deadline:
            ray.kill(ray.get_actor(f"{_AGENT}{order.order.node}"))
        time.sleep(_AGAIN_S)


def _start(order: StartAgent) -> bool:
    node = order.order.node
    actor = ray.remote(agent_main.NodeAgent).options(
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
    """End the agent actors of these nodes in parallel, with their agents; kill those that do not end in time."""
    found = [agent for node in nodes if (agent := _get_named(ray.get_actor, f"{_AGENT}{node}")) is not None]
    waiting = [agent.end.remote() for agent in found]
    if waiting:
        # an actor exits by itself when its agent has exited; otherwise it is killed below
        ray.wait(waiting, num_returns=len(waiting), timeout=_END_S)
    for agent in found:
        ray.kill(agent)


# ---------------------------------------------------------------- placement groups


def find_or_make(order: AskLease, name: str) -> Group:
    """Return the run's group: the one of this name, or a new one. It is detached: it stays until it is removed.

    Raises:
        ValueError: Ray refuses the request.
    """
    found = _get_named(ray.util.get_placement_group, name)
    if found is not None and state_of(found) != GONE:
        return found
    # one bundle per rank, or one per node if a number of nodes was requested
    count, size = (order.nodes, order.ranks // order.nodes) if order.nodes else (order.ranks, 1)
    one: dict[str, float] = {"CPU": float(size)}
    if order.gpus:
        one = {"GPU": float(size)} | ({"CPU": order.cpus * size} if order.cpus else {})
    return placement_groups.placement_group(
        [{**one, **order.resources} for _ in range(count)],
        strategy="STRICT_SPREAD" if order.nodes > 1 else order.strategy,
        name=name,
        lifetime="detached",
        bundle_label_selector=[dict(order.labels) for _ in range(count)] if order.labels else None,
    )


def state_of(group: Group) -> str:
    """Ray's state of a group: `CREATED`, `PENDING`, `INFEASIBLE`, `REMOVED` ..."""
    row: Mapping[str, Any] = placement_groups.placement_group_table(group)
    state = str(row.get("state", GONE))
    if state == "PENDING" and row.get("stats", {}).get("scheduling_state") == "INFEASIBLE":
        return "INFEASIBLE"
    return state


def remove(name: str) -> None:
    if (group := _get_named(ray.util.get_placement_group, name)) is not None:
        placement_groups.remove_placement_group(group)


def groups_named(prefix: str) -> dict[str, Mapping[str, Any]]:
    """Ray's table rows of all groups with this prefix that are not removed, by the rest of the name."""
    table: Mapping[str, Mapping[str, Any]] = placement_groups.placement_group_table()
    return {
        str(row["name"]).removeprefix(prefix): row
        for row in table.values()
        if str(row.get("name", "")).startswith(prefix) and row.get("state") != GONE
    }


def remove_groups_on(node: str, prefix: str) -> None:
    """Remove the pool's groups that have a part on this node, and those that are still pending."""
    for run_id, row in groups_named(prefix).items():
        where = set(row["bundles_to_node_id"].values())
        if node in where or where <= {""}:
            remove(f"{prefix}{run_id}")


def parts_of(group: Any, order: AskLease) -> tuple[LeasePart, ...]:
    """Return the parts of a created group by node, the node with the most ranks first.

    Raises:
        ray.exceptions.RayError: A node of the group does not answer.
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
    # stable: nodes with equally many ranks keep the order of their bundles
    return tuple(sorted(parts, key=lambda part: -part.ranks))


def _gpus_of(group: Any, by_node: Mapping[str, Sequence[int]], size: int) -> dict[str, tuple[str, ...]]:
    """Run a small task in each bundle to find its GPUs.

    The bundles of one node run one after the other: they share one worker process then (3 ms each).
    """
    task = ray.remote(agent_main.own_gpus)
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


def _get_named(get: Callable[[str], Any], name: str) -> Any:
    """Return what Ray has under a name, None if there is nothing."""
    try:
        return get(name)
    except ValueError:
        return None
