"""Blobs joined to what they were cut from."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from sgpu_magic.wire.payloads import StoredPart

_COPY_BYTES = 16 << 20


def join_parts(target: int, size: int, parts: Iterable[tuple[StoredPart, Path]]) -> None:
    """Write the parts of a payload where they belong.

    Args:
        target: A descriptor of an empty file.
        size: The payload's size in bytes.
        parts: Each with the blob that it is.

    Raises:
        OSError: A part is not there or does not lie in the payload, or there is no room.
    """
    os.ftruncate(target, size)
    for part, path in parts:
        if part.offset < 0 or part.offset + part.size > size:
            raise OSError("its parts do not lie in it")
        copy_blob(path, target, part.offset, part.size)


def copy_blob(path: Path, target: int, offset: int, size: int) -> None:
    """Write the first `size` bytes of a blob to an offset of another file.

    Raises:
        OSError: It is not there or shorter, or there is no room.
    """
    source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.lseek(target, offset, os.SEEK_SET)
        at = 0
        while at < size:
            count = os.sendfile(target, source, at, min(_COPY_BYTES, size - at))
            if count == 0:
                raise OSError("a part of them is shorter than it was")
            at += count
    finally:
        os.close(source)
