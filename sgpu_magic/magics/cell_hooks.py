"""Hooks around cells: `%sgpu_auto`, names that plain cells rebind, warm ranks, launchers of other packages.

Exception groups raised by ranks are displayed with the ranks' own tracebacks.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from typing import Any

from sgpu_magic.magics.auto_mode import AutoMode
from sgpu_magic.runs.submit.cell_source import transform_of

# ---------------------------------------------------------------- %sgpu_auto


_LAUNCHER = "notebook_launcher"
_STRATEGY = "ddp_notebook"


# ---------------------------------------------------------------- cells that start processes with other packages


def hint_for(source: str) -> str:
    """Return the line for a cell that launches processes with accelerate or Lightning, "" for any other cell.

    Args:
        source: The cell as Python code.
    """
    try:
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError):
        return ""
    for call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        strategy = given.get("strategy")
        if name == _LAUNCHER:
            function = _text(call.args[0] if call.args else given.get("function"), "the function")
            arguments = call.args[1] if len(call.args) > 1 else given.get("args")
            number = _text(call.args[2] if len(call.args) > 2 else given.get("num_processes"), "N")
            inner = ", ".join(map(ast.unparse, arguments.elts)) if isinstance(arguments, ast.Tuple) else ""
            shown = f"`{function}({inner or ('' if arguments is None else '...')})`"
            return f"sgpu: to run this on the pool, write {shown} in a cell with `%%distributed --gpus {number}`."
        if isinstance(strategy, ast.Constant) and str(strategy.value).startswith(_STRATEGY):
            number = _text(given.get("devices"), "N")
            return (
                f"sgpu: to run this on the pool, write `%%distributed --gpus {number}` above the cell, and "
                'strategy="ddp" in it.'
            )
    return ""


def _text(node: ast.expr | None, otherwise: str) -> str:
    return otherwise if node is None else ast.unparse(node)


class LauncherHints:
    """Prints the hint once for each line of text in a kernel.

    Args:
        shell: The notebook's shell.
        auto: The switch that sends plain cells to the ranks.
    """

    def __init__(self, shell: Any, auto: AutoMode) -> None:
        self._shell = shell
        self._auto = auto
        self._shown: set[str] = set()

    def before_cell(self, info: Any) -> None:
        """Handle IPython's `pre_run_cell`."""
        source = str(getattr(info, "raw_cell", "") or "")
        is_plain = not self._auto.is_on and not source.lstrip().startswith("%%")
        if not is_plain or (_LAUNCHER not in source and _STRATEGY not in source):
            return
        transform: Callable[[str], str] | None = transform_of(self._shell)
        hint = hint_for(source if transform is None else transform(source))
        if hint and hint not in self._shown:
            self._shown.add(hint)
            sys.stdout.write(f"{hint}\n")
