"""Machine-wide device locks: two users' pools never share a GPU.

A lock is flock(2) on `<uuid>.lock` in a directory that all users share. The kernel drops it with the process
that holds it, so nothing has to be cleaned up after a kill; the files stay.

Nobody can be trusted there: links, pipes and directories may be laid in the way, files be removed or written any time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import re
import stat
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self

from sgpu_magic.config import host_name
from sgpu_magic.errors import CapacityError, PoolError

_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z-]{1,80}")
_SIMULATED = re.compile(r"SIM-[0-9A-Za-z-]{1,80}")
_HOLDER = re.compile(r"(\d{1,10}) (\S{1,64}) (\S{1,64})")
_HOLDER_BYTES = 200

_DIRECTORY_MODE = 0o1777
_FILE_MODE = 0o666
# O_NONBLOCK: a FIFO laid in the way must not hold us up before fstat can tell that it is one
_OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
# another process may be between making a file or directory and giving it its mode, or may be probing
_SETTLE_S = 0.5
_PROBE_S = 1.0
_PAUSE_S = 0.002


class DevicesLocked(CapacityError):
    """Another pool on this machine holds devices that were asked for.

    Attributes:
        uuids: All of the asked devices that are held elsewhere.
        holder: Who holds the first of them, `process 4242 of user alice on host node7`.
    """

    def __init__(self, uuids: Collection[str], holder: str) -> None:
        self.uuids, self.holder = tuple(uuids), holder
        verb = "is" if len(self.uuids) == 1 else "are"
        super().__init__(
            f"{', '.join(self.uuids)} {verb} held by {holder}, a pool outside this one. "
            "Wait until its runs are over, or ask for fewer devices."
        )


class DeviceLocks:
    """The locks that this process holds. Use it from one thread.

    Simulated devices (`SIM-...`) are each pool's own: they are accepted everywhere and never locked.

    The descriptors are closed on exec. A plain fork copies them, and the locks last until the last copy is
    closed, so the process that holds them starts others by exec only.

    Args:
        directory: Shared by all users of the machine, on local disk; made with mode 1777 when missing.

    Raises:
        PoolError: It can't be made or is not a directory in which all users may make files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._directory_fd = _open_directory(directory)
        self._held: dict[str, int] = {}
        # systemd-tmpfiles leaves alone a directory that somebody has locked, tmpfiles.d(5)
        with contextlib.suppress(OSError):
            fcntl.flock(self._directory_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def held(self) -> frozenset[str]:
        """The devices that are locked here now."""
        return frozenset(self._held)

    def acquire(self, uuids: Collection[str]) -> None:
        """Lock all of `uuids`, or none.

        Raises:
            DevicesLocked: Another process, or another `DeviceLocks`, holds some of them.
            ValueError: One is no device's UUID, stands twice, or is held here already.
            PoolError: A lock file is not what it should be; the message names it.
        """
        wanted = [uuid for uuid in uuids if _is_real(uuid)]
        twice = {uuid for uuid in wanted if uuid in self._held or wanted.count(uuid) > 1}
        if twice:
            raise ValueError(f"{', '.join(sorted(twice))}: locked here already")
        taken: dict[str, int] = {}
        refused: dict[str, str] = {}
        try:
            for uuid in wanted:
                found = self._take(uuid)
                if isinstance(found, str):
                    refused[uuid] = found
                else:
                    taken[uuid] = found
            if refused:
                raise DevicesLocked(refused, next(iter(refused.values())))
            for fd in taken.values():
                _write_holder(fd)
        except BaseException:
            for fd in taken.values():
                _let_go(fd)
            raise
        self._held.update(taken)

    def descriptors(self, uuids: Collection[str]) -> list[int]:
        """The descriptors that hold the locks of `uuids`; a copy of one in another process holds its lock too."""
        return [self._held[uuid] for uuid in uuids if uuid in self._held]

    def take_over(self, uuids: Collection[str], descriptors: Collection[int]) -> None:
        """Own locks that another process of this pool holds, by copies of its descriptors, in the order of `uuids`.

        Raises:
            ValueError: Their numbers differ, or one is held here already.
        """
        self._held.update(zip((uuid for uuid in uuids if uuid not in self._held), descriptors, strict=True))

    def release(self, uuids: Collection[str]) -> None:
        """Unlock those of `uuids` that are held here; others are passed over."""
        for uuid in self._held.keys() & uuids:
            _let_go(self._held.pop(uuid))

    def locked_elsewhere(self, uuids: Collection[str]) -> dict[str, str]:
        """Return which of `uuids` somebody else holds, and who, without locking any.

        Raises:
            ValueError: One is no device's UUID.
            PoolError: A lock file is not what it should be; the message names it.
        """
        found: dict[str, str] = {}
        for uuid in uuids:
            if _is_real(uuid) and uuid not in self._held and (holder := self._holder_of(uuid)):
                found[uuid] = holder
        return found

    def close(self) -> None:
        """Unlock everything. May be called again."""
        self.release(self.held)
        if self._directory_fd >= 0:
            os.close(self._directory_fd)
            self._directory_fd = -1

    # ------------------------------------------------------------ the files

    def _take(self, uuid: str) -> int | str:
        """Return a locked descriptor, or who holds the lock."""
        while True:
            fd = self._open(uuid)
            try:
                holder = "" if _lock(fd) else _read_holder(fd)
                if not holder and self._is_current(uuid, fd):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            if holder:
                return holder

    def _holder_of(self, uuid: str) -> str:
        """Who holds the lock, "" when nobody does. Locks nothing."""
        try:
            fd = self._open_existing(uuid)
        except FileNotFoundError:
            return ""
        try:
            return "" if _try_lock(fd, fcntl.LOCK_SH) else _read_holder(fd)
        finally:
            os.close(fd)

    def _is_current(self, uuid: str, fd: int) -> bool:
        """False when somebody removed the file meanwhile: a lock on it would lock nobody out."""
        try:
            there = os.stat(f"{uuid}.lock", dir_fd=self._directory_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(fd))

    def _open(self, uuid: str) -> int:
        while True:
            # O_CREAT on another user's file in a sticky directory is EACCES (fs.protected_regular, proc(5)),
            # so it is used only where no file is
            with contextlib.suppress(FileNotFoundError):
                return self._open_existing(uuid)
            try:
                flags = _OPEN_FLAGS | os.O_CREAT | os.O_EXCL
                fd = os.open(f"{uuid}.lock", flags, _FILE_MODE, dir_fd=self._directory_fd)
            except FileExistsError:
                continue
            except OSError as error:
                raise PoolError(
                    f"the device lock {self._directory / uuid}.lock can't be made: {error.strerror}. "
                    "Make room there or set SGPU_LOCK_DIR, alike for all users, to another directory."
                ) from error
            os.fchmod(fd, _FILE_MODE)  # whatever the umask took away
            return fd

    def _open_existing(self, uuid: str) -> int:
        """Open the lock file, which must be a plain file with one name.

        A second name would mean that somebody linked another file here to have us write into it.
        """
        path = self._directory / f"{uuid}.lock"
        deadline = time.monotonic() + _SETTLE_S
        while True:
            try:
                fd = os.open(path.name, _OPEN_FLAGS, dir_fd=self._directory_fd)
                break
            except FileNotFoundError:
                raise
            except PermissionError as error:
                if time.monotonic() > deadline:
                    raise PoolError(
                        f"the device lock {path} may not be opened by this user. "
                        "Have its owner or root remove it (it is made anew with mode 0666)."
                    ) from error
                time.sleep(_PAUSE_S)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                    raise _not_plain(path) from error
                raise PoolError(f"the device lock {path} can't be opened: {error.strerror}.") from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(fd)
            raise _not_plain(path)
        return fd


def _write_holder(fd: int) -> None:
    """Write into the file that this process holds its lock."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    # the text is for a message only: on a full disk the lock holds without it
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {user} {host_name()}\n".encode(), 0)


def _let_go(fd: int) -> None:
    """Unlock by closing the descriptor, and take the holder's name out of the file."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
    os.close(fd)


def _is_real(uuid: str) -> bool:
    if _UUID.fullmatch(uuid):
        return True
    if _SIMULATED.fullmatch(uuid):
        return False
    raise ValueError(f"{uuid[:100]!r} is no device's UUID")


def _not_plain(path: Path) -> PoolError:
    return PoolError(
        f"the device lock {path} is not a plain file with one name, so it is not one of ours. "
        "Have its owner or root remove it."
    )


def _open_directory(path: Path) -> int:
    what = f"the directory of device locks {path}"
    remedy = "Have root remove it or `chmod 1777` it, or set SGPU_LOCK_DIR, alike for all users, to another."
    made = True
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        made = False
    except OSError as error:
        raise PoolError(f"{what} can't be made: {error.strerror}. {remedy}") from error
    deadline = time.monotonic() + _SETTLE_S
    while True:
        fd = -1
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            # an empty one of ours may have been left half made by a kill; a private one in use stays as it is
            if os.fstat(fd).st_uid == os.geteuid() and (made or not os.listdir(fd)):
                os.fchmod(fd, _DIRECTORY_MODE)
            if _can_share(path, fd):
                return fd
            problem = "must let this user make files that others can't remove"
        except PermissionError:
            problem = "may not be opened by this user"
        except OSError as error:
            raise PoolError(f"{what} can't be opened: {error.strerror}. {remedy}") from error
        if fd >= 0:
            os.close(fd)
        if time.monotonic() > deadline:
            raise PoolError(f"{what} {problem}. {remedy}")
        time.sleep(_PAUSE_S)


def _can_share(path: Path, fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    is_safe = not mode & stat.S_IWOTH or bool(mode & stat.S_ISVTX)
    return is_safe and os.access(path, os.W_OK | os.X_OK)


def _lock(fd: int) -> bool:
    """Take the lock, or return False at once when somebody has it.

    A probe shares the lock for an instant. What can be shared has no holder, so it is tried again.
    """
    deadline = time.monotonic() + _PROBE_S
    while not _try_lock(fd, fcntl.LOCK_EX):
        if not _try_lock(fd, fcntl.LOCK_SH) or time.monotonic() > deadline:
            return False
        fcntl.flock(fd, fcntl.LOCK_UN)
        time.sleep(_PAUSE_S)
    return True


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_holder(fd: int) -> str:
    """Who wrote itself into the file. Anybody may write there, so only the known form is passed on."""
    text = os.pread(fd, _HOLDER_BYTES, 0).decode(errors="replace").strip()
    match = _HOLDER.fullmatch(text)
    if match is None or not text.isprintable():
        return "another process"
    pid, user, host = match.groups()
    return f"process {pid} of user {user} on host {host}"
