"""Files that several processes use: written atomically, read, linked, compared.

Readers see a file's old or its new content, never a partial one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from sgpu_magic.errors import UsageError
from sgpu_magic.wire.decoding import decode_json

T = TypeVar("T")


@contextlib.contextmanager
def appearing(path: Path, mode: int = 0o600, *, replace: bool = True) -> Generator[IO[bytes]]:
    """Yield a new file that appears under its name when the block ends without an error. Concurrent writes: last wins.

    Args:
        path: The file; its folder must exist.
        mode: Its permissions.
        replace: Replace an existing file. Otherwise the first of concurrent writes wins.

    Raises:
        FileExistsError: The file exists, and is not to be replaced.
        OSError: The file can't be written. As after any other error, an existing file is unchanged.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", suffix=".part", dir=path.parent)
    try:
        with open(descriptor, "w+b") as file:
            os.fchmod(descriptor, mode)
            yield file
        if replace:
            os.replace(temporary, path)
            temporary = ""
        else:
            os.link(temporary, path)
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def write_whole(path: Path, data: bytes, mode: int = 0o600, *, replace: bool = True) -> None:
    """Write a file atomically, as `appearing`."""
    with appearing(path, mode, replace=replace) as file:
        file.write(data)


def read_json(path: Path, kind: type[T]) -> T | None:
    """Return the object in a JSON file; None if the file can't be read or does not hold one of this kind."""
    try:
        return decode_json(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def read_trusted(path: Path, what: str, refusal: str) -> str:
    """Return the text of a file that decides whom to trust; "" if there is no file.

    Args:
        path: The file.
        what: What it is, for messages.
        refusal: The message if users other than its owner may write the file.

    Raises:
        UsageError: The file can't be read, or other users may write it.
    """
    try:
        status = path.stat()
        if status.st_uid not in (os.getuid(), 0) or stat.S_IMODE(status.st_mode) & 0o022:
            raise UsageError(refusal)
        return path.read_text()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{what} {path} can't be read: {error}. Fix it or move it away.") from error


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes of `data` at an offset.

    Raises:
        OSError: There is no room; some of the bytes may have been written.
    """
    view = memoryview(data)
    while view.nbytes:
        count = os.pwrite(descriptor, view[: 1 << 30], offset)
        view, offset = view[count:], offset + count


def link_or_copy(kept: Path, wanted: Path) -> None:
    """Hard-link `kept` as `wanted`, or copy it if it can't be linked; replaces an older `wanted`.

    Raises:
        FileNotFoundError: `kept`, or the directory of `wanted`, does not exist.
        OSError: `wanted` can't be written.
    """
    with contextlib.suppress(OSError):
        os.link(kept, wanted)
        return
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
    """Whether the file exists and has exactly these bytes."""
    with contextlib.suppress(OSError):
        return path.read_bytes() == data
    return False


def sha256_of(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file's bytes, hexadecimal.

    Raises:
        OSError: The file can't be read.
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
