"""`%%distributed`, `%sgpu_status` and their like: parse, submit, show; nothing else.

arguments    the magic's options
cell         a cell and its options -> what is submitted
distributed  the magics
follow       a run's events, to its end
outcome      a run that has ended -> names, result or exception
restarts     detaches runs when their kernel is restarted
notices      what the pool wants to be known
warmth       keeps ranks at hand while cells run
completion   options and types in the front end's completer
"""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from IPython.core.inputtransformer2 import cell_magic
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
    cleanup = shell.input_transformers_cleanup
    cleanup.insert(cleanup.index(cell_magic) if cell_magic in cleanup else 0, _help_without_body)
    shell.events.register("post_run_cell", magics.warmth.after_cell)
    _loaded[id(shell)] = magics
    magics.pool.warm_in_background()


def _help_without_body(lines: list[str]) -> list[str]:
    """Give `%%distributed -h` a body: IPython refuses a cell magic without one before the magic is asked."""
    asks = lines and lines[0].startswith("%%distributed") and {"-h", "--help"} & set(lines[0].split())
    if asks and not any(line.strip() for line in lines[1:]):
        return [lines[0].rstrip("\n") + "\n", "pass\n"]
    return lines


def unload(shell: InteractiveShell) -> None:
    """Take the magics away and close the link to the pool; the pool goes on for others."""
    magics = _loaded.pop(id(shell), None)
    if magics is None:
        return
    completion.remove(shell)
    shell.events.unregister("post_run_cell", magics.warmth.after_cell)
    if _help_without_body in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.remove(_help_without_body)
    for kind, names in DistributedMagics.magics.items():
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)
    magics.close()
