"""The names of Databricks' documented Serverless GPU API, made of this package's own. The real package comes first.

compute   GPU types
launcher  `distributed`, where older code imports it from
ray       `ray_launch`
runtime   what code on a rank asks about itself
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgpu_magic.functions.compat.decorators import distributed

__all__ = ["distributed"]

_MODULES = ("compute", "launcher", "ray", "runtime")


def __getattr__(name: str) -> object:
    """Import what is asked for when it is: a rank that wants `runtime` alone need not wait for the rest."""
    if name == "distributed":
        from sgpu_magic.functions.compat.decorators import distributed

        return distributed
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
