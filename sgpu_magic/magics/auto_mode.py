"""`%sgpu_auto`: cells that run on the pool without a magic."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

from sgpu_magic.payload.namespace import only_in_notebook
from sgpu_magic.payload.notebook_text import with_cell_magic
from sgpu_magic.runs.sessions import registry

CELL_MAGIC = "sgpu_auto_cell"
"""The internal magic that a plain cell is rewritten to."""

_STAYS = re.compile(
    r"\s*(?:[\w,\s]+=\s*)?"
    r"%(?:sgpu_\w+|pip|conda|mamba|uv|(?:un|re)?load_ext|env|set_env|restart_python|fs)\b"
    # runs another notebook with arguments for its widgets, which are in this kernel
    r"|%run\s.*\s'?\$\w+="
)
_IS_BLANK = re.compile(r"\s*(?:#.*)?$")
_NAME = re.compile(r"(?<![\w.])[^\W\d]\w*")


class AutoMode:
    """The input transformer of `%sgpu_auto`. It precedes IPython's own, because they drop leading blank lines.

    Args:
        shell: The notebook's shell.

    Attributes:
        is_on: Whether plain cells go to the ranks.
    """

    # IPython skips such transformers when it checks whether a cell is complete
    has_side_effects = True
    # such transformers are skipped when a cell's body is read
    sends_cells = True

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.is_on = False
        cleanup: list[object] = shell.input_transformers_cleanup
        # after the transformer of `sgpu_magic.compat`, also when this extension is loaded again
        before = [at for at, each in enumerate(cleanup) if getattr(each, "comes_first", False)]
        cleanup.insert(before[-1] + 1 if before else 0, self)
        registry.when_dropped.append(self._on_session_end)

    def remove(self) -> None:
        """Remove the transformer from the shell."""
        registry.when_dropped.remove(self._on_session_end)
        self.is_on = False
        if self in self._shell.input_transformers_cleanup:
            self._shell.input_transformers_cleanup.remove(self)

    def __call__(self, lines: list[str]) -> list[str]:
        source = "".join(lines)
        if not self.takes(source) or not self._is_users(source):
            return lines
        return [f"get_ipython().run_cell_magic({CELL_MAGIC!r}, '', {''.join(_with_its_first_lines(lines))!r})\n"]

    def takes(self, source: str) -> bool:
        """Whether this cell goes to the ranks."""
        return self.is_on and not stays_here(source.splitlines()) and not self._uses_notebook_objects(source)

    def _uses_notebook_objects(self, source: str) -> bool:
        """Whether a cell uses an object that can't be sent to ranks, such as `dbutils`."""
        namespace: dict[str, object] = self._shell.user_ns
        code = "\n".join(line for line in source.splitlines() if not _IS_BLANK.match(line))
        return any(only_in_notebook(namespace.get(name)) for name in frozenset(_NAME.findall(code)))

    def _is_users(self, source: str) -> bool:
        """Whether the source is a cell that the user executed.

        Front ends execute their own code silently or without history, and magics such as `%%capture` run their body.
        """
        kernel = getattr(self._shell, "kernel", None)
        if kernel is None:
            return True
        parent: dict[str, Any] = kernel.get_parent("shell") or {}
        content: dict[str, Any] = parent.get("content", {})
        if content.get("silent") or not content.get("store_history", True):
            return False
        code = str(content.get("code", ""))
        # `sgpu_magic.compat` has already removed `%python` from a cell
        return source.splitlines() in (code.splitlines(), with_cell_magic(code).source.splitlines())

    def _on_session_end(self) -> None:
        was_on, self.is_on = self.is_on, self.is_on and bool(registry.names())
        # otherwise no cell ended the session, so there is no cell to print below
        if was_on and not self.is_on and threading.current_thread() is threading.main_thread():
            print("%sgpu_auto is off again: no session is connected any more.")  # noqa: T201


def _with_its_first_lines(lines: list[str]) -> list[str]:
    """Replace leading blank lines, which IPython on the rank drops, by comments: line numbers then match the editor."""
    blank = next((index for index, line in enumerate(lines) if line.strip()), len(lines))
    return ["#\n"] * blank + lines[blank:]


def stays_here(lines: Sequence[str]) -> bool:
    """Whether a cell always runs in the notebook: it has a cell magic, only notebook magics, or no code."""
    code = [line for line in lines if not _IS_BLANK.match(line)]
    return not code or code[0].lstrip().startswith("%%") or all(_STAYS.match(line) for line in code)
