"""A run's directory: its event log, readable while it grows; its files, by names from untrusted sources; room for it.

No such name leads out of the directory, and no symlink is followed.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.config import SET_IN_NOTEBOOK
from sgpu_magic.system.byte_sizes import disk_room
from sgpu_magic.wire.codec import Decoder, FrameReader
from sgpu_magic.wire.events import Event, Submitted
from sgpu_magic.wire.files import EVENTS, RunFile
from sgpu_magic.wire.run import RunSpec

_decoder = Decoder[Event](Event)
_READ_BYTES = 1 << 20
_MOST_NAME_BYTES = 4096
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class EventFile:
    """Reads `events.msgpack` of a run's directory incrementally.

    Each read begins after the last complete event: a partial event that a killed service left behind is truncated by
    the next service and overwritten. No file stays open between two reads.

    Args:
        directory: The run's directory.
        taken_bytes: The offset of the first read, at the beginning of an event.
    """

    def __init__(self, directory: Path, taken_bytes: int = 0) -> None:
        self._path = directory / EVENTS
        self._taken_bytes = taken_bytes

    @property
    def taken_bytes(self) -> int:
        """The offset in the file after the last event that was yielded."""
        return self._taken_bytes

    def new_events(self) -> Iterator[tuple[Event, Sequence[bytes]]]:
        """Yield each event that was not yielded before, with its raw frames.

        Raises:
            OSError: There is no event log.
            ValueError: The log is damaged.
        """
        reader = FrameReader(_decoder)
        with open(self._path, "rb") as file:
            file.seek(self._taken_bytes)
            read_bytes = self._taken_bytes
            while chunk := file.read(_READ_BYTES):
                read_bytes += len(chunk)
                for event, frames in reader.feed(chunk):
                    self._taken_bytes = read_bytes - reader.incomplete_bytes
                    yield event, frames


def read_spec(directory: Path) -> RunSpec | None:
    """The spec of the submitted run, None if the log does not contain it."""
    try:
        first = next(EventFile(directory).new_events(), None)
    except (OSError, ValueError, msgspec.DecodeError):
        return None
    return first[0].body.spec if first is not None and isinstance(first[0].body, Submitted) else None


def why_no_run(runs_path: Path, problem: str = "") -> str:
    """Return why a run can't be recorded, with the remedy; "" if it can.

    Args:
        runs_path: The directory of the runs' directories.
        problem: The system's error message of a failed attempt; "" before an attempt.
    """
    try:
        room = disk_room(runs_path)
    except OSError as error:
        room, problem = None, problem or error.strerror or str(error)
    if not problem and room is not None and room.takes_a_run:
        return ""
    why = "; ".join(str(part) for part in (problem, room) if part)
    return f"the pool can't record the run in {runs_path}: {why}. {remedy(runs_path)}"


def remedy(runs_path: Path) -> str:
    """The advice for a disk that is too full for a run."""
    return (
        f"Free room there (directories of old runs in {runs_path} can be removed) or make it writable, and run the "
        "cell again; or stop the pool (`sgpu pool stop`) and set SGPU_STATE_DIR to a directory on another disk "
        f"{SET_IN_NOTEBOOK}."
    )


# ---------------------------------------------------------------- files by names from untrusted sources


class BadName(OSError):
    """A name that may not be read or written; the message is the reason."""


def parts_of(name: str) -> tuple[str, ...]:
    """Return the parts of a name such as `work/out/model.pt`.

    Raises:
        BadName: It is empty, absolute, too long, or leads out of its folder.
    """
    parts = tuple(name.split("/"))
    fits = len(os.fsencode(name)) <= _MOST_NAME_BYTES and "\0" not in name
    if not fits or any(part in ("", ".", "..") for part in parts):
        raise BadName(f"{name[:200]!r} is not the name of a file below a run's directory")
    return parts


def open_below(root: Path, name: str, flags: int = os.O_RDONLY, *, make: bool = False) -> int:
    """Open a plain file below `root` and return its descriptor.

    Args:
        root: The folder.
        name: The file's name relative to it, with `/` as separator.
        flags: Flags for `os.open`. A new file gets mode 0600.
        make: Create missing folders, with mode 0700.

    Raises:
        BadName: The name leads out of the folder, or is not a plain file.
        OSError: The file can't be opened.
    """
    with _folder_of(root, name, make=make) as (folder, last):
        try:
            descriptor = os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode=0o600, dir_fd=folder)
        except OSError as error:
            if error.filename is not None:
                error.filename = name
            raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadName(f"{name[:200]!r} is not a regular file")
    return descriptor


def replace_below(root: Path, temporary: str, name: str) -> None:
    """Rename a file below `root` to its name, in the same folder."""
    with _folder_of(root, name) as (folder, last):
        os.replace(temporary, last, src_dir_fd=folder, dst_dir_fd=folder)


def remove_below(root: Path, name: str) -> None:
    """Remove a file below `root` if it exists."""
    with contextlib.suppress(FileNotFoundError), _folder_of(root, name) as (folder, last):
        os.unlink(last, dir_fd=folder)


def list_below(root: Path, under: str = "", most: int = 10_000) -> tuple[list[RunFile], bool]:
    """Return the plain files below `root`, by name, and whether there are more than `most`.

    Args:
        root: The folder.
        under: List only files below this subfolder, or this one file; "" lists all.
        most: The maximum number of files listed.

    Raises:
        BadName: `under` leads out of the folder.
        OSError: The folder can't be opened.
    """
    if under:
        parts_of(under)
        with contextlib.suppress(NotADirectoryError, BadName, IsADirectoryError):
            descriptor = open_below(root, under)
            try:
                return [_described(under, os.fstat(descriptor))], False
            finally:
                os.close(descriptor)
    found: list[RunFile] = []
    for file in _walk(root, under):
        if len(found) == most:
            return sorted(found, key=lambda file: file.name), True
        found.append(file)
    return sorted(found, key=lambda file: file.name), False


# ---------------------------------------------------------------- within


@contextlib.contextmanager
def _folder_of(root: Path, name: str, *, make: bool = False) -> Generator[tuple[int, str]]:
    """Yield a descriptor of the folder that contains a file, and the file's name in it."""
    *folders, last = parts_of(name)
    descriptor = os.open(root, _FOLDER)
    try:
        for folder in folders:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700, dir_fd=descriptor)
            try:
                inner = os.open(folder, _FOLDER, dir_fd=descriptor)
            except NotADirectoryError:
                # a file, or a symlink
                raise BadName(f"{name[:200]!r} is not below a folder of a run's directory") from None
            os.close(descriptor)
            descriptor = inner
        yield descriptor, last
    finally:
        os.close(descriptor)


def _walk(root: Path, under: str) -> Iterator[RunFile]:
    waiting = [under]
    while waiting:
        prefix = waiting.pop()
        with contextlib.suppress(FileNotFoundError, PermissionError), _opened(root, prefix) as folder:
            for entry in os.scandir(folder):
                name = f"{prefix}/{entry.name}" if prefix else entry.name
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(name)
                elif entry.is_file(follow_symlinks=False) and not _is_unfinished(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        yield _described(name, entry.stat(follow_symlinks=False))


@contextlib.contextmanager
def _opened(root: Path, prefix: str) -> Generator[int]:
    # `x` is a placeholder: only the folder is opened
    with _folder_of(root, f"{prefix}/x" if prefix else "x") as (folder, _):
        yield folder


def _is_unfinished(name: str) -> bool:
    return name.startswith(".") and name.endswith(".part")


def _described(name: str, status: os.stat_result) -> RunFile:
    return RunFile(
        name=name,
        size=status.st_size,
        changed_at=status.st_mtime,
        executable=bool(status.st_mode & stat.S_IXUSR),
    )
