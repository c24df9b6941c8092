"""What code on a rank asks about itself: the same as `rank`, `world_size` ... in a cell, as functions.

Reads torchrun's variables, so it works under plain torchrun too. In the notebook itself there is one process:
rank 0 of 1.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "get_device",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_world_size",
]


def get_global_rank() -> int:
    """This rank's number among all ranks of the run, from 0."""
    return int(os.environ.get("RANK", "0"))


def get_local_rank() -> int:
    """Its number among the ranks of its node, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_size() -> int:
    """Number of ranks of the run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def get_local_world_size() -> int:
    """Number of ranks on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def get_node_rank() -> int:
    """Number of this node, from 0."""
    return int(os.environ.get("GROUP_RANK", "0"))


def get_device() -> torch.device:
    """The rank's own device: its GPU, or the CPU where it has none."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", get_local_rank())
    return torch.device("cpu")
