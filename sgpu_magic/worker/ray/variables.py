"""What the driver and Ray's processes find in their environment."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path

from sgpu_magic.wire.rank import PrivateRay

LOOPBACK = "127.0.0.1"

# of another cluster: the one that the notebook or the node's own pool is in
_OTHERS = frozenset(
    {
        "RAY_ADDRESS",
        "RAY_API_SERVER_ADDRESS",
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN",
        "RAY_AUTH_TOKEN_PATH",
        "RAY_CLIENT_MODE",
        "RAY_CLUSTER_ID",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
        "RAY_JOB_CONFIG_JSON_ENV_VAR",
        "RAY_JOB_ID",
        "RAY_LAUNCHER",
        "RAY_NAMESPACE",
        "RAY_NODE_ID",
        "RAY_NODE_IP_ADDRESS",
        "RAY_OVERRIDE_JOB_RUNTIME_ENV",
        "RAY_RAYLET_PID",
        "RAY_RUNTIME_ENV_HOOK",
        "RAY_SERIALIZED_RUNTIME_ENV_CONTEXT",
        "RAY_START_HOOK",
        "RAY_TMPDIR",
        "RAY_USE_TLS",
    }
)
# a task is no rank: what reads these would wait for peers that never come
_OF_RANKS = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_NAME",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "LOCAL_SIZE",
        "CROSS_RANK",
        "CROSS_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_USE_AGENT_STORE",
        # set from the rank's share of the cores; Ray sets it from what a task asks for
        "OMP_NUM_THREADS",
    }
)


def new_token() -> str:
    """A token that only this run's processes know."""
    return secrets.token_hex(32)


def write_token(directory: str, token: str) -> str:
    """Keep the token where Ray's processes of this node read it; returns the file, of mode 0600.

    Raises:
        OSError: It can't be written.
    """
    path = Path(directory) / "token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as file:
        file.write(token)
    return str(path)


def of_ray(token_file: str, order: PrivateRay) -> dict[str, str]:
    """Variables of the driver and of Ray's own processes alike.

    Args:
        token_file: Where the token is.
        order: The node's part of the cluster.
    """
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": token_file,
        "RAY_USAGE_STATS_ENABLED": "0",
        # lines that are alike are lines all the same
        "RAY_DEDUP_LOGS": "0",
        # no fixed port: two clusters may be on one machine
        "DASHBOARD_METRIC_PORT": "0",
    }
    if order.address == LOOPBACK:
        # else `ray.init()` takes the machine's own address in the place of the loopback one (services.py,
        # resolve_ip_for_localhost), where nothing listens
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return variables


def of_processes(
    environ: Mapping[str, str], ray: Mapping[str, str], paths: Collection[str], package: str
) -> dict[str, str]:
    """Return the environment of Ray's processes on a node.

    Args:
        environ: The rank's.
        ray: Of `of_ray`.
        paths: Entries of the rank's path that are not of its Python installation; what tasks import is found there.
        package: Directory that this package is in.
    """
    kept = {name: value for name, value in environ.items() if name not in _OTHERS | _OF_RANKS}
    found = [*paths, *([] if package in paths else [package])]
    return {**kept, **ray, "PYTHONPATH": os.pathsep.join(found)}


def take_over(ray: Mapping[str, str], address: str, dashboard: str) -> None:
    """Let this process be the driver: `ray.init()` finds the run's cluster, and no other.

    Args:
        ray: Of `of_ray`.
        address: The head's `host:port`.
        dashboard: The dashboard's, "" where there is none.
    """
    forget_others()
    os.environ.update(ray, RAY_ADDRESS=address)
    if dashboard:
        os.environ["RAY_API_SERVER_ADDRESS"] = f"http://{dashboard}"


def forget_others() -> None:
    """Another cluster that the notebook or the node is in is none of this run's."""
    for name in _OTHERS:
        os.environ.pop(name, None)
