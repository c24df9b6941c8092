"""Makes `serverless_gpu` and `databricks.air` importable, for notebooks written for Databricks' documented GPU APIs.

    import sgpu_magic.functions.compat                     # or %load_ext sgpu_magic
    from serverless_gpu import distributed

serverless_gpu/  the documented names, implemented with this package's own
databricks_air/  the same of its successor
notebook/        `dbutils`, magics and other names of notebooks, for the extension `sgpu_magic.compat`; paths of volumes
decorators       this package's decorators, with the pool chosen by the documented environment variables

Installed packages of these names take precedence. Nothing is imported until it is used.
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
_HERE = Path(__file__).parent
_AIR = "databricks.air"
_FOLDERS = {NAME: _HERE / NAME, _AIR: _HERE / "databricks_air"}


class CompatFinder(MetaPathFinder):
    """The last finder: installed packages and modules in the notebook's folder take precedence."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a documented package, None for any other name. Submodules are found in its folder."""
        if fullname == _AIR.partition(".")[0]:
            # an empty namespace package, where none is installed
            return ModuleSpec(fullname, None, is_package=True)
        if fullname not in _FOLDERS:
            return None
        folder = _FOLDERS[fullname]
        return spec_from_file_location(fullname, folder / "__init__.py", submodule_search_locations=[str(folder)])


def install() -> None:
    """Make the documented packages importable in this process. Further calls have no effect."""
    if not any(isinstance(finder, CompatFinder) for finder in sys.meta_path):
        sys.meta_path.append(CompatFinder())


install()
