"""The extension for notebooks that were written in Databricks: `%load_ext sgpu_magic.compat`.

It loads `sgpu_magic`, and gives the notebook what it has there without defining it: `dbutils`, `displayHTML`, `spark`,
`%restart_python`, `%fs`, and `%sh`, `%md`, `%python`, `%sql` with one percent sign. Names that the notebook has already
are left alone. `sgpu run` loads it by itself for notebooks that use one of these names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import ExitStack

# by shell id: callbacks that undo the loading
_loaded: dict[int, ExitStack] = {}


def load_ipython_extension(ipython: Any) -> None:
    """Put the names and magics into the notebook (`%load_ext sgpu_magic.compat`)."""
    from sgpu_magic.functions.compat.notebook import names

    ipython.extension_manager.load_extension("sgpu_magic")
    if id(ipython) not in _loaded:
        _loaded[id(ipython)] = names.install(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Remove them again (`%unload_ext sgpu_magic.compat`); `sgpu_magic` stays loaded."""
    undo = _loaded.pop(id(ipython), None)
    if undo is not None:
        undo.close()
