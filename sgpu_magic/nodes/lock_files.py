"""The files behind the device locks: one for each device, in a directory that all users of the machine share.

Nobody can be trusted there: links, pipes and directories may be laid in the way, and files may be removed or written by
anybody at any time.
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
from pathlib import Path

from sgpu_magic.config import host_name
from sgpu_magic.errors import PoolError

UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z-]{1,80}")
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


class LockFiles:
    """Opens and locks them. A lock is held for as long as its descriptor is open, here or as a copy.

    Args:
        directory: On local disk; made with mode 1777 when missing.

    Raises:
        PoolError: It can't be made or is not a directory in which all users may make files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._directory_fd = _open_directory(directory)
        # systemd-tmpfiles leaves alone a directory that somebody has locked, tmpfiles.d(5)
        with contextlib.suppress(OSError):
            fcntl.flock(self._directory_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def take(self, uuid: str) -> tuple[int | None, str]:
        """Return a locked descriptor, or None and who holds the lock.

        Raises:
            PoolError: The file is not what it should be; the message names it.
        """
        while True:
            fd = self._open(uuid)
            try:
                if not _lock(fd):
                    holder = _read_holder(fd)
                    os.close(fd)
                    return None, holder
                if self._is_current(uuid, fd):
                    return fd, ""
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def held_by(self, uuid: str) -> str:
        """Who holds the lock, "" when nobody does. Locks nothing.

        Raises:
            PoolError: The file is not what it should be; the message names it.
        """
        try:
            fd = self._open_existing(uuid)
        except FileNotFoundError:
            return ""
        try:
            return "" if _try_lock(fd, fcntl.LOCK_SH) else _read_holder(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let the directory go. Locks that were taken stay. May be called again."""
        if self._directory_fd >= 0:
            os.close(self._directory_fd)
            self._directory_fd = -1

    def _is_current(self, uuid: str, fd: int) -> bool:
        """False when somebody removed the file meanwhile: a lock on it would lock nobody out."""
        try:
            there = os.stat(_file_name(uuid), dir_fd=self._directory_fd, follow_symlinks=False)
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
                fd = os.open(
                    _file_name(uuid),
                    _OPEN_FLAGS | os.O_CREAT | os.O_EXCL,
                    _FILE_MODE,
                    dir_fd=self._directory_fd,
                )
            except FileExistsError:
                continue
            except OSError as error:
                raise PoolError(
                    f"the device lock {self._directory / _file_name(uuid)} can't be made: {error.strerror}. "
                    "Make room there or set SGPU_LOCK_DIR, alike for all users, to another directory."
                ) from error
            os.fchmod(fd, _FILE_MODE)  # whatever the umask took away
            return fd

    def _open_existing(self, uuid: str) -> int:
        """Open the lock file, which must be a plain file with one name.

        A second name would mean that somebody linked another file here to have us write into it.
        """
        path = self._directory / _file_name(uuid)
        deadline = time.monotonic() + _SETTLE_S
        while True:
            try:
                fd = os.open(_file_name(uuid), _OPEN_FLAGS, dir_fd=self._directory_fd)
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


def write_holder(fd: int) -> None:
    """Write into the file that this process holds its lock."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    # the text is for a message only: on a full disk the lock holds without it
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {user} {host_name()}\n".encode(), 0)


def let_go(fd: int) -> None:
    """Unlock by closing the descriptor, and take the holder's name out of the file."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
    os.close(fd)


def _file_name(uuid: str) -> str:
    if not UUID.fullmatch(uuid):
        raise ValueError(f"{uuid[:100]!r} is no GPU's UUID")
    return f"{uuid}.lock"


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
