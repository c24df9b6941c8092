"""Notebooks written for Databricks' documented Serverless GPU API: `serverless_gpu` can be imported.

    import sgpu_magic.functions.compat                     # or %load_ext sgpu_magic
    from serverless_gpu import distributed

serverless_gpu/  the documented names, each made of this package's own
decorators       this package's decorators on the pool that the documented variables choose

The finder stands behind everything that is installed: the real package wins. It imports nothing until it is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

__all__ = ["install"]

NAME = "serverless_gpu"
_FOLDER = Path(__file__).parent / NAME


class CompatFinder(MetaPathFinder):
    """The last finder: what is installed, and the modules of the notebook's own folder, come before it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of `serverless_gpu`, None for any other name; its modules are found in its folder."""
        if fullname != NAME:
            return None
        return spec_from_file_location(NAME, _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)])


def install() -> None:
    """Let this process import `serverless_gpu`. Called again it changes nothing."""
    if not any(isinstance(finder, CompatFinder) for finder in sys.meta_path):
        sys.meta_path.append(CompatFinder())


install()
