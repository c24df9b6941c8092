"""Placement groups: what a run's devices are to Ray. All calls may block; none is made in an event loop's thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sgpu_magic.nodes.ray import on_node
from sgpu_magic.nodes.ray.messages import AskLease, LeasePart
from sgpu_magic.nodes.ray.untyped import placement_groups, ray, strategies

# a `PlacementGroup`
Group = Any

THERE = "CREATED"
GONE = "REMOVED"
_GPU_IDS_S = 60.0


def find_or_make(order: AskLease, name: str) -> Group:
    """Return the run's group: the one of this name, or a new one. It belongs to nobody and stays until it is removed.

    Raises:
        ValueError: Ray refuses the request as it stands.
    """
    found = find(name)
    if found is not None and state_of(found) != GONE:
        return found
    bundles = bundles_of(order)
    return placement_groups.placement_group(
        bundles,
        strategy="STRICT_SPREAD" if order.nodes > 1 else order.strategy,
        name=name,
        lifetime="detached",
        bundle_label_selector=[dict(order.labels) for _ in bundles] if order.labels else None,
    )


def bundles_of(order: AskLease) -> list[dict[str, float]]:
    """One bundle for each rank; one for each node where the number of nodes was asked for."""
    count, size = (order.nodes, order.ranks // order.nodes) if order.nodes else (order.ranks, 1)
    one: dict[str, float] = {"CPU": float(size)}
    if order.gpus:
        one = {"GPU": float(size)}
        if order.cpus:
            one["CPU"] = order.cpus * size
    return [{**one, **order.resources} for _ in range(count)]


def find(name: str) -> Group | None:
    try:
        return ray.util.get_placement_group(name)
    except ValueError:
        return None


def state_of(group: Group) -> str:
    """Ray's word: `CREATED`, `PENDING`, `INFEASIBLE`, `REMOVED` ..."""
    row: Mapping[str, Any] = placement_groups.placement_group_table(group)
    state = str(row.get("state", GONE))
    if state == "PENDING" and row.get("stats", {}).get("scheduling_state") == "INFEASIBLE":
        return "INFEASIBLE"
    return state


def parts_of(group: Group, order: AskLease) -> tuple[LeasePart, ...]:
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


def _gpus_of(group: Group, by_node: Mapping[str, Sequence[int]], size: int) -> dict[str, tuple[str, ...]]:
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


def remove(name: str) -> None:
    group = find(name)
    if group is not None:
        placement_groups.remove_placement_group(group)


def groups_named(prefix: str) -> dict[str, Mapping[str, Any]]:
    """The rows of all groups whose names begin so and that are not removed, by the rest of the name."""
    table: Mapping[str, Mapping[str, Any]] = placement_groups.placement_group_table()
    return {
        str(row["name"]).removeprefix(prefix): row
        for row in table.values()
        if str(row.get("name", "")).startswith(prefix) and row.get("state") != GONE
    }


def remove_groups_on(node: str, prefix: str) -> None:
    """Remove the pool's groups that have a part on this node, and those that are only asked for."""
    for run_id, row in groups_named(prefix).items():
        where = set(row["bundles_to_node_id"].values())
        if node in where or where <= {""}:
            remove(f"{prefix}{run_id}")
