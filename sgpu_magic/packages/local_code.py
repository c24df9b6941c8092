"""Which of the user's own modules a run needs: those already imported, and those that its code imports.

A module is the user's own if it is in the notebook's folder, or below an entry of `sys.path` that does not belong to a
Python installation. Packages are included whole, with their data files, and so are the modules they import.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
import site
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from types import ModuleType
from typing import cast

import msgspec

from sgpu_magic.errors import SerializationError
from sgpu_magic.files.file_state import ByFile
from sgpu_magic.formatting import format_bytes, names_text
from sgpu_magic.packages.code_files import TreeFile, Walk, walk
from sgpu_magic.packages.distributions import contents_of
from sgpu_magic.packages.snapshot import current_directory

# never sent: the node has it
_OWN_PACKAGE = "sgpu_magic"
_IMPORT_LINE = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import\b|import[ \t]+([\w., \t]+))")
_IMPORT_CALL = re.compile(r"\b(?:import_module|__import__)\(\s*[\"']([\w][\w.]*)")
_IMPORTERS = frozenset({"import_module", "__import__"})
# a tree with more files is probably a mistake and is refused
MOST_FILES = 20_000
_NAMED = 5


class LocalCode(msgspec.Struct):
    """The user's own modules under one entry of `sys.path`.

    Args:
        entry: The entry as written on `sys.path`.
        names: Entries of the directory: packages and single modules.
        modules: Names of the top-level modules.
        files: All files.
        walked: What the walk left out.
    """

    entry: str
    names: list[str] = msgspec.field(default_factory=list[str])
    modules: set[str] = msgspec.field(default_factory=set[str])
    files: list[TreeFile] = msgspec.field(default_factory=list[TreeFile])
    walked: Walk = msgspec.field(default_factory=lambda: Walk([]))


def find_local_code(
    path: Sequence[str], sources: Iterable[str], *, projects: Iterable[str] = (), cwd: str = ""
) -> list[LocalCode]:
    """Return the user's own modules, one `LocalCode` for each entry of `path` that has some.

    Args:
        path: The kernel's `sys.path`, with "" replaced by the working directory.
        sources: Code whose imports count: the cell, and the cells that define the functions sent with it.
        projects: Directories to leave out: projects that are sent as wheels.
        cwd: The kernel's working directory; default: this process's.
    """
    search = _Search(
        path, tuple(os.path.realpath(each) + os.sep for each in projects), cwd or current_directory() or os.sep
    )
    search.take_imported(sys.modules)
    waiting = [name for source in sources for name in imports_of(source)]
    while True:
        for name in waiting:
            search.take_named(name)
        waiting = search.imports_of_new()
        if not waiting:
            return search.find()


def imports_of(source: str) -> set[str]:
    """Return the top-level names of the absolute imports in a piece of code, which may contain magics."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        # a cell with magics
        return _imports_in_text(source)
    return _imports_in(tree)


# ---------------------------------------------------------------- internals


class _Search:
    def __init__(self, path: Sequence[str], projects: tuple[str, ...], cwd: str) -> None:
        installed = set(installed_entries(tuple(path)))
        self._path = [entry for entry in path if os.path.isdir(entry)]
        self._projects = projects
        self._cwd = cwd
        # by absolute directory; if `sys.path` has several spellings, the first is kept
        self._by_directory: dict[str, LocalCode] = {}
        for entry in self._path:
            if entry not in installed:
                self._by_directory.setdefault(os.path.abspath(os.path.join(cwd, entry)), LocalCode(entry))
        self._seen: set[str] = {_OWN_PACKAGE, "__main__", "__mp_main__"}
        self._unread: list[TreeFile] = []
        self._imported_files: list[str] = []

    def take_imported(self, modules: Mapping[str, ModuleType]) -> None:
        """Add the modules already imported. Their files are included even if git ignores them."""
        tops: list[tuple[str, str | None, list[str]]] = []
        for name, module in list(modules.items()):
            top, _, rest = name.partition(".")
            if top in sys.stdlib_module_names or top == _OWN_PACKAGE:
                continue
            attributes = _attributes_of(module)
            file = attributes.get("__file__")
            file = file if isinstance(file, str) else None
            if file is not None:
                self._imported_files.append(file)
            if not rest and top not in self._seen:
                self._seen.add(top)
                tops.append((top, file, _list_names(attributes.get("__path__"))))
        for each in tops:
            self._add(*each)

    def take_named(self, name: str) -> None:
        """Find a top-level module as Python would, and add it."""
        if name in self._seen or name in sys.stdlib_module_names:
            return
        self._seen.add(name)
        spec = PathFinder.find_spec(name, self._path)
        if spec is not None:
            self._add(name, spec.origin if spec.has_location else None, list(spec.submodule_search_locations or ()))

    def imports_of_new(self) -> list[str]:
        """Return the names imported by the code found since the last call."""
        unread, self._unread = self._unread, []
        names: set[str] = set()
        for file in unread:
            if file.name.endswith(".py"):
                names |= _imports_of_file(file.path, file.state)
        return sorted(names - self._seen)

    def find(self) -> list[LocalCode]:
        return [code for code in self._by_directory.values() if code.files]

    def _add(self, name: str, file: str | None, paths: Sequence[str]) -> None:
        """Add a top-level module: a file, a package's directory, or the directories of a namespace package."""
        if file is not None:
            is_package = os.path.basename(file).partition(".")[0] == "__init__"
            paths = [os.path.dirname(file) if is_package else file]
        for path in paths:
            directory, entry = os.path.split(os.path.abspath(os.path.join(self._cwd, path)))
            code = self._by_directory.get(directory)
            if code is None or entry in code.names or os.path.realpath(path).startswith(self._projects):
                continue
            code.names.append(entry)
            code.modules.add(name)
            # `check_size` refuses code with too many files
            if not code.walked.full:
                top = os.path.join(directory, entry)
                kept = frozenset(imported for imported in self._imported_files if imported.startswith(top))
                most = MOST_FILES - len(code.files)
                new = list(walk(directory, [entry], keep=kept, most=most, found=code.walked))
                code.files += new
                self._unread += [] if code.walked.full else new


def _attributes_of(module: object) -> dict[str, object]:
    """Return a module's attributes without `getattr`, which could trigger the import of a lazy module."""
    try:
        return object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}


def _list_names(paths: object) -> list[str]:
    # not a path, or a namespace package whose parent is gone
    with contextlib.suppress(TypeError, KeyError):
        return [str(path) for path in cast("Iterable[object]", paths)]
    return []


def _imports_in_text(text: str) -> set[str]:
    """Find imports line by line, for text that does not parse."""
    found: set[str] = set()
    if any(f"{name}(" in text for name in _IMPORTERS):
        found.update(name.partition(".")[0] for name in _IMPORT_CALL.findall(text))
    for line in text.split("\n"):
        match = _IMPORT_LINE.match(line) if "import" in line else None
        if match is not None:
            names = match[1] or match[2]
            found.update(name.strip().partition(".")[0].split(" ")[0] for name in names.split(","))
    return found - {""}


def _imports_in(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found.update(alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module.partition(".")[0])
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(value=str(name))]):
                if called in _IMPORTERS and not name.startswith("."):
                    found.add(name.partition(".")[0])
            case _:
                pass
    return found


def _imports_in_file(path: str) -> frozenset[str]:
    # a large package has thousands of files: parsing takes 20 times as long, and a superfluous name is harmless
    return frozenset(_imports_in_text(contents_of(path).decode(errors="replace")))


_imports_of_file = ByFile(_imports_in_file)


# ---------------------------------------------------------------- size limit


def check_size(codes: Sequence[LocalCode], *, warn_bytes: int, limit_bytes: int) -> tuple[str, ...]:
    """Return notes about local code that is large or has unreadable files.

    Args:
        codes: All local code sent with the run.
        warn_bytes: Total size above which a note names the largest files.
        limit_bytes: Maximum total size.

    Raises:
        SerializationError: The code is too large, or has too many files.
    """
    for code in codes:
        if code.walked.full:
            raise SerializationError(
                f"the local code under {code.entry} can't be sent to the ranks: it has more than {MOST_FILES:,} files, "
                f"most of them in {_fullest(code.files)}. List what the code does not need in a .gitignore, or move "
                "it out of the folder."
            )
    files = [file for code in codes for file in code.files]
    total = sum(file.size for file in files)
    if total > limit_bytes:
        raise SerializationError(
            f"the notebook's local code is {format_bytes(total)} and can't be sent to the ranks: the limit is "
            f"{format_bytes(limit_bytes)}. The largest files: {_largest(files)}. List what the code does not need in a "
            ".gitignore, put data where the ranks can read it, or raise the setting code_limit_bytes."
        )
    notes: list[str] = []
    if total > warn_bytes:
        notes.append(
            f"{format_bytes(total)} of local code are sent with the run; the largest files: {_largest(files)}. What a "
            ".gitignore lists is not sent"
        )
    unreadable = [path for code in codes for path in code.walked.unreadable]
    if unreadable:
        notes.append(f"local files that can't be read were not sent: {names_text(unreadable, _NAMED)}")
    return tuple(notes)


def _largest(files: Iterable[TreeFile]) -> str:
    largest = sorted(files, key=lambda file: file.size, reverse=True)[:_NAMED]
    return ", ".join(f"{file.path} ({format_bytes(file.size)})" for file in largest)


def _fullest(files: Iterable[TreeFile]) -> str:
    counts = Counter(os.path.dirname(file.path) for file in files)
    return ", ".join(directory for directory, _ in counts.most_common(3))


# ---------------------------------------------------------------- entries of `sys.path` that belong to Python


@functools.lru_cache(maxsize=16)
def installed_entries(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the entries that are the standard library's or site directories. Takes 2 us when cached."""
    return tuple(entry for entry in path if _is_installed(os.path.abspath(entry)))


def _is_installed(path: str) -> bool:
    # also those of another environment, added by a `.pth` file of this one
    return os.path.basename(path) in ("site-packages", "dist-packages") or f"{path}{os.sep}".startswith(_directories())


@functools.cache
def _directories() -> tuple[str, ...]:
    # where apt installs packages for Debian's Python
    found = {"/usr/lib/python3/dist-packages"}
    found |= {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {*site.getsitepackages(), site.getusersitepackages()}
    archive = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    for prefix in (sys.base_prefix, sys.base_exec_prefix, sys.prefix):
        found |= {os.path.join(prefix, sys.platlibdir, archive), os.path.join(prefix, "lib", archive)}
    return tuple(os.path.abspath(path) + os.sep for path in found if path)
