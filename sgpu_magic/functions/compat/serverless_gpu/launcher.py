"""`serverless_gpu.launcher`: another module from which the documentation imports `distributed`."""

from __future__ import annotations

from sgpu_magic.functions.compat.decorators import distributed

__all__ = ["distributed"]
