"""`%sgpu_auto on`: every plain cell goes to the ranks of the current session."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

from sgpu_magic.runs.sessions import registry

CELL_MAGIC = "sgpu_auto_cell"
"""What a plain cell becomes; nobody writes it."""

_STAYS = re.compile(r"\s*(?:[\w,\s]+=\s*)?%(?:sgpu_\w+|pip|conda|mamba|uv|(?:un|re)?load_ext|env|set_env)\b")
_IS_BLANK = re.compile(r"\s*(?:#.*)?$")


class AutoMode:
    """An input transformer of IPython's: the first one, for those after it drop leading blank lines.

    Args:
        shell: The notebook's.

    Attributes:
        is_on: Plain cells go to the ranks.
    """

    # IPython leaves it out when it looks whether a cell is complete
    has_side_effects = True
    # it is left out when a cell's body is read
    sends_cells = True

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.is_on = False
        shell.input_transformers_cleanup.insert(0, self)
        self._undo = registry.on_drop(self._session_gone)

    def remove(self) -> None:
        """Take it out of the shell."""
        self._undo()
        self.is_on = False
        if self in self._shell.input_transformers_cleanup:
            self._shell.input_transformers_cleanup.remove(self)

    def __call__(self, lines: list[str]) -> list[str]:
        if not self.is_on or stays_here(lines) or not self._is_users("".join(lines)):
            return lines
        return [f"get_ipython().run_cell_magic({CELL_MAGIC!r}, '', {''.join(_with_its_first_lines(lines))!r})\n"]

    def takes(self, source: str) -> bool:
        """Whether this cell goes to the ranks."""
        return self.is_on and not stays_here(source.splitlines())

    def _is_users(self, source: str) -> bool:
        """Whether a person has sent the cell.

        Front ends run code of their own, silently or without a number; a magic such as `%%capture` runs its body.
        """
        kernel = getattr(self._shell, "kernel", None)
        if kernel is None:
            return True
        parent: dict[str, Any] = kernel.get_parent("shell") or {}
        content: dict[str, Any] = parent.get("content", {})
        if content.get("silent") or not content.get("store_history", True):
            return False
        return str(content.get("code", "")).splitlines() == source.splitlines()

    def _session_gone(self) -> None:
        if self.is_on and not registry.names():
            self.is_on = False
            if threading.current_thread() is not threading.main_thread():
                # no cell has ended it, so none is the place to say so
                return
            print("%sgpu_auto is off again: no session is connected any more.")  # noqa: T201


def _with_its_first_lines(lines: list[str]) -> list[str]:
    """IPython on the rank drops leading blank lines, and line numbers are to be the editor's: comments stay."""
    blank = next((index for index, line in enumerate(lines) if line.strip()), len(lines))
    return ["#\n"] * blank + lines[blank:]


def stays_here(lines: Sequence[str]) -> bool:
    """Whether a cell runs in the notebook all the same: other cell magics, magics for the notebook, nothing at all."""
    code = [line for line in lines if not _IS_BLANK.match(line)]
    return not code or code[0].lstrip().startswith("%%") or all(_STAYS.match(line) for line in code)
