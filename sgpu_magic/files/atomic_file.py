"""Files and folders that several processes use: read, written whole, linked, locked, measured, evicted, removed.

Readers of a file see its old or its new content, never a partial one. A process that uses a folder holds a shared lock
on it (flock(2), released when the process exits); one that removes it, or builds it in place, holds an exclusive lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from sgpu_magic.errors import UsageError
from sgpu_magic.wire.decoding import decode_json

LOCK_FILE = os.O_RDWR | os.O_CREAT
"""The flags for opening a lock file."""

T = TypeVar("T")
# pause before a lock that is held by a probe is tried again
_LOOK_S = 0.001


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
        else:
            os.link(temporary, path)
    finally:
        # the temporary file is gone if it has replaced the file
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


# ---------------------------------------------------------------- locks


class HeldLock:
    """A lock on a file or folder, held until `close` or the end of the process.

    Args:
        descriptor: The file descriptor that holds the lock.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def is_at(self, path: Path) -> bool:
        """Whether the path names the locked file, which may have been removed or replaced meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        return False

    def share(self) -> None:
        """Turn the lock into a shared one."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        if self._descriptor >= 0:
            # unlock explicitly: closing is not enough if a child process has inherited the descriptor
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1


def take_lock(path: Path, *, shared: bool = False, wait: bool = True, flags: int = os.O_RDONLY) -> HeldLock | None:
    """Lock a file or folder. Returns None if it does not exist, or if another process holds it and `wait` is False.

    Args:
        path: The file or folder.
        shared: Take a shared lock instead of an exclusive one.
        wait: Wait until the lock is free.
        flags: Flags for `os.open`.

    Raises:
        OSError: The path can't be opened.
    """
    while True:
        try:
            descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return None
        held = HeldLock(descriptor)
        with contextlib.ExitStack() as not_held:
            not_held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                return None
            # otherwise the previous holder has removed the file: try again with the new one
            if held.is_at(path):
                not_held.pop_all()
                return held


def is_locked(path: Path) -> bool:
    """Whether a process holds an exclusive lock on a file, wherever it runs. False if the file can't be opened.

    The probe holds a shared lock for an instant, which `take_lock_or_none` waits out.
    """
    try:
        held = take_lock(path, shared=True, wait=False)
    except OSError:
        return False
    if held is not None:
        held.close()
        return False
    return path.exists()


def take_lock_or_none(path: Path, flags: int = LOCK_FILE) -> HeldLock | None:
    """Lock a file that others probe with `is_locked`; None if another process holds it exclusively.

    Raises:
        OSError: The path can't be opened.
    """
    while (held := take_lock(path, wait=False, flags=flags)) is None:
        if is_locked(path):
            return None
        # the lock was held by a probe, which has ended by now
        time.sleep(_LOOK_S)
    return held


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True, flags: int = os.O_RDONLY) -> Generator[bool]:
    """Hold an exclusive lock for the block, as `take_lock`; yields whether it was acquired."""
    held = take_lock(path, wait=wait, flags=flags)
    try:
        yield held is not None
    finally:
        if held is not None:
            held.close()


# ---------------------------------------------------------------- disk space


def folder_bytes(folder: str | os.PathLike[str]) -> int:
    """Return the total size of all files below a folder. Symbolic links count as themselves, hard links each time.

    Files that are removed meanwhile, or can't be inspected, count as 0.
    """
    total = 0
    for directory, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(directory, file)).st_size
    return total


def size_bytes(path: Path) -> int:
    """Return the size of a file, or of all files below a folder; symlinks count as themselves."""
    own = os.lstat(path)
    return folder_bytes(path) if stat.S_ISDIR(own.st_mode) else own.st_size


def format_bytes(count: float) -> str:
    """Format a size like `1.2 kB` or `45.1 MB`: decimal units, one digit after the point."""
    if count < 999.5:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"


def used_entries(folder: Path) -> list[tuple[float, int, Path]]:
    """Return what `evict` needs of each file in a folder: the time of its last use, its size and its path."""
    found: list[tuple[float, int, Path]] = []
    for path in folder.iterdir():
        # another process may remove it
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    return found


def evict(entries: Iterable[tuple[float, int, T]], most_bytes: float, remove: Callable[[T], bool]) -> int:
    """Remove the least recently used entries until the total size is at most `most_bytes`; return the total size left.

    Args:
        entries: For each entry the time of its last use, its size in bytes, and the entry itself.
        most_bytes: The size that may stay.
        remove: Removes an entry; returns False if it has to stay.
    """
    kept = sorted(entries, key=lambda entry: entry[:2])
    total = sum(size for _, size, _ in kept)
    for _, size, entry in kept:
        if total <= most_bytes:
            break
        if remove(entry):
            total -= size
    return total


def keep_newest(folder: Path, most: int) -> None:
    """Remove all but the newest files and folders in a folder."""
    with contextlib.suppress(FileNotFoundError):
        found = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in found[most:]:
            remove_tree(path)


def remove_unused(folder: Path) -> bool:
    """Remove a folder unless it is locked. Returns whether it is gone."""
    with locked(folder, wait=False) as mine:
        if mine:
            # rename it first, so that a partly removed folder is never visible under its name
            doomed = folder.with_name(f".{folder.name[:16]}-{time.monotonic_ns()}.gone")
            os.rename(folder, doomed)
            remove_tree(doomed)
        return not folder.exists()


def remove_tree(path: Path) -> None:
    """Remove a file or a folder, even if it is read-only. Another process may be removing it at the same time."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    shutil.rmtree(path, ignore_errors=True)
    if not os.path.lexists(path):
        return
    # folders in it may be inaccessible or read-only
    with contextlib.suppress(OSError):
        os.chmod(path, stat.S_IRWXU)
    for folder, folders, _ in os.walk(path):
        for inner in (os.path.join(folder, name) for name in folders):
            with contextlib.suppress(OSError):
                if not os.path.islink(inner):
                    os.chmod(inner, stat.S_IRWXU)
    shutil.rmtree(path, ignore_errors=True)
