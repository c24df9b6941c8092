"""Modules that take seconds to import, imported when a test first uses them to keep collection fast."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, cast

# for nbformat, as in `sgpu run`: jsonschema then builds no parser for IRIs, which takes a second
sys.modules.setdefault("rfc3987_syntax", cast("ModuleType", None))


class LazyModule:
    """A stand-in for a module, which is imported when one of its names is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):
            # pytest checks whether any attribute of a module is a test
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


jupytext = LazyModule("jupytext")
nbclient = LazyModule("nbclient")
nbconvert = LazyModule("nbconvert")
nbformat = LazyModule("nbformat")
pandas = LazyModule("pandas")
papermill = LazyModule("papermill")
torch = LazyModule("torch")
