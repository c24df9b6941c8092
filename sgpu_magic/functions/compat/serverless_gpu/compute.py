"""`serverless_gpu.compute`: the accelerator types."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["GPUType"]


class GPUType(StrEnum):
    """Values of `gpu_type`. Their names as strings, in upper or lower case, mean the same."""

    A10 = "a10"
    H100 = "h100"
