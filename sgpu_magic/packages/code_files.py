"""The files below a directory that belong to its code, and archives of them.

What git would ignore, caches and environments are left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

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


class TreeFile(msgspec.Struct, frozen=True):
    """A file of a tree.

    Args:
        name: Relative to the tree's top, with `/`.
        path: Where it is.
        size: In bytes.
        mtime_ns: Its time of change.
        executable: Its owner may execute it.
    """

    name: str
    path: str
    size: int
    mtime_ns: int
    executable: bool


class Walk(msgspec.Struct):
    """What a walk found beside the files.

    Args:
        unreadable: Paths that could not be read, or lead nowhere.
        full: It stopped, because there were more files than were asked for.
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
    """Yield the files of some entries of a directory, in no particular order.

    Links are followed, but never round in a circle. What is neither file nor directory is left out.

    Args:
        top: The directory.
        names: Entries of it, files or directories. They count even where they are ignored themselves.
        keep: Paths of files that count although they are ignored.
        most: Stops after so many files.
        found: Takes what else there was.
    """
    notes = found if found is not None else Walk([])
    rules = _with_those_in(top, list(_rules_above(top)))
    count = 0
    for name in names:
        for file in _walk(os.path.join(top, name), name, rules, keep, notes, frozenset()):
            if count == most:
                notes.full = True
                return
            count += 1
            yield file


# ---------------------------------------------------------------- within


class _Rules:
    """The patterns of one file."""

    def __init__(self, directory: str, spec: pathspec.GitIgnoreSpec) -> None:
        self._directory = directory
        self._spec = spec

    def decide(self, path: str, *, is_directory: bool) -> bool | None:
        """True ignores it, False says that it is not ignored, None says nothing of it."""
        relative = os.path.relpath(path, self._directory).replace(os.sep, "/")
        return self._spec.check_file(f"{relative}/" if is_directory else relative).include


def _walk(
    path: str,
    name: str,
    rules: list[_Rules],
    keep: frozenset[str],
    notes: Walk,
    parents: frozenset[tuple[int, int]],
) -> Iterator[TreeFile]:
    try:
        status = os.stat(path)
    except OSError:
        # a link that leads nowhere, or what has just been removed
        notes.unreadable.append(path)
        return
    if stat.S_ISREG(status.st_mode):
        if os.access(path, os.R_OK):
            executable = bool(status.st_mode & stat.S_IXUSR)
            yield TreeFile(name, path, status.st_size, status.st_mtime_ns, executable)
        else:
            notes.unreadable.append(path)
        return
    if not stat.S_ISDIR(status.st_mode):
        return
    identity = (status.st_dev, status.st_ino)
    if identity in parents:
        return
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except OSError:
        notes.unreadable.append(path)
        return
    if parents and any(entry.name == "pyvenv.cfg" for entry in entries):
        # an environment, whatever it is called
        return
    below = parents | {identity}
    here = _with_those_in(path, rules)
    for entry in entries:
        is_directory = entry.is_dir()
        if _is_skipped(entry.name, is_directory=is_directory):
            continue
        place = f"{name}/{entry.name}"
        if not _is_ignored(entry.path, here, is_directory=is_directory):
            yield from _walk(entry.path, place, here, keep, notes, below)
        elif entry.path in keep or (is_directory and any(kept.startswith(entry.path + os.sep) for kept in keep)):
            # only for the sake of what is kept there
            yield from (file for file in _walk(entry.path, place, [], keep, notes, below) if file.path in keep)


def _is_skipped(name: str, *, is_directory: bool) -> bool:
    if is_directory:
        return name in _SKIPPED_DIRECTORIES or name.endswith(".egg-info")
    return name in _SKIPPED_FILES or name.endswith(_SKIPPED_ENDS)


def _is_ignored(path: str, rules: list[_Rules], *, is_directory: bool) -> bool:
    for each in reversed(rules):
        decided = each.decide(path, is_directory=is_directory)
        if decided is not None:
            return decided
    return False


def _with_those_in(directory: str, inherited: list[_Rules]) -> list[_Rules]:
    """The rules for the entries of `directory`, the nearest last."""
    own = _rules_in(directory, _IGNORE_FILE)
    return [*inherited, own] if own is not None else inherited


def _rules_above(top: str) -> Iterator[_Rules]:
    chain: list[str] = []
    directory = Path(top)
    for parent in (directory, *directory.parents):
        if (parent / ".git").exists():
            exclude = _rules_in(str(parent), os.path.join(".git", "info", "exclude"))
            if exclude is not None:
                yield exclude
            break
        chain.append(str(parent.parent))
    else:
        return
    # from the repository's top down to the directory above
    for each in reversed(chain):
        rules = _rules_in(each, _IGNORE_FILE)
        if rules is not None:
            yield rules


def _rules_in(directory: str, file: str) -> _Rules | None:
    try:
        with open(os.path.join(directory, file), encoding="utf-8", errors="replace") as opened:
            lines = opened.read().splitlines()
    except OSError:
        return None
    import pathspec

    return _Rules(directory, pathspec.GitIgnoreSpec.from_lines(lines))


# ---------------------------------------------------------------- archives of them

# the earliest time that an archive knows
_TIME = (1980, 1, 1, 0, 0, 0)
_CHUNK_BYTES = 1 << 20
# its entry in the archive has another form
_LARGE_BYTES = 1 << 31
# archives that were not used for this long are removed, and the oldest beyond these bytes
_KEEP_S = 7 * 24 * 3600.0
_KEEP_BYTES = 1_000_000_000
_KEEP_AT_LEAST_S = 3600.0


class Bundles:
    """Makes archives of local code, and keeps them: alike contents have alike bytes.

    Args:
        folder: Where they lie, by digest.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # by entry of the path: the files when the archive was made
        self._made: dict[str, tuple[list[TreeFile], CodeBundle]] = {}

    def bundle(self, code: LocalCode) -> CodeBundle:
        """Return the archive of one entry's code, made now unless its files are as they were.

        Raises:
            OSError: It can't be written.
        """
        files = sorted(code.files, key=lambda file: file.name)
        known, made = self._made.get(code.entry, (None, None))
        if made is None or known != files or not _touched(made.path):
            made = self._make(code.entry, files)
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
            # gone already when all went well
            Path(temporary).unlink(missing_ok=True)
        self._tidy(keep=path)
        return CodeBundle(entry=entry, sha256=digest, size=size, path=str(path))

    def _tidy(self, keep: Path) -> None:
        now = time.time()
        kept: list[tuple[float, int, Path]] = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                kept.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in kept)
        for mtime, size, path in sorted(kept):
            is_old = now - mtime > _KEEP_S or total > _KEEP_BYTES
            if path != keep and is_old and now - mtime > _KEEP_AT_LEAST_S:
                path.unlink(missing_ok=True)
                total -= size


def _write(archive: IO[bytes], files: Iterable[TreeFile]) -> None:
    """Not compressed: libraries compress alike contents to different bytes."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as target:
        for file in files:
            info = zipfile.ZipInfo(file.name, _TIME)
            info.create_system = 3
            info.external_attr = (0o100755 if file.executable else 0o100644) << 16
            # a file that was removed since it was found was removed before this run
            with (
                contextlib.suppress(FileNotFoundError),
                open(file.path, "rb") as source,
                target.open(info, "w", force_zip64=file.size >= _LARGE_BYTES) as member,
            ):
                while chunk := source.read(_CHUNK_BYTES):
                    member.write(chunk)


def _touched(path: str) -> bool:
    """Whether the archive is still there; it counts as used now."""
    try:
        os.utime(path)
    except OSError:
        return False
    return True
