"""The environment variables that torchrun gives its workers, for one rank."""

from __future__ import annotations

import os

from sgpu_magic.agent.ranks.leftovers import RUN_VARIABLE
from sgpu_magic.agent.ranks.rendezvous_point import MeetingPoint
from sgpu_magic.wire.node_messages import Launch


def torchrun_variables(launch: Launch, rank: int, meeting: MeetingPoint, device: str) -> dict[str, str]:
    """Return `RANK`, `WORLD_SIZE` ... as torchrun sets them (torch/distributed/elastic, `LocalElasticAgent`).

    Args:
        launch: The run, or this node's part of it.
        rank: The global rank.
        meeting: Where the ranks meet, also those of user code that rendezvouses again.
        device: `cpu` or `cuda`.
    """
    part = launch.part
    ranks = str(launch.spec.placement.ranks)
    local_rank = str(rank if part is None else rank - part.first_rank)
    local_ranks = ranks if part is None else str(part.ranks)
    group, groups = ("0", "1") if part is None else (str(part.index), str(part.nodes))
    uuids = launch.lease.uuids if part is None else launch.lease.shares[part.index].uuids
    # a rank without a GPU of its own must not find somebody else's
    visible = ",".join(uuids) if device == "cuda" else ""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": group,
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": local_ranks,
        "ROLE_WORLD_SIZE": ranks,
        "GROUP_WORLD_SIZE": groups,
        # DeepSpeed's launcher says these beside torchrun's (deepspeed/launcher/launch.py)
        "LOCAL_SIZE": local_ranks,
        "CROSS_RANK": group,
        "CROSS_SIZE": groups,
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        "TORCHELASTIC_RUN_ID": launch.spec.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(launch.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(launch.spec.retries),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": launch.context.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": visible,
        **_interfaces(launch, meeting),
        RUN_VARIABLE: launch.spec.run_id,
        # made by `runtime.checkpoint_dir`
        "SGPU_CHECKPOINT_DIR": os.path.join(launch.run_dir, "checkpoints"),
    }


def _interfaces(launch: Launch, meeting: MeetingPoint) -> dict[str, str]:
    """Which network interface the process groups use."""
    if launch.part is None:
        # whatever a cluster's settings say: all ranks are on this node, and any other interface looks names up
        return {"GLOO_SOCKET_IFNAME": meeting.interface}
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    told = {name: launch.context.environ.get(name) or meeting.interface for name in names}
    return {name: interface for name, interface in told.items() if interface}
