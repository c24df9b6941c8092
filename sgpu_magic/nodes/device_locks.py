"""Machine-wide device locks: two users' pools never share a GPU.

A lock is flock(2) on `<uuid>.lock` in a directory that all users share. The kernel releases it when the process
that holds it exits, so nothing has to be cleaned up after a kill; the files stay.

The directory is not trusted: other users may place links, pipes and directories there, and remove or write files at
any time.
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

from sgpu_magic.config import host_name
from sgpu_magic.errors import CapacityError, PoolError

_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z-]{1,80}")
_SIMULATED = re.compile(r"SIM-[0-9A-Za-z-]{1,80}")
_HOLDER = re.compile(r"(\d{1,10}) (\S{1,64}) (\S{1,64})")
_HOLDER_BYTES = 200

_DIRECTORY_MODE = 0o1777
_FILE_MODE = 0o666
# O_NONBLOCK: opening a FIFO that somebody placed there must not block before fstat detects it
_OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
# another process may have created a file or directory and not set its mode yet, or may be probing a lock
_SETTLE_S = 0.5
_PROBE_S = 1.0
_PAUSE_S = 0.002


class DevicesLocked(CapacityError):
    """Another pool on this machine holds requested devices.

    Attributes:
        uuids: All requested devices that are held elsewhere.
        holder: The holder of the first of them, for example `process 4242 of user alice on host node7`.
    """

    def __init__(self, uuids: Collection[str], holder: str) -> None:
        self.uuids, self.holder = tuple(uuids), holder
        verb = "is" if len(self.uuids) == 1 else "are"
        super().__init__(
            f"{', '.join(self.uuids)} {verb} held by {holder}, which belongs to another pool. "
            "Wait until its runs have ended, or ask for fewer devices."
        )


class DeviceLocks:
    """The locks that this process holds. Use it from one thread.

    Simulated devices (`SIM-...`) belong to one pool: they are accepted everywhere and never locked.

    The descriptors are closed on exec. A plain fork copies them, and the locks last until the last copy is
    closed, so the process that holds them must start others by exec only.

    Args:
        directory: A directory on local disk that all users of the machine share; created with mode 1777 if missing.

    Raises:
        PoolError: The directory can't be created, or is not one in which all users may create files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._directory_fd = _open_directory(directory)
        self._held: dict[str, int] = {}
        # systemd-tmpfiles does not clean up a locked directory, see tmpfiles.d(5)
        with contextlib.suppress(OSError):
            fcntl.flock(self._directory_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    @property
    def held(self) -> frozenset[str]:
        """The devices that this object has locked."""
        return frozenset(self._held)

    def acquire(self, uuids: Collection[str]) -> None:
        """Lock all of `uuids`, or none.

        Raises:
            DevicesLocked: Another process, or another `DeviceLocks`, holds some of them.
            ValueError: One is not a device UUID, is listed twice, or is held here already.
            PoolError: A lock file can't be created or opened, or is not a plain file; the message names it.
        """
        wanted = [uuid for uuid in uuids if _is_real(uuid)]
        twice = {uuid for uuid in wanted if uuid in self._held or wanted.count(uuid) > 1}
        if twice:
            raise ValueError(f"{', '.join(sorted(twice))}: already locked here")
        taken: dict[str, int] = {}
        refused: dict[str, str] = {}
        with contextlib.ExitStack() as undo:
            for uuid in wanted:
                found = self._take(uuid)
                if isinstance(found, str):
                    refused[uuid] = found
                else:
                    taken[uuid] = found
                    undo.callback(_let_go, found)
            if refused:
                raise DevicesLocked(refused, next(iter(refused.values())))
            for fd in taken.values():
                _write_holder(fd)
            undo.pop_all()
        self._held.update(taken)

    def descriptors(self, uuids: Collection[str]) -> list[int]:
        """The descriptors that hold the locks of `uuids`; a copy in another process holds the lock too."""
        return [self._held[uuid] for uuid in uuids if uuid in self._held]

    def take_over(self, uuids: Collection[str], descriptors: Collection[int]) -> None:
        """Take over locks that another process of this pool holds.

        Args:
            uuids: The devices.
            descriptors: Copies of that process's descriptors, in the order of `uuids`.

        Raises:
            ValueError: The numbers of devices and descriptors differ, or a device is held here already.
        """
        self._held.update(zip((uuid for uuid in uuids if uuid not in self._held), descriptors, strict=True))

    def release(self, uuids: Collection[str]) -> None:
        """Unlock those of `uuids` that are held here; ignore the others."""
        for uuid in self._held.keys() & uuids:
            _let_go(self._held.pop(uuid))

    def locked_elsewhere(self, uuids: Collection[str]) -> dict[str, str]:
        """Return those of `uuids` that others hold, with their holders, without locking any.

        Raises:
            ValueError: One is not a device UUID.
            PoolError: A lock file can't be opened, or is not a plain file; the message names it.
        """
        elsewhere = [uuid for uuid in uuids if _is_real(uuid) and uuid not in self._held]
        return {uuid: holder for uuid in elsewhere if (holder := self._holder_of(uuid))}

    def close(self) -> None:
        """Release all locks. May be called repeatedly."""
        self.release(self.held)
        if self._directory_fd >= 0:
            os.close(self._directory_fd)
            self._directory_fd = -1

    # ------------------------------------------------------------ the files

    def _take(self, uuid: str) -> int | str:
        """Return a locked descriptor, or the holder of the lock."""
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
        """The holder of the lock, "" if there is none. Does not take the lock."""
        try:
            fd = self._open_existing(uuid)
        except FileNotFoundError:
            return ""
        try:
            return "" if _try_lock(fd, fcntl.LOCK_SH) else _read_holder(fd)
        finally:
            os.close(fd)

    def _is_current(self, uuid: str, fd: int) -> bool:
        """False if the file was removed or replaced meanwhile: a lock on it would exclude nobody."""
        try:
            there = os.stat(f"{uuid}.lock", dir_fd=self._directory_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(fd))

    def _open(self, uuid: str) -> int:
        while True:
            # O_CREAT on another user's file in a sticky directory fails with EACCES (fs.protected_regular, proc(5)),
            # so it is used only if there is no file
            with contextlib.suppress(FileNotFoundError):
                return self._open_existing(uuid)
            try:
                flags = _OPEN_FLAGS | os.O_CREAT | os.O_EXCL
                fd = os.open(f"{uuid}.lock", flags, _FILE_MODE, dir_fd=self._directory_fd)
            except FileExistsError:
                continue
            except OSError as error:
                raise PoolError(
                    f"the device lock {self._directory / uuid}.lock can't be created: {error.strerror}. "
                    "Free space there, or set SGPU_LOCK_DIR to another directory, the same for all users."
                ) from error
            os.fchmod(fd, _FILE_MODE)  # independent of the umask
            return fd

    def _open_existing(self, uuid: str) -> int:
        """Open the lock file, which must be a plain file with one name.

        A second name would mean that somebody hard-linked another file here to have this process write into it.
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
                        f"the device lock {path} can't be opened by this user. "
                        "Have its owner or root remove it (it is recreated with mode 0666)."
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
    """Write this process into the file as the holder of its lock."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    # the text is only for messages: the lock holds without it, for example on a full disk
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {user} {host_name()}\n".encode(), 0)


def _let_go(fd: int) -> None:
    """Remove the holder's name from the file, and unlock by closing the descriptor."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
    os.close(fd)


def _is_real(uuid: str) -> bool:
    if _UUID.fullmatch(uuid):
        return True
    if _SIMULATED.fullmatch(uuid):
        return False
    raise ValueError(f"{uuid[:100]!r} is not a device UUID")


def _not_plain(path: Path) -> PoolError:
    return PoolError(
        f"the device lock {path} is not a regular file with a single link, so sgpu-magic did not create it. "
        "Have its owner or root remove it."
    )


def _open_directory(path: Path) -> int:
    what = f"the device lock directory {path}"
    remedy = "Have root remove it or `chmod 1777` it, or set SGPU_LOCK_DIR to another, the same for all users."
    made = True
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        made = False
    except OSError as error:
        raise PoolError(f"{what} can't be created: {error.strerror}. {remedy}") from error
    deadline = time.monotonic() + _SETTLE_S
    while True:
        fd = -1
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            # an empty directory of this user may be the leftover of a killed process that had not set its mode yet;
            # a private one in use stays as it is
            if os.fstat(fd).st_uid == os.geteuid() and (made or not os.listdir(fd)):
                os.fchmod(fd, _DIRECTORY_MODE)
            if _can_share(path, fd):
                return fd
            problem = "must let this user create files that others can't remove"
        except PermissionError:
            problem = "can't be opened by this user"
        except OSError as error:
            raise PoolError(f"{what} can't be opened: {error.strerror}. {remedy}") from error
        if fd >= 0:
            os.close(fd)
        if time.monotonic() > deadline:
            raise PoolError(f"{what} {problem}. {remedy}")
        time.sleep(_PAUSE_S)


def _can_share(path: Path, fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return (not mode & stat.S_IWOTH or bool(mode & stat.S_ISVTX)) and os.access(path, os.W_OK | os.X_OK)


def _lock(fd: int) -> bool:
    """Take the lock, or return False at once if somebody holds it.

    A probe holds a shared lock for an instant. A lock that can be shared has no holder, so this retries.
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
    """The holder named in the file. Anybody may write there, so only text of the known form is used."""
    text = os.pread(fd, _HOLDER_BYTES, 0).decode(errors="replace").strip()
    match = _HOLDER.fullmatch(text)
    if match is None or not text.isprintable():
        return "another process"
    pid, user, host = match.groups()
    return f"process {pid} of user {user} on host {host}"
