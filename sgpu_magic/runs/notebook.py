"""The kernel's notebook: facts about it, its cells and its directory; outputs below cells."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from sgpu_magic.client.this_machine import this_owner
from sgpu_magic.options import notebook_job
from sgpu_magic.payload.names import FUTURE_FLAGS
from sgpu_magic.wire.run import Owner

_KERNEL_FILE = re.compile(r"kernel-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.json")


def owner(shell: Any, *, of_cell: bool = True) -> Owner:
    """Describe the owner of a run submitted from this process.

    Args:
        shell: The IPython shell; None in a plain Python program.
        of_cell: Whether the running cell submits the run.
    """
    if shell is None:
        return this_owner()
    return this_owner(notebook_name(shell), kernel_id(shell), cell_id(shell) if of_cell else "")


def cell_number(shell: Any) -> int | None:
    """Return the number of the running cell, None without a shell.

    Newer versions of IPython increment the count before a cell runs, older ones after it.
    """
    if shell is None:
        return None
    running = getattr(shell.displayhook, "exec_result", None)
    return getattr(running, "execution_count", None) or shell.execution_count


def cell_numbers(shell: Any) -> dict[str, int]:
    """Return cell numbers by the file name that IPython gives a cell's code; empty in a program and in a script."""
    numbers: dict[str, int] = getattr(getattr(shell, "compile", None), "_filename_map", {})
    script = notebook_job.of_process().script
    return {file: number for file, number in numbers.items() if file != script} if script else numbers


def future_flags(shell: Any) -> int:
    """Return the compiler flags of all `from __future__ import` in the cells run so far."""
    return int(getattr(getattr(shell, "compile", None), "flags", 0)) & FUTURE_FLAGS


def notebook_path(shell: Any) -> str:
    """Return the notebook's path, "" if unknown: VS Code sets it in the namespace, Jupyter in a variable."""
    return str(shell.user_ns.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME", ""))


def notebook_name(shell: Any) -> str:
    """Return the file name of the notebook, "" if unknown."""
    return os.path.basename(notebook_path(shell))


def kernel_id(shell: Any) -> str:
    """Return the Jupyter server's id of this kernel, "" without a server."""
    application = getattr(getattr(shell, "kernel", None), "parent", None)
    found = _KERNEL_FILE.fullmatch(os.path.basename(str(getattr(application, "connection_file", ""))))
    return found[1] if found is not None else ""


def cell_id(shell: Any) -> str:
    """Return the id of the running cell, which JupyterLab and Notebook send with each execution; "" elsewhere."""
    get_parent: Any = getattr(shell, "get_parent", dict)
    message: dict[str, Any] = get_parent() or {}
    return str(message.get("metadata", {}).get("cellId") or "")


def working_directory() -> str:
    """Return the working directory; `/` if it has been removed, since relative paths have no meaning then."""
    try:
        return os.getcwd()
    except OSError:
        return os.sep


# ---------------------------------------------------------------- outputs below cells


def publish(data: Mapping[str, object], display_id: str = "", *, update: bool = False) -> None:
    """Show data by media type below the running cell, or in place of what was shown under `display_id`."""
    # IPython declares no types here
    from IPython.display import publish_display_data  # pyright: ignore[reportUnknownVariableType]

    publish_display_data(dict(data), transient={"display_id": display_id} if display_id else None, update=update)
