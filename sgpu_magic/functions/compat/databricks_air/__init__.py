"""The names of `databricks.air`, the documented successor of `serverless_gpu`, implemented with `sgpu_magic`.

`data`, which has the names of `serverless_gpu.data`, comes from the finder in `sgpu_magic.functions.compat`.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from sgpu_magic.errors import UsageError
from sgpu_magic.functions.compat.decorators import air_distributed as distributed
from sgpu_magic.functions.compat.decorators import air_ray_launch as ray_launch

__all__ = ["distributed", "ray_init", "ray_launch"]


def ray_init(**options: Any) -> Any:
    """Connect to the Ray cluster of the run, in a function decorated with `ray_launch`; return what `ray.init` does.

    Args:
        options: Arguments of `ray.init`.

    Raises:
        UsageError: There is no cluster: the code is not in such a function.
    """
    if not os.environ.get("RAY_ADDRESS"):
        raise UsageError(
            "ray_init() connects to the cluster of a run, and this code is in none. Call it in a function decorated "
            'with @ray_launch(num_accelerators=8, accelerator_type="GPU_8xH100") and start that with .distributed().'
        )
    ray = importlib.import_module("ray")
    return ray.init(**{"ignore_reinit_error": True, **options})


def __getattr__(name: str) -> object:
    if name == "data":
        return importlib.import_module(f"{__name__}.data")
    raise AttributeError(f"sgpu-magic provides {', '.join(__all__)} and data of databricks.air, not {name!r}")
