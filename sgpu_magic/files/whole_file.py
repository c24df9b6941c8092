"""A file that its readers see as it was or as it is now, and never in between."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file under its name at once. Several may do so at the same time: the last one's stays.

    Args:
        path: The file; its folder is there.
        data: All of it.
        mode: Its permissions.

    Raises:
        OSError: It can't be written. Nothing of it is left then, and the old one stays.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
