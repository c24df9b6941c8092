"""Atomic file writes: readers see the old or the new content, never a partial one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def appearing(path: Path, mode: int = 0o600) -> Generator[IO[bytes]]:
    """Yield a new file that appears under its name when the block ends without an error. Concurrent writes: last wins.

    Args:
        path: The file; its folder must exist.
        mode: Its permissions.

    Raises:
        OSError: The file can't be written. As after any other error, an existing file is unchanged.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", suffix=".part", dir=path.parent)
    try:
        with open(descriptor, "w+b") as file:
            os.fchmod(descriptor, mode)
            yield file
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_whole(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file atomically, as `appearing`."""
    with appearing(path, mode) as file:
        file.write(data)


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes of `data` at an offset.

    Raises:
        OSError: There is no room; some of the bytes may have been written.
    """
    view = memoryview(data)
    while view.nbytes:
        count = os.pwrite(descriptor, view[: 1 << 30], offset)
        view, offset = view[count:], offset + count


def sha256_of(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file's bytes, hexadecimal.

    Raises:
        OSError: The file can't be read.
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
