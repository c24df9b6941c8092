"""Ray's modules, untyped, and calls for placement groups, which hold the devices of runs.

Ray's own type hints are incomplete: uses of these names are checked by tests, not by the type checker. All calls may
block; make none in an event loop's thread.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayError as RayError

from sgpu_magic.nodes.ray.driver import AskLease

ray: Any = importlib.import_module("ray")
placement_groups: Any = importlib.import_module("ray.util.placement_group")
strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
accelerators: Any = importlib.import_module("ray.util.accelerators")
# the only source of each node's free resources that does not need the dashboard
state: Any = importlib.import_module("ray._private.state")


def autoscaler_status() -> Any:
    """The status of the autoscaler (version 2).

    Raises:
        RuntimeError: The autoscaler does not answer.
    """
    sdk: Any = importlib.import_module("ray.autoscaler.v2.sdk")
    return sdk.get_cluster_status(str(ray.get_runtime_context().gcs_address), timeout=2)


# a `PlacementGroup`
Group = Any

THERE = "CREATED"
GONE = "REMOVED"


def find_or_make(order: AskLease, name: str) -> Group:
    """Return the run's group: the one of this name, or a new one. It is detached: it stays until it is removed.

    Raises:
        ValueError: Ray refuses the request.
    """
    found = find(name)
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


def find(name: str) -> Group | None:
    try:
        return ray.util.get_placement_group(name)
    except ValueError:
        return None


def state_of(group: Group) -> str:
    """Ray's state of a group: `CREATED`, `PENDING`, `INFEASIBLE`, `REMOVED` ..."""
    row: Mapping[str, Any] = placement_groups.placement_group_table(group)
    state = str(row.get("state", GONE))
    if state == "PENDING" and row.get("stats", {}).get("scheduling_state") == "INFEASIBLE":
        return "INFEASIBLE"
    return state


def remove(name: str) -> None:
    if (group := find(name)) is not None:
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
