"""How a notebook shows the value of a distributed cell: not below the cell if the run's view shows all of it."""

from __future__ import annotations

from typing import Any

from sgpu_magic.client.result import RunResult
from sgpu_magic.runs.notebook import cell_number


def show_values_once(shell: Any) -> None:
    """Show no `Out` below a cell whose ranks have no value, or whose values are displayed as tables and the like.

    Shown elsewhere, for example as `_` in the next cell, the value has its usual forms. Only for kernels: a terminal
    prints its prompt before it asks for any form.
    """
    if getattr(shell, "kernel", None) is None:
        return

    def show(result: RunResult) -> None:
        if not (result.adds_nothing and result.came_from(cell_number(shell))):
            # IPython then takes the other forms
            raise NotImplementedError

    shell.display_formatter.ipython_display_formatter.for_type(RunResult, show)


def show_values_as_usual(shell: Any) -> None:
    """Undo `show_values_once`."""
    shell.display_formatter.ipython_display_formatter.pop(RunResult, None)
