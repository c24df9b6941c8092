"""What a notebook's kernel knows of the cell that runs in it."""

from __future__ import annotations

import os
import re
from typing import Any

from sgpu_magic.client.this_process import this_owner
from sgpu_magic.payload.names import FUTURE_FLAGS
from sgpu_magic.wire.run import Owner

_KERNEL_FILE = re.compile(r"kernel-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.json")


def owner(shell: Any, *, of_cell: bool = True) -> Owner:
    """Describe who submits a run from here.

    Args:
        shell: The IPython shell, None in a plain Python program.
        of_cell: The cell that is running submits it.
    """
    if shell is None:
        return this_owner()
    return this_owner(notebook_name(shell), kernel_id(shell), cell_id(shell) if of_cell else "")


def cell_number(shell: Any) -> int:
    """The number of the cell that is running: newer IPythons count up before a cell runs, older ones after it."""
    running = getattr(shell.displayhook, "exec_result", None)
    return getattr(running, "execution_count", None) or shell.execution_count


def cell_numbers(shell: Any) -> dict[str, int]:
    """Cell numbers by the file name that IPython gives a cell's code; none in a plain Python program."""
    return getattr(getattr(shell, "compile", None), "_filename_map", {})


def future_flags(shell: Any) -> int:
    """Compiler flags of the `from __future__ import` of the cells that have run."""
    return int(getattr(getattr(shell, "compile", None), "flags", 0)) & FUTURE_FLAGS


def notebook_path(shell: Any) -> str:
    """The notebook's file, where the front end tells: VS Code in the namespace, Jupyter in a variable; else ""."""
    return str(shell.user_ns.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME", ""))


def notebook_name(shell: Any) -> str:
    """The name of that file."""
    return os.path.basename(notebook_path(shell))


def kernel_id(shell: Any) -> str:
    """The id that the Jupyter server knows this kernel by, "" where there is no server."""
    application = getattr(getattr(shell, "kernel", None), "parent", None)
    found = _KERNEL_FILE.fullmatch(os.path.basename(str(getattr(application, "connection_file", ""))))
    return found[1] if found is not None else ""


def cell_id(shell: Any) -> str:
    """The id of the cell that is running, as JupyterLab and Notebook send it with each execution; "" elsewhere."""
    get_parent: Any = getattr(shell, "get_parent", dict)
    message: dict[str, Any] = get_parent() or {}
    return str(message.get("metadata", {}).get("cellId") or "")
