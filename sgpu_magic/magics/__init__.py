"""The magics: `%%distributed`, `%sgpu_connect` and others. They parse, submit and show; the work is in `runs`.

extension       the extension as a whole: all magics, hooks and the panel's endpoint, registered with a shell
run_magics      magics that run cells and inspect runs
session_magics  magics for sessions, and `%sgpu_env` for packages
cell_values     values of distributed cells below their own cells
rank_errors     errors of ranks that IPython itself renders
warm_pool       keeps ranks warm while the notebook is in use
rebind_tracker  names that plain cells rebind while sessions are connected
auto_mode       `%sgpu_auto`: cells that run on the pool without a magic
unknown_magics  a suggestion for a magic that does not exist
completion      completion of options, types and runs; completion and `obj?` answered by a rank
"""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from sgpu_magic.config import load_settings
from sgpu_magic.errors import SgpuError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

NAMES = {
    "line": (
        "sgpu_attach", "sgpu_auto", "sgpu_connect", "sgpu_detach", "sgpu_disconnect", "sgpu_env", "sgpu_help",
        "sgpu_pull", "sgpu_push", "sgpu_replay", "sgpu_restart", "sgpu_stacks", "sgpu_status", "sgpu_who",
    ),
    "cell": ("distributed", "rank", "ray_launch", "sgpu_auto_cell"),
}  # fmt: skip
"""Names of all magics, by kind."""

# the reply of the cell with %load_ext is sent by then
_LATER_S = 0.05

# by shell id: extensions that are not loaded yet
_deferred: dict[int, DeferredExtension] = {}


def load(shell: InteractiveShell) -> None:
    """Load the extension.

    A kernel gets the magics' names at once, and the rest after the cell, before the next one, or when a magic is
    called: the imports take a tenth of a second, which no cell should wait for.

    Raises:
        UsageError: The settings can't be read. Then nothing is registered.
    """
    load_settings()
    loop = _loop_of_cells(shell)
    if id(shell) in _deferred:
        _deferred[id(shell)].complete()
    elif loop is None or "sgpu_magic.magics.extension" in sys.modules:
        _load_whole(shell)
    else:
        _deferred[id(shell)] = DeferredExtension(shell, loop)


def unload(shell: InteractiveShell) -> None:
    """Unregister the magics, end the sessions and close the links; the local pool keeps running for other clients."""
    if id(shell) in _deferred:
        _deferred[id(shell)].cancel()
        return
    from sgpu_magic.magics import extension

    extension.unload(shell)


class DeferredExtension:
    """The extension before it is loaded: each of its magics loads it.

    Args:
        shell: A kernel's shell.
        loop: The loop that runs its cells.
    """

    def __init__(self, shell: InteractiveShell, loop: asyncio.AbstractEventLoop) -> None:
        self._shell = shell
        self._magics: dict[str, dict[str, Any]] = shell.magics_manager.magics
        for kind, names in NAMES.items():
            # in the table itself: registering would make the functions attributes too
            self._magics[kind].update({name: partial(self._call, kind, name) for name in names})
        self._later = loop.call_later(_LATER_S, self._unasked)
        shell.events.register("pre_execute", self._unasked)

    def complete(self) -> None:
        """Load the extension in place of this object."""
        self._unhook()
        _load_whole(self._shell)
        _deferred.pop(id(self._shell), None)

    def cancel(self) -> None:
        """Remove the magics."""
        self._unhook()
        _deferred.pop(id(self._shell), None)
        for kind, names in NAMES.items():
            for name in names:
                self._magics[kind].pop(name, None)

    def _unhook(self) -> None:
        self._later.cancel()
        # it is unhooked already if loading failed before
        with contextlib.suppress(ValueError):
            self._shell.events.unregister("pre_execute", self._unasked)

    def _unasked(self) -> None:
        # on failure these deferred magics stay registered and raise the error when they are used
        with contextlib.suppress(SgpuError):
            self.complete()

    def _call(self, kind: str, name: str, *given: str) -> object:
        self.complete()
        return self._magics[kind][name](*given)


def _loop_of_cells(shell: InteractiveShell) -> asyncio.AbstractEventLoop | None:
    if getattr(shell, "kernel", None) is None or threading.current_thread() is not threading.main_thread():
        return None
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        # loaded by the kernel's configuration, before its first cell
        return None


def _load_whole(shell: InteractiveShell) -> None:
    # objects made by imports stay alive: scanning them repeatedly took a sixth of the loading time
    collects = gc.isenabled()
    gc.disable()
    try:
        from sgpu_magic.magics import extension

        extension.load(shell)
    finally:
        if collects:
            gc.enable()
