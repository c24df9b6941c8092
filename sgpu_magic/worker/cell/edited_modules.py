"""The user's modules on a session's rank: finds those that were edited since their import, and reloads them.

The user's modules are those in the kernel's working directory, or under an entry of its `sys.path` that is not part of
a Python installation. A file's time and size are recorded when Python reads them at import, so that an edit during a
cell counts.
"""

# autoreload has no types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
import types
from collections.abc import Iterable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from sgpu_magic.wire.run import RankContext
from sgpu_magic.worker.cell.shell import RankShell

_INSTALLED = tuple(
    os.path.abspath(path) + os.sep
    for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), Path(__file__).parents[2])
)
_SITE_DIRECTORY = re.compile("/(site|dist)-packages/")

Mark = tuple[float, int]
"""Modification time and size. A file whose mark differs from the recorded one was edited."""


def note_imports() -> None:
    """Record the mark of every source file that is imported from now on. Called once, in the zygote."""
    original = SourceFileLoader.path_stats

    def path_stats(self: SourceFileLoader, path: str) -> Any:
        stats = original(self, path)
        _noted[path] = (float(stats["mtime"]), int(stats["size"]))
        return stats

    SourceFileLoader.path_stats = path_stats


_noted: dict[str, Mark] = {}


def forget_installed() -> None:
    """Forget the marks of installed modules: the zygote has imported many, and none of them is the user's."""
    for path in [path for path in _noted if is_installed(os.path.abspath(path))]:
        del _noted[path]


class EditedModules:
    """Finds and reloads edited modules before each cell of a session.

    Args:
        shell: The rank's shell, whose namespace gets the new values of reloaded modules.
    """

    def __init__(self, shell: RankShell) -> None:
        self._shell = shell
        self._reported: dict[str, Mark | None] = {}
        self._own: dict[str, bool] = {}
        self._roots: tuple[tuple[str, ...], str] | None = None
        self._root_prefixes: tuple[str, ...] = ()
        # old functions and classes by module and name, for autoreload
        self._old_objects: dict[tuple[str, str], list[Any]] = {}

    def find(self, context: RankContext) -> dict[str, types.ModuleType]:
        """Return the edited modules by file. Takes 2 us for each of the user's modules."""
        edited = {path for path in self._own_files(context) if _mark(path) not in (_noted[path], None)}
        if not edited:
            return {}
        return {
            path: module
            for module in list(sys.modules.values())
            if isinstance(path := getattr(module, "__file__", None), str) and path in edited
        }

    def remark(self, edited: dict[str, types.ModuleType], context: RankContext, rank: int) -> str:
        """Return a remark for the user, "" if the same edits were reported before, or `%autoreload` reloads them."""
        if self._reloads_by_itself():
            return ""
        marks = {path: _mark(path) for path in edited}
        new = [path for path, mark in marks.items() if self._reported.get(path) != mark]
        if not new:
            return ""
        self._reported |= marks
        names = _list_names(_shown_path(path, context) for path in new)
        versions, them = ("an older version", "it") if len(new) == 1 else ("older versions", "them")
        return f"rank {rank} has {versions} of {names}, edited since: --reload reloads {them}."

    def reload(self, edited: dict[str, types.ModuleType], context: RankContext) -> str:
        """Reload the edited modules and return a remark for the user.

        Existing functions, classes and instances are updated in place (IPython's autoreload). Plain values that the
        notebook or other modules of the user have imported by name are replaced there.

        Raises:
            SyntaxError: A file does not compile; nothing was reloaded.
            Exception: A module raised it; that module stays as it was.
        """
        for path in edited:
            with open(path, "rb") as file:
                compile(file.read(), path, "exec")
        from IPython.extensions.autoreload import superreload

        files = ((module, getattr(module, "__file__", None)) for module in list(sys.modules.values()))
        own = [module for module, file in files if file is not None and self._own.get(file)]
        for path, module in _in_order(edited):
            before = dict(vars(module))
            # a cached file counts as current if the edit came within the same second and kept the size
            with contextlib.suppress(OSError, NotImplementedError):
                os.unlink(importlib.util.cache_from_source(path))
            try:
                superreload(module, importlib.reload, self._old_objects)
            except BaseException as error:
                # drop the import system's frames above the user's
                error.__traceback__ = _from_file(error.__traceback__, path)
                raise
            self._pass_values_on(module, before, own)
        return f"reloaded: {_list_names(_shown_path(path, context) for path in edited)}."

    # ------------------------------------------------------------ within

    def _reloads_by_itself(self) -> bool:
        """Whether a cell on this rank has turned on `%autoreload` for all modules."""
        magics: Any = self._shell.magics_manager.registry.get("AutoreloadMagics")
        reloader = getattr(magics, "_reloader", None)
        return bool(getattr(reloader, "enabled", False) and getattr(reloader, "check_all", False))

    def _own_files(self, context: RankContext) -> list[str]:
        key = (context.sys_path, context.cwd)
        if self._roots != key:
            self._roots, self._own = key, {}
            self._root_prefixes = tuple(_user_directories(context))
        for path in _noted.keys() - self._own.keys():
            absolute = os.path.abspath(path)
            self._own[path] = absolute.startswith(self._root_prefixes) and not is_installed(absolute)
        return [path for path, own in self._own.items() if own]

    def _pass_values_on(
        self, module: types.ModuleType, before: dict[str, Any], own: Sequence[types.ModuleType]
    ) -> None:
        """Replace values that were imported by name, where they are still the old ones."""
        namespaces: list[dict[str, Any]] = [self._shell.user_ns]
        namespaces += [vars(other) for other in own if other is not module and _imports_from(other, module.__name__)]
        for name, value in vars(module).items():
            old = before.get(name)
            if name.startswith("__") or old is None or old is value:
                continue
            for namespace in namespaces:
                if name in namespace and namespace[name] is old:
                    namespace[name] = value


def _from_file(traceback: types.TracebackType | None, path: str) -> types.TracebackType | None:
    entry = traceback
    while entry is not None and entry.tb_frame.f_code.co_filename != path:
        entry = entry.tb_next
    return entry or traceback


def _user_directories(context: RankContext) -> Iterable[str]:
    for entry in (context.cwd, *context.sys_path):
        directory = os.path.abspath(os.path.join(context.cwd or os.sep, entry))
        if not is_installed(directory + os.sep):
            yield directory.rstrip(os.sep) + os.sep


def is_installed(path: str) -> bool:
    """Whether a file, or a directory with a separator at its end, belongs to a Python installation."""
    return path.startswith(_INSTALLED) or _SITE_DIRECTORY.search(path) is not None


def _mark(path: str) -> Mark | None:
    try:
        stats = os.stat(path)
    except OSError:
        # missing, as for a moment while an editor saves
        return None
    return stats.st_mtime, stats.st_size


def _shown_path(path: str, context: RankContext) -> str:
    absolute = os.path.abspath(path)
    inside = context.cwd.rstrip(os.sep) + os.sep
    return absolute.removeprefix(inside) if context.cwd else absolute


def _list_names(names: Iterable[str]) -> str:
    *rest, last = sorted(names)
    return f"{', '.join(rest)} and {last}" if rest else last


def _in_order(edited: dict[str, types.ModuleType]) -> list[tuple[str, types.ModuleType]]:
    """Order the modules so that each comes after the edited modules that it imports."""
    names = {module.__name__: path for path, module in edited.items()}
    ordered: dict[str, None] = {}

    def visit(path: str, above: frozenset[str]) -> None:
        if path in ordered or path in above:
            return
        for needed in _imported(path, edited[path]):
            if needed in names:
                visit(names[needed], above | {path})
        ordered[path] = None

    for path in edited:
        visit(path, frozenset())
    return [(path, edited[path]) for path in ordered]


def _imported(path: str, module: types.ModuleType) -> set[str]:
    """Return all names of modules that the file may import."""
    found: set[str] = set()
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        for node in ast.walk(ast.parse(Path(path).read_bytes())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                with contextlib.suppress(ImportError, ValueError):
                    base = importlib.util.resolve_name(base, module.__package__ or "")
                found.add(base)
                found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def _imports_from(module: types.ModuleType, name: str) -> bool:
    path = getattr(module, "__file__", None)
    return isinstance(path, str) and name in _imported(path, module)
