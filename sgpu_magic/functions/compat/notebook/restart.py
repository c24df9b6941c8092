"""`dbutils.library.restartPython()` and `%restart_python`, in a kernel that goes on.

The user's variables are removed, and modules whose distribution was replaced since the extension was loaded are
imported anew by the next import. Compiled modules can't be imported twice in a process: for these the kernel has to be
restarted.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import PurePosixPath
from types import ModuleType
from typing import Any

from sgpu_magic.functions.compat.notebook.dbutils import Utility
from sgpu_magic.packages.distributions import Distribution, Snapshot
from sgpu_magic.packages.snapshot import Change, changes, take_snapshot, versions
from sgpu_magic.payload.namespace import is_ipythons

# the kernel itself runs on these
_KERNELS_OWN = frozenset((
    "anywidget", "comm", "ipykernel", "ipython", "ipywidgets", "jupyter-client", "jupyter-core", "msgspec", "packaging",
    "platformdirs", "psutil", "pyzmq", "sgpu-magic", "tornado", "traitlets",
))  # fmt: skip
_COMPILED = tuple(EXTENSION_SUFFIXES)


class Library(Utility):
    """Python's packages.

    Args:
        shell: The notebook's shell.
        keep: Names of the namespace that stay.
    """

    path = "dbutils.library"

    def __init__(self, shell: Any, keep: Collection[str]) -> None:
        self._shell = shell
        self._keep = keep
        self._installed = take_snapshot()

    def restartPython(self) -> None:
        """Remove all variables, and take new versions of packages with the next import. The kernel goes on."""
        _forget_variables(self._shell, self._keep)
        before, self._installed = self._installed, take_snapshot()
        for sentence in forget_replaced(before, self._installed, sys.modules):
            print(f"sgpu: {sentence}")  # noqa: T201


def _forget_variables(shell: Any, keep: Collection[str]) -> None:
    namespace: dict[str, object] = shell.user_ns
    # names that IPython and its extensions have put there
    hidden: dict[str, object] = shell.user_ns_hidden
    for name, value in list(namespace.items()):
        is_users = name not in hidden or hidden[name] is not value
        if is_users and name not in keep and not is_ipythons(name, value):
            namespace.pop(name, None)
    hook = shell.displayhook
    if getattr(hook, "do_full_cache", False):
        # values in Out would keep memory of devices
        hook.flush()
    gc.collect()


def forget_replaced(before: Snapshot, now: Snapshot, modules: dict[str, ModuleType]) -> list[str]:
    """Remove the loaded modules of distributions whose version has changed, so that they are imported anew.

    Args:
        before: The distributions when this process loaded its modules.
        now: The distributions that are installed now.
        modules: Loaded modules, as in `sys.modules`.

    Returns:
        A sentence for each distribution whose modules have to stay until the kernel is restarted.
    """
    stay: list[str] = []
    importlib.invalidate_caches()
    for change in changes(versions(before), versions(now)):
        found = now.get(change.name) or before.get(change.name)
        if found is None:
            continue
        loaded = list(_loaded(_tops(found), modules))
        if not loaded or _is_loaded_already(found, change, modules):
            continue
        if change.name in _KERNELS_OWN or any(_is_compiled(modules[name]) for name in loaded):
            stay.append(f"restart the kernel to use the change of {change.words}: compiled code of it is loaded.")
            continue
        for name in loaded:
            modules.pop(name, None)
    return stay


def _is_loaded_already(found: Distribution, change: Change, modules: Mapping[str, ModuleType]) -> bool:
    """Whether the version that is loaded is the installed one, as of a package that was imported after its change."""
    if not change.now:
        return False
    for name in found.module_names:
        version = vars(modules[name]).get("__version__") if name in modules else None
        if isinstance(version, str):
            return version == change.now
    # installed since, and so imported since
    return not change.before and any(_is_compiled(modules[name]) for name in _loaded(_tops(found), modules))


def _loaded(tops: Collection[str], modules: Mapping[str, ModuleType]) -> Iterator[str]:
    starts = tuple(f"{name}." for name in tops)
    for name in list(modules):
        if name in tops or name.startswith(starts):
            yield name


def _is_compiled(module: object) -> bool:
    file: object = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return isinstance(file, str) and file.endswith(_COMPILED)


def _tops(found: Distribution) -> frozenset[str]:
    """Return the modules of a distribution. Of a namespace package, only the modules in it that are its own."""
    try:
        files = importlib.metadata.Distribution.at(found.location).files or []
    except OSError:
        files = []
    paths = [PurePosixPath(each).parts for each in files if each.suffix in (".py", ".so")]
    packages = {parts[0] for parts in paths if len(parts) == 2 and parts[1] == "__init__.py"}
    tops: set[str] = set()
    for parts in paths:
        names = (*parts[:-1], parts[-1].partition(".")[0])
        if not all(name.isidentifier() for name in names[:2]):
            continue
        tops.add(names[0] if len(names) == 1 or names[0] in packages else ".".join(names[:2]))
    return frozenset(tops) or frozenset(found.module_names)
