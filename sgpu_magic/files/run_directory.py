"""A run's directory: its event log, readable while it grows; its files, by names from untrusted sources; room for it.

No such name leads out of the directory, and no symlink is followed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pwd
import shutil
import stat
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.config import SET_IN_NOTEBOOK
from sgpu_magic.formatting import format_bytes
from sgpu_magic.wire.codec import Decoder, FrameReader
from sgpu_magic.wire.events import Event, Submitted
from sgpu_magic.wire.files import EVENTS, MOST_LINKS, RunFile
from sgpu_magic.wire.run import RunSpec

_decoder = Decoder[Event](Event)
_READ_BYTES = 1 << 20
_MOST_NAME_BYTES = 4096
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# measured: a new pool and its first run write 180 kB in 21 files and folders; a later run of two ranks with a little
# output 32 kB in 8, a cell in a session without output 24 kB in 6
RUN_BYTES = 256_000
RUN_INODES = 32
STAGED = ".arriving-"
"""Name prefix of a folder in a run's directory that holds the files of a node until all of them have arrived."""


class EventFile:
    """Reads `events.msgpack` of a run's directory incrementally.

    Each read begins after the last complete event: a partial event that a killed service left behind is truncated by
    the next service and overwritten. No file stays open between two reads.

    Args:
        directory: The run's directory.
        taken_bytes: The offset of the first read, at the beginning of an event.

    Attributes:
        taken_bytes: The offset in the file after the last event that was yielded.
    """

    def __init__(self, directory: Path, taken_bytes: int = 0) -> None:
        self._path = directory / EVENTS
        self.taken_bytes = taken_bytes

    def new_events(self) -> Iterator[tuple[Event, Sequence[bytes]]]:
        """Yield each event that was not yielded before, with its raw frames.

        Raises:
            OSError: There is no event log.
            ValueError: The log is damaged.
        """
        reader = FrameReader(_decoder)
        with open(self._path, "rb") as file:
            read_bytes = file.seek(self.taken_bytes)
            while chunk := file.read(_READ_BYTES):
                read_bytes += len(chunk)
                for event, frames in reader.feed(chunk):
                    self.taken_bytes = read_bytes - reader.incomplete_bytes
                    yield event, frames


def read_spec(directory: Path) -> RunSpec | None:
    """The spec of the submitted run, None if the log does not contain it."""
    try:
        first = next(EventFile(directory).new_events(), None)
    except (OSError, ValueError, msgspec.DecodeError):
        return None
    return first[0].body.spec if first is not None and isinstance(first[0].body, Submitted) else None


# ---------------------------------------------------------------- disk space for a run


class DiskRoom(msgspec.Struct, frozen=True):
    """The file system under a directory.

    Args:
        path: The directory, or its nearest existing parent.
        mount: The mount point of the file system.
        kind: The file system's type, such as `ext4`; "" if unknown.
        free_bytes: Bytes that this process may still write there.
        free_inodes: Files that it may still create there; None without a limit.
        writable: Whether it may write there at all.
        read_only: Whether nobody may: the file system is mounted for reading, or the directory is immutable.
    """

    path: Path
    mount: str
    kind: str
    free_bytes: int
    free_inodes: int | None
    writable: bool
    read_only: bool = False

    @property
    def takes_a_run(self) -> bool:
        inodes = self.free_inodes
        return self.writable and self.free_bytes >= RUN_BYTES and (inodes is None or inodes >= RUN_INODES)

    def __str__(self) -> str:
        kind = f"{self.kind} " if self.kind else ""
        if self.read_only:
            return f"{self.path} on the {kind}disk at {self.mount} is read-only"
        if not self.writable:
            return f"{self.path} can't be written by this user: {_permissions(self.path)}"
        inodes = "" if self.free_inodes is None else f" and {self.free_inodes:,} inodes"
        return f"the {kind}disk at {self.mount} has {format_bytes(self.free_bytes)}{inodes} free"


def _permissions(path: Path) -> str:
    """Return `it has mode 0555 and belongs to alice`."""
    status = os.stat(path)
    try:
        owner = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        owner = f"user {status.st_uid}"
    return f"it has mode {stat.S_IMODE(status.st_mode):04o} and belongs to {owner}"


def _mode_allows(status: os.stat_result) -> bool:
    """Whether the mode of a directory lets this process write there."""
    if os.geteuid() == 0:
        return True
    if status.st_uid == os.geteuid():
        bits = status.st_mode >> 6
    elif status.st_gid in (os.getegid(), *os.getgroups()):
        bits = status.st_mode >> 3
    else:
        bits = status.st_mode
    return bits & 0o3 == 0o3


def disk_room(path: Path) -> DiskRoom:
    """Return the state of the file system under `path`.

    Raises:
        OSError: The file system can't be inspected.
    """
    while not path.exists() and path != path.parent:
        path = path.parent
    status = os.statvfs(path)
    mount, kind = _mount_of(path, os.stat(path).st_dev)
    blocks, inodes = status.f_bavail, status.f_favail
    if os.geteuid() == 0:
        # root may use the blocks reserved for it, but not those of ext4 itself (ext4_calculate_resv_clusters)
        own = min(status.f_blocks // 50, 4096) if kind == "ext4" else 0
        blocks, inodes = max(blocks, status.f_bfree - own), status.f_ffree
    # file systems that allocate inodes dynamically report 0
    limited = status.f_files > 0
    writable = os.access(path, os.W_OK | os.X_OK)
    return DiskRoom(
        path,
        mount,
        kind,
        blocks * status.f_frsize,
        inodes if limited else None,
        writable,
        read_only=bool(status.f_flag & os.ST_RDONLY) or (not writable and _mode_allows(os.stat(path))),
    )


@functools.lru_cache(maxsize=16)
def _mount_of(path: Path, device: int) -> tuple[str, str]:
    """`mount_of`, read once for each device: the table has a hundred lines on some machines."""
    return mount_of(path)


def mount_of(path: Path, mounts: Path = Path("/proc/mounts")) -> tuple[str, str]:
    """Return the mount point and type of the file system of `path`; the type is "" if unknown."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return "/", ""
    mount, found, longest = "/", "", -1
    target = path.resolve()
    for line in lines:
        parts = line.split(" ")
        if len(parts) < 3:
            continue
        # blanks and tabs are written as octal escapes, fstab(5)
        point = parts[1].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        # of two mounts on one point the later one is visible
        if target.is_relative_to(point) and len(point) >= longest:
            mount, found, longest = point, parts[2], len(point)
    return mount, found


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
    return f"the pool can't record the run in {runs_path}: {why}. {remedy(runs_path, room)}"


def remedy(runs_path: Path, room: DiskRoom | None) -> str:
    """Return the advice for a directory that takes no run.

    Args:
        runs_path: The directory of the runs' directories.
        room: The file system there; None if it is unknown.
    """
    if room is not None and not room.writable and not room.read_only:
        return (
            f"Make {room.path} writable for you (`chmod u+rwx {room.path}`, or have its owner do it), and run the cell "
            f"again; or stop the pool (`sgpu pool stop`) and set SGPU_STATE_DIR to a directory of your own "
            f"{SET_IN_NOTEBOOK}."
        )
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


class Contents(msgspec.Struct):
    """Everything below a run's directory, by name.

    Sockets, pipes and devices are in none of these: they hold nothing that could be sent.

    Attributes:
        files: The plain files, the symbolic links that stay within the directory, and the empty folders.
        outward_links: Symbolic links that lead out of the directory, and their targets.
        unreadable: What else can't be sent, and why.
    """

    files: list[RunFile] = []
    outward_links: dict[str, str] = {}
    unreadable: dict[str, str] = {}


def contents_below(root: Path, under: str = "") -> Contents:
    """Return everything below `root`, or below a folder in it, without what is being staged there.

    Raises:
        BadName: `under` leads out of `root`.
        OSError: The folder can't be opened.
    """
    found = Contents()

    def unreadable(error: OSError) -> None:
        found.unreadable[ascii(str(error.filename))[1:-1]] = error.strerror or str(error)

    # `x` is a placeholder: only the folder is opened
    with _folder_of(root, f"{under}/x" if under else "x") as (top, _):
        for folder, folders, names, descriptor in os.fwalk(dir_fd=top, onerror=unreadable):
            here = os.path.normpath(os.path.join(under, folder))
            if here == ".":
                here = ""
                folders[:] = [name for name in folders if not name.startswith(STAGED)]
            elif not folders and not names:
                found.files.append(RunFile(name=here, size=0, changed_at=0.0, folder=True))
            for name in (*names, *folders):
                _add(found, root, os.path.join(here, name), name, descriptor)
            folders[:] = [name for name in folders if _is_text(name)]
    found.files.sort(key=lambda file: file.name)
    return found


def _add(found: Contents, root: Path, path: str, name: str, descriptor: int) -> None:
    """Add one entry of a folder, which is given by its descriptor."""
    if not _is_text(name):
        found.unreadable[ascii(path)[1:-1]] = "its name is not UTF-8"
        return
    try:
        status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            found.files.append(_described(path, status))
        elif stat.S_ISLNK(status.st_mode):
            target = os.readlink(name, dir_fd=descriptor)
            if (inside := _target_within(root, path, target)) is None:
                found.outward_links[path] = ascii(target)[1:-1]
            else:
                found.files.append(msgspec.structs.replace(_described(path, status), size=0, target=inside))
    except FileNotFoundError:
        # the entry was removed meanwhile
        pass
    except OSError as error:
        found.unreadable[path] = error.strerror or str(error)


def _is_text(name: str) -> bool:
    """Whether a file's name is valid UTF-8; other names can't be sent."""
    return not any("\ud800" <= each <= "\udfff" for each in name)


def _target_within(root: Path, name: str, target: str) -> str | None:
    """Return the target of a link below `root`, relative to the link's folder; None if it leads out of `root`."""
    if os.path.isabs(target):
        for base in (str(root), os.path.realpath(root)):
            if target == base or target.startswith(f"{base}/"):
                rest = target.removeprefix(base)
                if ".." in rest.split("/"):
                    return None
                target = os.path.relpath(f"/{rest.lstrip('/')}", f"/{os.path.dirname(name)}")
                break
    return target if _is_text(target) and link_stays_within(name, target) else None


def link_stays_within(name: str, target: str) -> bool:
    """Whether a link below a folder can't lead out of it.

    In its target, `..` may only be at the beginning: behind the name of another link it could lead anywhere.

    Args:
        name: The link's name relative to the folder.
        target: Its target.
    """
    if not target or target.startswith("/") or "\0" in target or len(os.fsencode(target)) >= _MOST_NAME_BYTES:
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    below = list(itertools.dropwhile(lambda part: part == "..", parts))
    return ".." not in below and len(parts) - len(below) <= name.count("/")


def make_link_below(root: Path, name: str, target: str) -> None:
    """Make a symbolic link below `root`, in place of an earlier file or link.

    Raises:
        BadName: Its name or its target leads out of `root`.
        OSError: It can't be made.
    """
    if not link_stays_within(name, target):
        raise BadName(f"the link {name[:200]!r} leads out of the run's directory")
    with _folder_of(root, name, make=True) as (folder, last):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(last, dir_fd=folder)
        os.symlink(target, last, dir_fd=folder)


def make_folder_below(root: Path, name: str) -> None:
    """Make a folder below `root`, unless it exists.

    Raises:
        BadName: Its name leads out of `root`.
        OSError: It can't be made.
    """
    with _folder_of(root, f"{name}/x", make=True):
        pass


def publish_staged(root: Path, staged: str) -> None:
    """Move everything in a folder of `root` into `root` itself, in place of earlier files, and remove the folder.

    Links are moved, and never followed. It may be repeated after an interruption.

    Raises:
        OSError: A file can't be moved.
    """
    with contextlib.suppress(FileNotFoundError), _folder_of(root, f"{staged}/x") as (source, _):
        target = os.open(root, _FOLDER)
        try:
            _merge(source, target)
        finally:
            os.close(target)
    shutil.rmtree(root / staged, ignore_errors=True)


def _merge(source: int, target: int) -> None:
    for name in os.listdir(source):
        there = _kind(name, target)
        if stat.S_ISDIR(_kind(name, source)):
            if there and not stat.S_ISDIR(there):
                os.unlink(name, dir_fd=target)
                there = 0
            if not there:
                os.mkdir(name, 0o700, dir_fd=target)
            inner, outer = os.open(name, _FOLDER, dir_fd=source), os.open(name, _FOLDER, dir_fd=target)
            try:
                _merge(inner, outer)
            finally:
                os.close(inner)
                os.close(outer)
        else:
            if stat.S_ISDIR(there):
                shutil.rmtree(name, dir_fd=target)
            os.replace(name, name, src_dir_fd=source, dst_dir_fd=target)


def _kind(name: str, folder: int) -> int:
    """Return the mode of an entry, 0 if there is none."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0


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
    found = list(itertools.islice(_walk(root, under), most + 1))
    return sorted(found[:most], key=lambda file: file.name), len(found) > most


def links_below(root: Path, under: str = "") -> tuple[str, ...]:
    """Return the symbolic links below a subfolder, by name; at most `MOST_LINKS`.

    Raises:
        BadName: `under` leads out of the folder.
        OSError: The folder can't be read.
    """
    if under:
        with contextlib.suppress(FileNotFoundError), _folder_of(root, under) as (folder, last):
            if not stat.S_ISDIR(os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode):
                return ()
    return tuple(sorted(itertools.islice(_links(root, under), MOST_LINKS)))


# ---------------------------------------------------------------- internals


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
    """Yield the plain files below a subfolder, without those that are being written."""
    # `x` is a placeholder: only the folder is opened
    inside = f"{under}/x" if under else "x"
    with contextlib.suppress(FileNotFoundError, PermissionError), _folder_of(root, inside) as (top, _):
        for folder, folders, names, descriptor in os.fwalk(dir_fd=top):
            if not under and folder == ".":
                folders[:] = [name for name in folders if not name.startswith(STAGED)]
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and not (name.startswith(".") and name.endswith(".part")):
                        yield _described(os.path.normpath(os.path.join(under, folder, name)), status)


def _links(root: Path, under: str) -> Iterator[str]:
    inside = f"{under}/x" if under else "x"
    with contextlib.suppress(FileNotFoundError, PermissionError), _folder_of(root, inside) as (top, _):
        for folder, folders, names, descriptor in os.fwalk(dir_fd=top):
            if not under and folder == ".":
                folders[:] = [name for name in folders if not name.startswith(STAGED)]
            for name in (*folders, *names):
                with contextlib.suppress(FileNotFoundError):
                    if stat.S_ISLNK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                        yield os.path.normpath(os.path.join(under, folder, name))


def _described(name: str, status: os.stat_result) -> RunFile:
    return RunFile(
        name=name,
        size=status.st_size,
        changed_at=status.st_mtime,
        executable=bool(status.st_mode & stat.S_IXUSR),
    )
