"""Local code as archives: alike contents have alike bytes, and what has not changed is not read again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

from sgpu_magic.errors import SerializationError
from sgpu_magic.packages.file_tree import TreeFile
from sgpu_magic.packages.local_code import MOST_FILES, LocalCode
from sgpu_magic.system.byte_sizes import format_bytes
from sgpu_magic.wire.attachments import CodeBundle

# the earliest time that an archive knows
_TIME = (1980, 1, 1, 0, 0, 0)
_CHUNK_BYTES = 1 << 20
# its entry in the archive has another form
_LARGE_BYTES = 1 << 31
_NAMED = 5
# archives that were not used for this long are removed, and the oldest beyond these bytes
_KEEP_S = 7 * 24 * 3600.0
_KEEP_BYTES = 1_000_000_000
_KEEP_AT_LEAST_S = 3600.0

_Signature = tuple[tuple[str, int, int, bool], ...]


class Bundles:
    """Makes archives of local code, and keeps them.

    Args:
        folder: Where they lie, by digest.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # by entry of the path: what the files were when the archive was made
        self._made: dict[str, tuple[_Signature, CodeBundle]] = {}

    def bundle(self, code: LocalCode) -> CodeBundle:
        """Return the archive of one entry's code, made now unless its files are as they were.

        Raises:
            OSError: It can't be written.
        """
        files = sorted(code.files, key=lambda file: file.name)
        signature = tuple((file.name, file.mtime_ns, file.size, file.executable) for file in files)
        known = self._made.get(code.entry)
        if known is not None and known[0] == signature and _touched(known[1].path):
            return known[1]
        made = self._make(code.entry, files)
        self._made[code.entry] = (signature, made)
        return made

    def _make(self, entry: str, files: Sequence[TreeFile]) -> CodeBundle:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._folder / f".{os.getpid()}-{time.monotonic_ns()}.part"
        try:
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "w+b") as archive:
                _write(archive, files)
                archive.flush()
                archive.seek(0)
                digest = hashlib.file_digest(archive, "sha256").hexdigest()
                size = archive.tell()
            path = self._folder / f"{digest}.zip"
            os.replace(temporary, path)
        finally:
            # gone already when all went well
            temporary.unlink(missing_ok=True)
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


def check_size(codes: Iterable[LocalCode], *, warn_bytes: int, limit_bytes: int) -> tuple[str, ...]:
    """Return notes about local code that is large or lacks files.

    Args:
        codes: All that travels.
        warn_bytes: A note names the largest files of more than this.
        limit_bytes: More than this does not travel.

    Raises:
        SerializationError: It is too large, or has too many files.
    """
    codes = list(codes)
    files = [file for code in codes for file in code.files]
    for code in codes:
        if code.walked.full:
            raise SerializationError(
                f"the local code under {code.entry} can't travel to the ranks: it has more than {MOST_FILES:,} files, "
                f"most of them in {_fullest(code.files)}. Name what the code does not need in a .gitignore, or move "
                "it out of the folder."
            )
    total = sum(file.size for file in files)
    if total > limit_bytes:
        raise SerializationError(
            f"the notebook's local code is {format_bytes(total)} and can't travel to the ranks, the limit is "
            f"{format_bytes(limit_bytes)}. The largest files: {_largest(files)}. Name what the code does not need in a "
            ".gitignore, put data where the ranks can read it, or raise the setting code_limit_bytes."
        )
    notes: list[str] = []
    if total > warn_bytes:
        notes.append(
            f"{format_bytes(total)} of local code travel along; the largest files: {_largest(files)}. What a "
            ".gitignore names stays here"
        )
    unreadable = [path for code in codes for path in code.walked.unreadable]
    if unreadable:
        more = f" and {len(unreadable) - _NAMED} more" if len(unreadable) > _NAMED else ""
        names = ", ".join(unreadable[:_NAMED])
        notes.append(f"local files that can't be read did not travel along: {names}{more}")
    return tuple(notes)


# ---------------------------------------------------------------- within


def _write(archive: IO[bytes], files: Sequence[TreeFile]) -> None:
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


def _largest(files: Iterable[TreeFile]) -> str:
    largest = sorted(files, key=lambda file: file.size, reverse=True)[:_NAMED]
    return ", ".join(f"{file.path} ({format_bytes(file.size)})" for file in largest)


def _fullest(files: Iterable[TreeFile]) -> str:
    counts: dict[str, int] = {}
    for file in files:
        directory = os.path.dirname(file.path)
        counts[directory] = counts.get(directory, 0) + 1
    return ", ".join(sorted(counts, key=lambda directory: counts[directory], reverse=True)[:3])
