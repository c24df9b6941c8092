"""`%%distributed` and `%sgpu_status`: parse, submit, show; nothing else.

    arguments    the magic's options
    cell         a cell and its options -> what is submitted
    distributed  submit, follow, bring back
    completion   options and types in the front end's completer
"""

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell

from sgpu_magic.magics import completion
from sgpu_magic.magics.distributed import DistributedMagics

_loaded: dict[int, DistributedMagics] = {}


def load(shell: InteractiveShell) -> None:
    """Register the magics and warm the pool in the background."""
    if id(shell) in _loaded:
        return
    magics = DistributedMagics(shell)
    shell.register_magics(magics)
    completion.install(shell)
    _loaded[id(shell)] = magics
    magics.pool.warm_in_background()


def unload(shell: InteractiveShell) -> None:
    """Take the magics away and close the link to the pool; the pool goes on for others."""
    magics = _loaded.pop(id(shell), None)
    if magics is None:
        return
    completion.remove(shell)
    for kind, name in (("cell", "distributed"), ("line", "sgpu_status")):
        shell.magics_manager.magics[kind].pop(name, None)
    magics.pool.close()
