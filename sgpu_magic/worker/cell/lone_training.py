"""Detects that each rank trains alone, without exchanging gradients."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from sgpu_magic.worker.process import position


class _Steps:
    """Number of optimizer steps in this process."""

    count = 0


def count_optimizer_steps() -> None:
    """Count optimizer steps from now on. Called in the zygote."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    # a compiled step would be recompiled for each count
    if not torch.compiler.is_compiling():
        _Steps.count += 1


class LoneTraining:
    """Detects that a rank trains without the others, which is rarely intended but never an error.

    Counts from the creation of this object, so create one for each cell.

    Args:
        rank: This rank.
        ranks: Number of ranks that run the cell.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._steps = _Steps.count
        self._began_at = time.time()

    def remark(self) -> str:
        """Return a remark for the user, "" if this rank has not trained or has called a collective."""
        if self._ranks == 1 or _Steps.count == self._steps or not position.records_every_backend():
            return ""
        _, entered_at = position.current_collective()
        if entered_at >= self._began_at:
            return ""
        return (
            f"rank {self._rank} has trained by itself: an optimizer made steps there, but it called no collective. One "
            f"model on all {self._ranks} ranks needs DistributedDataParallel or a framework that uses the ranks; "
            "accelerate on CPU ranks needs Accelerator(cpu=True)."
        )
