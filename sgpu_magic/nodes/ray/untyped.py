"""Ray's names. Its own types are partial: what is taken from here is checked by tests, not by the type checker."""

from __future__ import annotations

import importlib
from typing import Any

from ray.exceptions import RayError

__all__ = [
    "RayError",
    "accelerators",
    "autoscaler_status",
    "available_per_node",
    "placement_groups",
    "ray",
    "strategies",
]

ray: Any = importlib.import_module("ray")
placement_groups: Any = importlib.import_module("ray.util.placement_group")
strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
accelerators: Any = importlib.import_module("ray.util.accelerators")


def available_per_node() -> dict[str, dict[str, float]]:
    """What is free of each node's resources, by node id. Ray tells it only here, and without its dashboard."""
    state: Any = importlib.import_module("ray._private.state")
    return state.available_resources_per_node()


def autoscaler_status(address: str) -> Any:
    """What the autoscaler (version 2) does.

    Raises:
        RuntimeError: It does not answer.
    """
    sdk: Any = importlib.import_module("ray.autoscaler.v2.sdk")
    return sdk.get_cluster_status(address, timeout=2)
