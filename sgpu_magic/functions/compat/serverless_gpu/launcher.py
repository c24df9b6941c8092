"""`serverless_gpu.launcher`: another place from which the documentation imports `distributed`."""

from __future__ import annotations

from sgpu_magic.functions.compat.decorator import distributed

__all__ = ["distributed"]
