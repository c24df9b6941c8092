"""`serverless_gpu.runtime`: the functions of `sgpu_magic.runtime` that tell a rank its place in the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgpu_magic.runtime import get_global_rank as _rank_of_the_run
from sgpu_magic.runtime import get_local_rank, get_local_world_size, get_node_rank, get_world_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["get_global_rank", "get_local_rank", "get_local_world_size", "get_node_rank", "get_world_size"]


def get_global_rank(group: ProcessGroup | None = None) -> int:
    """Return this rank's number among all ranks of the run, or in `group`.

    Args:
        group: A process group that this rank is in.
    """
    # the group's own method, which needs no import of torch
    return _rank_of_the_run() if group is None else group.rank()
