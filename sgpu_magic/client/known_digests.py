"""Digests of files that have not changed since they were taken, so that a large folder is not read again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sgpu_magic.config import private_dir

_FOLDER = "upload-digests"
_MOST_KEPT = 100
# who writes once more within the clock's resolution leaves the same times (as git's index has it: "racy")
_SETTLED_NS = 2_000_000_000


class _Known(msgspec.Struct, frozen=True, array_like=True):
    """Of one file: what says that it is the same, and its pieces' digests."""

    size: int
    changed_ns: int
    status_changed_ns: int
    inode: int
    device: int
    digests: tuple[str, ...]


_decoder = msgspec.msgpack.Decoder(dict[str, _Known])


class KnownDigests:
    """Of the files of one folder.

    Args:
        state: The state directory, in which they are kept between programs.
        root: The folder.
    """

    def __init__(self, state: Path, root: Path) -> None:
        name = hashlib.blake2b(os.fsencode(root), digest_size=16).hexdigest()
        self._folder = state / _FOLDER
        self._path = self._folder / name
        self._known: dict[str, _Known] = {}
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self._known = _decoder.decode(self._path.read_bytes())

    def of(self, path: str, status: os.stat_result) -> tuple[str, ...] | None:
        """Return a file's digests, None when it may have changed."""
        known = self._known.get(path)
        if known is None or known != _known(status, known.digests):
            return None
        return known.digests

    def keep(self, found: Mapping[str, tuple[os.stat_result, tuple[str, ...]]]) -> None:
        """Keep digests by path, in place of those that were kept before. A disk that is full keeps none.

        Args:
            found: What the file was when its digests were taken, and those.
        """
        settled = time.time_ns() - _SETTLED_NS
        kept = {
            path: _known(status, digests)
            for path, (status, digests) in found.items()
            if max(status.st_mtime_ns, status.st_ctime_ns) < settled
        }
        if kept == self._known:
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        with contextlib.suppress(OSError):
            private_dir(self._folder.parent)
            private_dir(self._folder)
            temporary.write_bytes(msgspec.msgpack.encode(kept))
            os.replace(temporary, self._path)
            newest = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
            for path in newest[_MOST_KEPT:]:
                path.unlink(missing_ok=True)


def _known(status: os.stat_result, digests: tuple[str, ...]) -> _Known:
    return _Known(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev, digests)
