"""What a placement group that is there has on which nodes: ranks, and which GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sgpu_magic.nodes.ray import on_node
from sgpu_magic.nodes.ray.messages import AskLease, LeasePart
from sgpu_magic.nodes.ray.untyped import placement_groups, ray, strategies

_GPU_IDS_S = 60.0


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
