"""Completes packages whose import was interrupted when they are imported again.

Python removes a package from `sys.modules` when its `__init__` fails, but keeps the submodules that were already
loaded. A submodule becomes an attribute of its package only while it is loaded, so the package that a later import
creates lacks these attributes forever, and `package.submodule` fails. This must not happen in a session's rank that was
interrupted during an import: `torch.distributed.tensor` and others read such attributes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _PackageLoader(Loader):
    """Loads a package, and sets the submodules that are already loaded as its attributes."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec: Any = module.__spec__
        spec.loader = module.__loader__ = self._loader
        for name, submodule in [*sys.modules.items()]:
            package, _, own_name = name.rpartition(".")
            if package == module.__name__:
                setattr(module, own_name, submodule)
        self._loader.exec_module(module)


class _InterruptedPackages(MetaPathFinder):
    """Finds the packages to complete, each of them once, and has `_PackageLoader` load them.

    Attributes:
        names: The full names of the packages that have not been found yet.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.names:
            return None
        self.names.remove(fullname)
        for finder in [*sys.meta_path]:
            # like Python's own import, ignore finders without this method
            find_spec = getattr(finder, "find_spec", None)
            spec = None if finder is self or find_spec is None else find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _PackageLoader(spec.loader)
                return spec
        return None


_finder = _InterruptedPackages()


def complete_interrupted_imports() -> None:
    """Complete packages that are not loaded, although submodules of theirs are, at their next import."""
    loaded = [*sys.modules]
    packages = {name.rpartition(".")[0] for name in loaded} - {""}
    _finder.names = packages.difference(loaded)
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _finder]
    if _finder.names:
        sys.meta_path.insert(0, _finder)
