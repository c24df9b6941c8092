"""Changes to modules of other packages, made when a rank imports them: importing them earlier would take seconds."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _AfterImport(MetaPathFinder):
    """Finds some modules as Python does, and changes them when they have been executed."""

    def __init__(self, names: Sequence[str], change: Callable[[Any], None]) -> None:
        self._names = names
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        loader.exec_module = exec_module
        return spec


def after_import(names: Sequence[str], change: Callable[[Any], None]) -> None:
    """Call `change` with each of these modules after its import; at once with those that are imported already."""
    for name in names:
        if name in sys.modules:
            change(sys.modules[name])
    sys.meta_path.insert(0, _AfterImport(names, change))


def refuse_launchers() -> None:
    """Let accelerate's `notebook_launcher` say that the ranks are there, instead of starting processes in each."""
    after_import(("accelerate.launchers",), _refuse_notebook_launcher)


def _refuse_notebook_launcher(module: Any) -> None:
    @functools.wraps(module.notebook_launcher)
    def notebook_launcher(function: Any = None, *args: object, **kwargs: object) -> None:
        name = getattr(function, "__name__", "function")
        raise RuntimeError(
            f"notebook_launcher() on rank {os.environ.get('RANK', '?')}: the run's {os.environ.get('WORLD_SIZE', '')} "
            f"ranks are there already, started as torchrun starts them. Call the function itself: {name}(...)."
        )

    module.notebook_launcher = notebook_launcher
