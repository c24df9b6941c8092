"""`serverless_gpu.ray`: the decorator that starts a Ray cluster on the leased GPUs."""

from __future__ import annotations

from sgpu_magic.functions.compat.decorators import ray_launch

__all__ = ["ray_launch"]
