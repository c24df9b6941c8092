"""Suggests one of our magics below IPython's error for a magic that does not exist, such as `%sgpu_statsu`."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from sgpu_magic.suggestions import did_you_mean

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.core.magic import Magics

# at the beginning of a line, or assigned to a variable
_MAGIC = re.compile(r"^\s*(?:\w+\s*=\s*)?(%{1,2})([A-Za-z_]\w*)", re.MULTILINE)
_KINDS = {"%": "line", "%%": "cell"}
# a rewritten cell has it, nobody writes it
_HIDDEN = frozenset({"sgpu_auto_cell"})


class UnknownMagics:
    """Looks at cells that IPython has refused.

    Args:
        shell: The shell, whose table has the magics that exist.
        own: Our magics.
    """

    def __init__(self, shell: InteractiveShell, own: Sequence[Magics]) -> None:
        self._magics: dict[str, dict[str, Any]] = shell.magics_manager.magics
        self._own = {kind: {name for each in own for name in each.magics[kind]} - _HIDDEN for kind in self._magics}

    def after_cell(self, result: Any) -> None:
        """Called by IPython after each cell, with its `ExecutionResult`."""
        if isinstance(result.error_in_exec, UsageError) and (suggestion := self._suggestion(result.info.raw_cell)):
            sys.stderr.write(f"{suggestion}\n")

    def _suggestion(self, cell: str) -> str | None:
        """Return the suggestion for the first magic that does not exist, None if all do or none of ours is similar."""
        for prefix, name in _MAGIC.findall(cell):
            kind = _KINDS[prefix]
            if name not in self._magics[kind]:
                return did_you_mean(f"{prefix}{name}", [f"{prefix}{own}" for own in sorted(self._own[kind])])
        return None
