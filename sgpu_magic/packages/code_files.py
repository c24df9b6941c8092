"""The code files below a directory, and archives of them.

Skips files that git ignores, caches and virtual environments.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import stat
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import msgspec

from sgpu_magic.files.disk_usage import used_entries
from sgpu_magic.files.file_state import FileState
from sgpu_magic.packages.distributions import contents_of
from sgpu_magic.wire.attachments import CodeBundle

if TYPE_CHECKING:
    import pathspec

    from sgpu_magic.packages.local_code import LocalCode

_SKIPPED_DIRECTORIES = frozenset({
    "__pycache__", ".git", ".hg", ".svn", ".bzr", ".ipynb_checkpoints", ".venv", ".tox", ".nox", ".mypy_cache",
    ".pytest_cache", ".ruff_cache", ".hypothesis", ".eggs", "node_modules", ".cache", ".Trash",
})  # fmt: skip
_SKIPPED_ENDS = (".pyc", ".pyo", "~", ".swp")
_SKIPPED_FILES = frozenset({".DS_Store", "Thumbs.db"})
_IGNORE_FILE = ".gitignore"
# the earliest time that a zip archive can store
_TIME = (1980, 1, 1, 0, 0, 0)
_CHUNK_BYTES = 1 << 20
# files of this size need a zip64 entry
_LARGE_BYTES = 1 << 31
# archives unused for this long are removed, and the oldest ones above this total size
_KEEP_S = 7 * 24 * 3600.0
_KEEP_BYTES = 1_000_000_000
_KEEP_AT_LEAST_S = 3600.0


class TreeFile(msgspec.Struct, frozen=True):
    """A file in a directory tree.

    Args:
        name: Path relative to the top of the tree, with `/` separators.
        path: Path on disk.
        state: Its state when it was found.
        executable: Whether the owner may execute it.
    """

    name: str
    path: str
    state: FileState
    executable: bool

    @property
    def size(self) -> int:
        return self.state.size


class Walk(msgspec.Struct):
    """What a walk reports besides the files.

    Args:
        unreadable: Unreadable paths and broken links.
        full: The walk stopped because it reached the maximum number of files.
    """

    unreadable: list[str]
    full: bool = False


def walk(
    top: str,
    names: Iterable[str],
    *,
    keep: frozenset[str] = frozenset(),
    most: int = 1_000_000,
    found: Walk | None = None,
) -> Iterator[TreeFile]:
    """Yield the files in some entries of a directory, in no particular order.

    Symbolic links are followed, cycles are not. Anything that is neither a file nor a directory is skipped.

    Args:
        top: The directory.
        names: Entries of the directory, files or directories. They are included even if git ignores them.
        keep: Paths of files to include even if git ignores them.
        most: Maximum number of files.
        found: Collects unreadable paths, and whether the walk stopped early.
    """
    notes = found if found is not None else Walk([])
    rules = _rules_above(top) + _rules_in(top, _IGNORE_FILE)
    files = (file for name in names for file in _walk(os.path.join(top, name), name, rules, keep, notes, frozenset()))
    yield from itertools.islice(files, most)
    notes.full = next(files, None) is not None


# ---------------------------------------------------------------- internals


class _Rules(NamedTuple):
    """The patterns of one ignore file, and its directory."""

    directory: str
    spec: pathspec.GitIgnoreSpec


def _walk(
    path: str, name: str, rules: list[_Rules], keep: frozenset[str], notes: Walk, parents: frozenset[tuple[int, int]]
) -> Iterator[TreeFile]:
    try:
        status = os.stat(path)
        is_file, is_folder = stat.S_ISREG(status.st_mode), stat.S_ISDIR(status.st_mode)
        entries = sorted(os.scandir(path), key=lambda entry: entry.name) if is_folder else []
    except OSError:
        # also a broken link, or a file that was just removed
        notes.unreadable.append(path)
        return
    if is_file and os.access(path, os.R_OK):
        yield TreeFile(name, path, FileState.from_stat(status), bool(status.st_mode & stat.S_IXUSR))
    elif is_file:
        notes.unreadable.append(path)
    identity = (status.st_dev, status.st_ino)
    # also a cycle, or a virtual environment under any name
    if not is_folder or identity in parents or (parents and any(entry.name == "pyvenv.cfg" for entry in entries)):
        return
    below = parents | {identity}
    # nearest last
    here = rules + _rules_in(path, _IGNORE_FILE)
    for entry in entries:
        is_directory = entry.is_dir()
        if _is_skipped(entry.name, is_directory=is_directory):
            continue
        child = f"{name}/{entry.name}"
        if not _is_ignored(entry.path, here, is_directory=is_directory):
            yield from _walk(entry.path, child, here, keep, notes, below)
        elif entry.path in keep or (is_directory and any(kept.startswith(entry.path + os.sep) for kept in keep)):
            # descend only for the files in `keep`
            yield from (file for file in _walk(entry.path, child, [], keep, notes, below) if file.path in keep)


def _is_skipped(name: str, *, is_directory: bool) -> bool:
    if is_directory:
        return name in _SKIPPED_DIRECTORIES or name.endswith(".egg-info")
    return name in _SKIPPED_FILES or name.endswith(_SKIPPED_ENDS)


def _is_ignored(path: str, rules: list[_Rules], *, is_directory: bool) -> bool:
    for directory, spec in reversed(rules):
        relative = os.path.relpath(path, directory).replace(os.sep, "/")
        # None if no pattern matches
        ignored = spec.check_file(f"{relative}/" if is_directory else relative).include
        if ignored is not None:
            return ignored
    return False


def _rules_above(top: str) -> list[_Rules]:
    """Return the rules of the repository that `top` is in, from its top down to the parent of `top`."""
    directories = [Path(top), *Path(top).parents]
    depth = next((at for at, directory in enumerate(directories) if (directory / ".git").exists()), None)
    if depth is None:
        return []
    rules = _rules_in(str(directories[depth]), os.path.join(".git", "info", "exclude"))
    for directory in reversed(directories[1 : depth + 1]):
        rules += _rules_in(str(directory), _IGNORE_FILE)
    return rules


def _rules_in(directory: str, file: str) -> list[_Rules]:
    """Return the rules in an ignore file; none if there is no such file."""
    lines = contents_of(os.path.join(directory, file)).decode(errors="replace").splitlines()
    if not lines:
        return []
    import pathspec

    return [_Rules(directory, pathspec.GitIgnoreSpec.from_lines(lines))]


# ---------------------------------------------------------------- archives


def archive_entry(name: str, *, executable: bool = False, compression: int = zipfile.ZIP_DEFLATED) -> zipfile.ZipInfo:
    """Return an entry of a zip archive whose bytes depend only on what is in it, not on dates or owners."""
    entry = zipfile.ZipInfo(name, _TIME)
    entry.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
    entry.compress_type = compression
    entry.create_system = 3
    return entry


class Bundles:
    """Archives of local code, cached on disk. Equal contents give equal bytes.

    Args:
        folder: Where the archives are stored, named by digest.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # by `sys.path` entry: the files when the archive was made, unless one had changed just before
        self._made: dict[str, tuple[list[TreeFile], CodeBundle]] = {}

    def bundle(self, code: LocalCode) -> CodeBundle:
        """Return the archive of one `sys.path` entry's code. Reuses the last one if no file has changed.

        Raises:
            OSError: The archive can't be written.
        """
        files = sorted(code.files, key=lambda file: file.name)
        known, made = self._made.get(code.entry, (None, None))
        if made is None or known != files or not _touched(made.path):
            began = time.time_ns()
            made = self._make(code.entry, files)
            if all(file.state.is_settled(began) for file in files):
                self._made[code.entry] = files, made
        return made

    def _make(self, entry: str, files: Iterable[TreeFile]) -> CodeBundle:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".part", dir=self._folder)
        try:
            with open(descriptor, "w+b") as archive:
                _write(archive, files)
                archive.seek(0)
                digest = hashlib.file_digest(archive, "sha256").hexdigest()
                size = archive.tell()
            path = self._folder / f"{digest}.zip"
            os.replace(temporary, path)
        finally:
            # no longer there on success
            Path(temporary).unlink(missing_ok=True)
        self._tidy(keep=path)
        return CodeBundle(entry=entry, sha256=digest, size=size, path=str(path))

    def _tidy(self, keep: Path) -> None:
        now = time.time()
        kept = used_entries(self._folder)
        total = sum(size for _, size, _ in kept)
        for mtime, size, path in sorted(kept):
            is_old = now - mtime > _KEEP_S or total > _KEEP_BYTES
            if path != keep and is_old and now - mtime > _KEEP_AT_LEAST_S:
                path.unlink(missing_ok=True)
                total -= size


def _write(archive: IO[bytes], files: Iterable[TreeFile]) -> None:
    """Write the files uncompressed: zlib builds compress equal contents to different bytes."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as target:
        for file in files:
            info = archive_entry(file.name, executable=file.executable, compression=zipfile.ZIP_STORED)
            # a file removed since the walk counts as removed before this run
            with (
                contextlib.suppress(FileNotFoundError),
                open(file.path, "rb") as source,
                target.open(info, "w", force_zip64=file.size >= _LARGE_BYTES) as member,
            ):
                shutil.copyfileobj(source, member, _CHUNK_BYTES)


def _touched(path: str) -> bool:
    """Mark the archive as used now. Returns False if it no longer exists."""
    with contextlib.suppress(OSError):
        os.utime(path)
        return True
    return False
