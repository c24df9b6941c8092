"""Whether a rank of several has trained a model without the others, which is seldom meant and never an error."""

from __future__ import annotations

import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from sgpu_magic.worker import flight_recorder


class _Steps:
    """Steps that optimizers of this process have made."""

    count = 0


def install() -> None:
    """Count the steps of optimizers from now on. For the zygote."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    # a compiled step would be compiled again for each number
    if not torch.compiler.is_compiling():
        _Steps.count += 1


class LoneTraining:
    """Watches one cell, from when it is made.

    Args:
        rank: This rank.
        ranks: How many run the cell.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._steps = _Steps.count
        self._began_at = time.time()

    def remark(self) -> str:
        """What the user is told, "" when this rank has trained nothing or has met the others."""
        if self._ranks == 1 or _Steps.count == self._steps or not flight_recorder.records_every_backend():
            return ""
        _, entered_at = flight_recorder.current()
        if entered_at >= self._began_at:
            return ""
        return (
            f"rank {self._rank} has trained by itself: an optimizer made steps there, and it called no collective. One "
            f"model on all {self._ranks} ranks needs DistributedDataParallel or a framework that knows of the ranks; "
            "accelerate on CPU ranks needs Accelerator(cpu=True)."
        )
