"""Makes `serverless_gpu` importable, for notebooks written for Databricks' documented Serverless GPU API.

    import sgpu_magic.functions.compat                     # or %load_ext sgpu_magic
    from serverless_gpu import distributed

serverless_gpu/  the documented names, implemented with this package's own
decorators       this package's decorators, with the pool chosen by the documented environment variables

An installed `serverless_gpu` takes precedence. Nothing is imported until it is used.
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
    """The last finder: installed packages and modules in the notebook's folder take precedence."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of `serverless_gpu`, None for any other name. Its submodules are found in its folder."""
        if fullname != NAME:
            return None
        return spec_from_file_location(NAME, _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)])


def install() -> None:
    """Make `serverless_gpu` importable in this process. Further calls have no effect."""
    if not any(isinstance(finder, CompatFinder) for finder in sys.meta_path):
        sys.meta_path.append(CompatFinder())


install()
