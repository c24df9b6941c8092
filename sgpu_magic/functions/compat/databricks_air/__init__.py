"""The decorators of `databricks.air`, the documented successor of `serverless_gpu`, implemented with `sgpu_magic`."""

from __future__ import annotations

from sgpu_magic.functions.compat.decorators import air_distributed as distributed
from sgpu_magic.functions.compat.decorators import air_ray_launch as ray_launch

__all__ = ["distributed", "ray_launch"]


def __getattr__(name: str) -> object:
    raise AttributeError(f"sgpu-magic provides {' and '.join(__all__)} of databricks.air, not {name!r}")
