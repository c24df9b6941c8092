"""`%store` on a rank: all ranks read what is stored, and the first one of those that run a cell writes."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.paths import get_ipython_dir

_READS = ("-r", "-h")


def load(shell: InteractiveShell, is_first: Callable[[], bool]) -> None:
    """Load IPython's extension as a kernel does, with a `%store` that several ranks may use at once.

    Args:
        shell: The rank's shell.
        is_first: Whether the rank is the first of those that run the cell.
    """
    manager: Any = shell.extension_manager
    manager.load_extension("storemagic")
    original: Callable[[str], Any] = shell.magics_manager.magics["line"]["store"]

    def store(line: str = "") -> Any:
        _use_the_notebooks(shell)
        words = line.split()
        if not words or words[0] in _READS or is_first():
            return original(line)
        return None

    store.__doc__ = original.__doc__
    shell.register_magic_function(store, "line", "store")  # pyright: ignore[reportArgumentType]


def _use_the_notebooks(shell: Any) -> None:
    """Open the store in the notebook's directory: the shell was created in the zygote, which has another."""
    path = os.path.join(get_ipython_dir(), "profile_default", "db")
    if str(shell.db.root) != path:
        shell.db = type(shell.db)(path)
