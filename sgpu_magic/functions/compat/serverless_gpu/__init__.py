"""The names of Databricks' documented Serverless GPU API, implemented with `sgpu_magic`.

An installed `serverless_gpu` takes precedence over this one.

compute   GPU types
data      files of a volume for training, and checkpoints there
runtime   rank, world size and node rank, for code on a rank

`launcher` and `ray`, which only have the decorators, come from the finder in `sgpu_magic.functions.compat`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgpu_magic.functions.compat.decorators import distributed

__all__ = ["distributed"]

_MODULES = ("compute", "data", "launcher", "ray", "runtime")


def __getattr__(name: str) -> object:
    """Import names on first use: a rank that needs only `runtime` does not wait for the rest."""
    if name == "distributed":
        from sgpu_magic.functions.compat.decorators import distributed

        return distributed
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
