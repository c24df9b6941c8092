"""Finds the imports of a rank's cells that take long, so that another zygote can execute them ahead."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from sgpu_magic.worker.cell.edited_modules import is_installed

_HEAVY_S = 0.05
_LOAD: Any = vars(importlib)["_bootstrap"]._load_unlocked.__code__


class HeavyImports(MetaPathFinder):
    """Measures the imports by code that is not installed: cells, and the user's own modules.

    As a finder it is called at the beginning of each module's import, and finds nothing. An import lasts at least
    until the last module that it imports in turn.
    """

    def __init__(self) -> None:
        self._current = ""
        self._began = self._last = 0.0
        self._new: dict[str, None] = {}
        self._reported: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find nothing, and note the time."""
        if threading.current_thread() is not threading.main_thread():
            return None
        now = time.perf_counter()
        if _is_imported_by_installed():
            self._last = now
            return None
        self._complete()
        self._current, self._began, self._last = fullname, now, now
        return None

    def take(self) -> tuple[str, ...]:
        """Return the modules whose imports took long and were not returned before, in their order."""
        self._complete()
        new = tuple(name for name in self._new if name not in self._reported and _is_installed_module(name))
        self._reported.update(new)
        self._new.clear()
        return new

    def _complete(self) -> None:
        if self._current and self._last - self._began >= _HEAVY_S:
            self._new.setdefault(self._current)
        self._current = ""


def _is_imported_by_installed() -> bool:
    """Whether the import that begins now is part of the import of an installed module."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _LOAD:
            spec = frame.f_locals.get("spec")
            if spec is not None and (not spec.has_location or is_installed(spec.origin or "")):
                return True
        frame = frame.f_back
    return False


def _is_installed_module(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and spec.has_location and is_installed(spec.origin or "")


heavy_imports = HeavyImports()
"""Those of this process; the zygote puts it into `sys.meta_path`."""
