"""The environment variables that torchrun gives its workers, for one rank."""

from __future__ import annotations

import os
import sys

from sgpu_magic.agent.leftovers import RUN_VARIABLE
from sgpu_magic.protocol.node_messages import Launch


def torchrun_variables(launch: Launch, rank: int, master_port: int, device: str) -> dict[str, str]:
    """Return `RANK`, `WORLD_SIZE` ... as torchrun sets them (torch/distributed/elastic, `LocalElasticAgent`).

    Args:
        launch: The run; all its ranks are on this node.
        rank: The rank.
        master_port: A bound loopback port kept for user code that rendezvouses again.
        device: `cpu` or `cuda`.
    """
    ranks = str(launch.spec.placement.ranks)
    # a rank without a GPU of its own must not find somebody else's
    visible = ",".join(launch.lease.uuids) if device == "cuda" else ""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "ROLE_WORLD_SIZE": ranks,
        "GROUP_WORLD_SIZE": "1",
        # DeepSpeed's launcher says these beside torchrun's (deepspeed/launcher/launch.py)
        "LOCAL_SIZE": ranks,
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": launch.spec.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(launch.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(launch.spec.retries),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": launch.context.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": visible,
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        RUN_VARIABLE: launch.spec.run_id,
        # made by `runtime.checkpoint_dir`
        "SGPU_CHECKPOINT_DIR": os.path.join(launch.run_dir, "checkpoints"),
    }
