"""`dbutils`, made of its parts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sgpu_magic.functions.compat.notebook.file_system import FileSystem
from sgpu_magic.functions.compat.notebook.other_notebooks import Notebook
from sgpu_magic.functions.compat.notebook.restart import Library
from sgpu_magic.functions.compat.notebook.secret_values import Secrets
from sgpu_magic.functions.compat.notebook.utility import Utility
from sgpu_magic.functions.compat.notebook.widgets import Widgets


class DBUtils(Utility):
    """Utilities of a Databricks notebook, on this machine.

    Args:
        shell: The notebook's shell.
        widgets: `dbutils.widgets`.
        keep: Names that `restartPython` keeps.
    """

    def __init__(self, shell: Any, widgets: Widgets, keep: Collection[str]) -> None:
        self.fs = FileSystem()
        self.library = Library(shell, keep)
        self.notebook = Notebook()
        self.secrets = Secrets()
        self.widgets = widgets

    def _overview(self) -> str:
        parts = [part for part in vars(self).values() if isinstance(part, Utility)]
        lines = [f"  {part.path.partition('.')[2]}: {(part.__doc__ or '').partition(chr(10))[0]}" for part in parts]
        return "\n".join(["dbutils has these parts; dbutils.fs.help() lists the functions of one:", "", *lines])
