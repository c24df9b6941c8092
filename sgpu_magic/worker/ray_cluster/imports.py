"""Something is done right after a module was imported, whoever imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Then = Callable[[ModuleType], None]


def after_import(name: str, then: Then, missing: str = "") -> None:
    """Call `then` with the module once it is imported; now where it is there already.

    Args:
        name: The module's.
        then: Called with it.
        missing: What an `ImportError` of its own says instead; "" leaves it as it is.
    """
    module = sys.modules.get(name)
    if module is not None:
        then(module)
        return
    sys.meta_path.insert(0, _Finder(name, then, missing))


class _Finder(MetaPathFinder):
    """Finds one module as the finders behind it do."""

    def __init__(self, name: str, then: Then, missing: str) -> None:
        self._name = name
        self._then = then
        self._missing = missing

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._then, self._missing)
                return spec
        return None


class _Loader(Loader):
    """Loads as the module's own loader does, and leaves that one in its place."""

    def __init__(self, own: Loader, then: Then, missing: str) -> None:
        self._own = own
        self._then = then
        self._missing = missing

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        try:
            self._own.exec_module(module)
        except ImportError as error:
            if not self._missing:
                raise
            # those that can do without it catch this too
            raise ImportError(self._missing, name=error.name) from error
        self._then(module)
