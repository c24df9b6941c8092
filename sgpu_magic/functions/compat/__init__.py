"""Makes `serverless_gpu` and `databricks.air` importable, for notebooks written for Databricks' documented GPU APIs.

    import sgpu_magic.functions.compat                     # or %load_ext sgpu_magic
    from serverless_gpu import distributed

serverless_gpu/  the documented names, implemented with this package's own
databricks_air/  the same for its successor
notebook/        `dbutils`, magics and other names of notebooks, for the extension `sgpu_magic.compat`; paths of volumes
decorators       this package's decorators, with the pool chosen by the documented environment variables

Installed packages of these names take precedence. Nothing is imported until it is used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
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
_DECORATORS = f"{__name__}.decorators"
# documented modules that only have names of other modules, by the module that has them
_ALIASES = {
    f"{NAME}.compute": {NAME: ("GPUType",)},
    f"{NAME}.launcher": {_DECORATORS: ("distributed",)},
    f"{NAME}.ray": {_DECORATORS: ("ray_launch",)},
    f"{NAME}.runtime": {
        NAME: ("get_global_rank",),
        "sgpu_magic.runtime": ("get_local_rank", "get_local_world_size", "get_node_rank", "get_world_size"),
    },
    f"{_AIR}.data": {
        f"{__name__}.{NAME}.data": (
            "Checkpointable", "DataLoader", "UCVolumeDataset", "UCVolumeReader", "UCVolumeWriter",
        ),
    },
}  # fmt: skip


class _Alias(Loader):
    """Fills a module with names of other modules.

    Args:
        names: The names, by the module that has them.
    """

    def __init__(self, names: Mapping[str, Sequence[str]]) -> None:
        self._names = names

    def exec_module(self, module: ModuleType) -> None:
        found = {
            name: getattr(importlib.import_module(source), name)
            for source, names in self._names.items()
            for name in names
        }
        module.__doc__ = f"`{module.__name__}`: {', '.join(found)}, as documented."
        vars(module).update(found, __all__=list(found))


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
            return ModuleSpec(fullname, _Alias(_ALIASES[fullname]))
        if fullname not in _FOLDERS:
            return None
        folder = _FOLDERS[fullname]
        return spec_from_file_location(fullname, folder / "__init__.py", submodule_search_locations=[str(folder)])


def install() -> None:
    """Make the documented packages importable in this process. Further calls have no effect."""
    if not any(isinstance(finder, CompatFinder) for finder in sys.meta_path):
        sys.meta_path.append(CompatFinder())


install()
