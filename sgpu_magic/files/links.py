"""One file under several names: what many directories have alike takes room once."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def link_or_copy(kept: Path, wanted: Path) -> None:
    """Give a file one more name, or a copy where the disk knows no links or no further one; an older `wanted` goes.

    Raises:
        FileNotFoundError: There is no `kept`, or no directory for `wanted`.
        OSError: It can't be written.
    """
    if wanted.exists() and os.path.samefile(kept, wanted):
        return
    temporary = wanted.with_name(f".{wanted.name}.part")
    temporary.unlink(missing_ok=True)
    try:
        os.link(kept, temporary)
    except OSError:
        shutil.copyfile(kept, temporary)
        shutil.copymode(kept, temporary)
    os.replace(temporary, wanted)


def has_content(path: Path, data: bytes) -> bool:
    """Whether the file is there and has these bytes."""
    with contextlib.suppress(OSError):
        return path.read_bytes() == data
    return False
