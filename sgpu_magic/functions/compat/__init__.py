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

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

__all__ = ["install"]

NAME = "serverless_gpu"
_HERE = Path(__file__).parent
_AIR = "databricks.air"
_FOLDERS = {NAME: _HERE / NAME, _AIR: _HERE / "databricks_air"}
# documented modules that only have names of other modules: of which, and these names
_ALIASES = {
    f"{NAME}.launcher": (f"{__name__}.decorators", ("distributed",)),
    f"{NAME}.ray": (f"{__name__}.decorators", ("ray_launch",)),
    f"{_AIR}.data": (
        f"{__name__}.{NAME}.data",
        ("Checkpointable", "DataLoader", "UCVolumeDataset", "UCVolumeReader", "UCVolumeWriter"),
    ),
}


class _Alias(Loader):
    """Fills a module with names of another one.

    Args:
        module: The module that has them.
        names: The names.
    """

    def __init__(self, module: str, names: Sequence[str]) -> None:
        self._module = module
        self._names = names

    def exec_module(self, module: ModuleType) -> None:
        source = importlib.import_module(self._module)
        module.__doc__ = f"`{module.__name__}`: {', '.join(self._names)}, as documented."
        vars(module).update({name: getattr(source, name) for name in self._names}, __all__=list(self._names))


class CompatFinder(MetaPathFinder):
    """The last finder: installed packages and modules in the notebook's folder take precedence."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a documented package, None for any other name. Submodules are found in its folder."""
        if fullname == _AIR.partition(".")[0]:
            # an empty namespace package, where none is installed
            return ModuleSpec(fullname, None, is_package=True)
        parent = fullname.rpartition(".")[0]
        if fullname in _ALIASES and path is not None and str(_FOLDERS[parent]) in path:
            return ModuleSpec(fullname, _Alias(*_ALIASES[fullname]))
        if fullname not in _FOLDERS:
            return None
        folder = _FOLDERS[fullname]
        return spec_from_file_location(fullname, folder / "__init__.py", submodule_search_locations=[str(folder)])


def install() -> None:
    """Make the documented packages importable in this process. Further calls have no effect."""
    if not any(isinstance(finder, CompatFinder) for finder in sys.meta_path):
        sys.meta_path.append(CompatFinder())


install()
