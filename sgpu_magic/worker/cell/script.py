"""A script that runs on the ranks, with what `python script` and torchrun give it."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from typing import Any, NamedTuple

from IPython.core.compilerop import CachingCompiler

from sgpu_magic.wire.run import CellSource


class Script(NamedTuple):
    """A running script.

    Args:
        file: Its path.
        source: Its text, as executed.
    """

    file: str
    source: str


class RankCompiler(CachingCompiler):
    """Names the code of a script by its file, and that of cells as in a notebook."""

    script: Script | None = None

    def is_script(self, source: str) -> bool:
        """Whether this is the script's text, which runs as it is: without IPython's syntax."""
        return self.script is not None and source == self.script.source

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        if self.script is not None and self.is_script(raw_code):
            return self.script.file
        return super().get_code_name(raw_code, transformed_code, number)

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        if self.script is not None and name == self.script.file:
            # as any file
            return None
        return super().format_code_name(name)


def enter(cell: CellSource, namespace: MutableMapping[str, Any]) -> None:
    """Set `sys.argv` and `__file__` for a script.

    Args:
        cell: The script.
        namespace: The namespace of `__main__`.
    """
    sys.argv[:] = cell.arguments
    namespace["__file__"] = cell.file
    namespace["__cached__"] = None
    if cell.module:
        # relative imports begin there
        namespace["__package__"] = cell.module.rpartition(".")[0]
