"""The accelerators, as `serverless_gpu.compute` names them."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["GPUType"]


class GPUType(StrEnum):
    """What `gpu_type` may be; its name as a string, in any case, means the same."""

    A10 = "a10"
    H100 = "h100"
