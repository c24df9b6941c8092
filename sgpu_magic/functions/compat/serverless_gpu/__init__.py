"""The names of Databricks' documented Serverless GPU API, implemented with `sgpu_magic`.

An installed `serverless_gpu` takes precedence over this one.

data   files of a volume for training, and checkpoints there

The finder in `sgpu_magic.functions.compat` makes the small modules `compute`, `launcher`, `ray` and `runtime`.
"""

from __future__ import annotations

import importlib
from enum import StrEnum
from typing import TYPE_CHECKING

from sgpu_magic import runtime as _runtime

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from sgpu_magic.functions.compat.decorators import distributed

__all__ = ["distributed"]

_MODULES = ("compute", "data", "launcher", "ray", "runtime")


class GPUType(StrEnum):
    """Values of `gpu_type`. Their names as strings, in upper or lower case, mean the same."""

    A10 = "a10"
    H100 = "h100"


def get_global_rank(group: ProcessGroup | None = None) -> int:
    """Return this rank's number among all ranks of the run, or in `group`.

    Args:
        group: A process group that this rank is in.
    """
    # the group's own method, which needs no import of torch
    return _runtime.get_global_rank() if group is None else group.rank()


def __getattr__(name: str) -> object:
    """Import names on first use: a rank that needs only `runtime` does not wait for the rest."""
    if name == "distributed":
        from sgpu_magic.functions.compat.decorators import distributed

        return distributed
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
