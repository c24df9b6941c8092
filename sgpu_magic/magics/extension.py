"""The extension as a whole: the magics, the hooks around plain cells, completion and the panel's endpoint."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from contextlib import ExitStack

from IPython.core.inputtransformer2 import cell_magic
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics

from sgpu_magic.magics import completion
from sgpu_magic.magics.auto_mode import AutoMode
from sgpu_magic.magics.cell_values import show_values_as_usual, show_values_once
from sgpu_magic.magics.completion import RankQuestions
from sgpu_magic.magics.rank_errors import draw_no_rank_errors, draw_rank_errors
from sgpu_magic.magics.rebind_tracker import RebindTracker
from sgpu_magic.magics.run_magics import DistributedMagics
from sgpu_magic.magics.session_magics import SessionMagics
from sgpu_magic.magics.unknown_magics import UnknownMagics
from sgpu_magic.panel.kernel_endpoint import KernelEndpoint
from sgpu_magic.runs import packages
from sgpu_magic.runs.submit import target

_OURS = ("%%distributed", "%%rank", "%%ray_launch")


# by the shell's id: callbacks that undo the loading
_loaded: dict[int, ExitStack] = {}


def load(shell: InteractiveShell) -> None:
    """Register the magics and start the pool and a zygote in the background."""
    if id(shell) in _loaded:
        return
    undo = ExitStack()
    cleanup = shell.input_transformers_cleanup
    cleanup.insert(cleanup.index(cell_magic) if cell_magic in cleanup else 0, _help_without_body)
    undo.callback(lambda: _help_without_body in cleanup and cleanup.remove(_help_without_body))
    auto = AutoMode(shell)
    magics = DistributedMagics(shell, auto)
    undo.callback(magics.close)
    endpoint = KernelEndpoint(magics.context)
    undo.callback(endpoint.close)
    own = (magics, SessionMagics(shell, auto, endpoint))
    for each in own:
        shell.register_magics(each)
        undo.callback(_unregister, shell, each)
    draw_rank_errors(shell)
    undo.callback(draw_no_rank_errors, shell)
    show_values_once(shell)
    undo.callback(show_values_as_usual, shell)
    assignments = RebindTracker(shell, auto)
    for event, call in (
        ("pre_run_cell", assignments.before_cell),
        ("post_run_cell", assignments.after_cell),
        ("post_run_cell", magics.warmth.after_cell),
        ("post_run_cell", UnknownMagics(shell, own).after_cell),
    ):
        shell.events.register(event, call)
        undo.callback(shell.events.unregister, event, call)
    # before the sessions end, so that no message says that %sgpu_auto is off
    undo.callback(auto.remove)
    kernel = getattr(shell, "kernel", None)
    if hasattr(kernel, "do_inspect"):
        undo.callback(RankQuestions(kernel, auto).remove)
    completion.install(shell)
    undo.callback(completion.remove, shell)
    _loaded[id(shell)] = undo
    if target.pool_name(magics.context) == magics.pool.name:
        # not needed if runs go to another pool by default
        magics.pool.warm_in_background()
    packages.packages_of(magics.pool).begin()


def unload(shell: InteractiveShell) -> None:
    """Unregister the magics, end the sessions and close the links; the local pool keeps running for other clients."""
    undo = _loaded.pop(id(shell), None)
    if undo is not None:
        undo.close()


def _unregister(shell: InteractiveShell, owner: Magics) -> None:
    for kind, names in owner.magics.items():
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)


def _help_without_body(lines: list[str]) -> list[str]:
    """Add a body to `%%distributed -h`: IPython rejects a cell magic without one before calling it.

    Also separate `%%rank[0]` into name and ranks: IPython would take the brackets for a part of the magic's name.
    """
    if lines and lines[0].startswith("%%rank["):
        lines = [lines[0].replace("%%rank[", "%%rank [", 1), *lines[1:]]
    asks = lines and lines[0].startswith(_OURS) and {"-h", "--help"} & set(lines[0].split())
    if asks and not any(line.strip() for line in lines[1:]):
        return [lines[0].rstrip("\n") + "\n", "pass\n"]
    return lines
