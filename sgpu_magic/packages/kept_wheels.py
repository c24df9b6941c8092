"""Wheels that were made here: each is made once and kept by what it was made of."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from sgpu_magic.config import private_dir
from sgpu_magic.packages.distributions import normalised
from sgpu_magic.wire.environment import Wheel

_CHUNK_BYTES = 1 << 20
_SHA256 = "sha256"


def kept_wheel(root: Path, key: str, make: Callable[[Path], Path]) -> Wheel:
    """Return a wheel, made now if it is not there.

    Args:
        root: Where wheels are kept.
        key: Of what it is made of; a folder's name.
        make: Makes it in an empty folder and returns its path.

    Raises:
        OSError: It can't be written.
    """
    folder = root / key
    found = _wheel_in(folder)
    if found is not None:
        return found
    private_dir(root)
    temporary = Path(tempfile.mkdtemp(prefix=".making-", dir=root))
    try:
        wheel = make(temporary)
        for entry in temporary.iterdir():
            if entry != wheel:
                entry.unlink()
        (temporary / _SHA256).write_text(_hash_of(wheel))
        try:
            os.rename(temporary, folder)
        except OSError:
            # another kernel was quicker
            if _wheel_in(folder) is None:
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    made = _wheel_in(folder)
    if made is None:
        raise FileNotFoundError(f"the wheel in {folder} is gone")
    return made


def _wheel_in(folder: Path) -> Wheel | None:
    try:
        file = next(folder.glob("*.whl"))
        sha256 = (folder / _SHA256).read_text()
        size = file.stat().st_size
        # used: what was not for long may be removed
        os.utime(folder)
    except (OSError, StopIteration):
        return None
    return Wheel(file=file.name, sha256=sha256, size=size, path=str(file))


def distribution_name(wheel: Wheel) -> str:
    """The normalised name of what a wheel holds."""
    return normalised(wheel.file.partition("-")[0])


def remove_old_wheels(root: Path, before: float) -> None:
    """Remove those that nobody asked for since then.

    Args:
        root: Where wheels are kept.
        before: Wall-clock time.
    """
    try:
        folders = [entry for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
        old = [entry.path for entry in folders if entry.stat().st_mtime < before]
    except OSError:
        return
    for path in old:
        shutil.rmtree(path, ignore_errors=True)


def _hash_of(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as wheel:
        while chunk := wheel.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
