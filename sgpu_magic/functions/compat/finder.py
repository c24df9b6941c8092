"""Finds `serverless_gpu` in this package when nobody else has it. Imports nothing until it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

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
