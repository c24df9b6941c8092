"""Device locks as files in a directory that pools share: for pools in containers that share no network namespace.

A lock is flock(2) on `<uuid>.lock`. The kernel releases it when the process that holds it exits, so nothing has to be
cleaned up after a kill; the files stay.

The directory is not trusted: other users may place links, pipes and directories there, and remove or write files at
any time. Tampering with one lock affects only that device; tampering with the directory affects all devices.
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
from sgpu_magic.nodes.lock_obstacle import SOMEBODY, Obstacle

_HOLDER = re.compile(r"(\d{1,10}) (\S{1,64}) (\S{1,64})")
_HOLDER_BYTES = 200

_DIRECTORY_MODE = 0o1777
_FILE_MODE = 0o666
# O_NONBLOCK: opening a FIFO that another user placed there must not block before fstat detects it
_OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
# another process may have created a file or directory and not set its mode yet, or may be probing a lock
_SETTLE_S = 0.5
_PROBE_S = 1.0
_PAUSE_S = 0.002
# interval between attempts to open a directory or file that could not be opened, so that probes are not delayed
_TRIED_AGAIN_S = 5.0


class _Unusable(Exception):
    """A lock can't be used. Its text is the reason and the remedy."""


class LockFiles:
    """Takes and probes locks. Use it from one thread.

    The descriptors are closed on exec. A plain fork copies them, and the locks last until the last copy is
    closed, so the process that holds them must start others by exec only.

    Args:
        directory: A directory on local disk that all users of the machine share; created with mode 1777 if missing.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._directory_fd = -1
        # (reason, time of the next attempt) by the name of what can't be opened; "" is the directory
        self._refused: dict[str, tuple[str, float]] = {}

    def take(self, uuid: str) -> int | Obstacle:
        """Return a descriptor that holds the device's lock, or why there is none."""
        try:
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
                    return Obstacle(holder=holder)
        except _Unusable as error:
            return Obstacle(problem=str(error))
        except OSError as error:
            # for example, no locks are left, or the file system does not support them
            return Obstacle(problem=f"the device lock {self._path(uuid)} can't be used: {error.strerror}.")

    def obstacle(self, uuid: str) -> Obstacle | None:
        """Return why the device can't be locked, None if it can. Does not take the lock."""
        try:
            fd = self._open_existing(uuid)
        except FileNotFoundError:
            return None
        except _Unusable as error:
            return Obstacle(problem=str(error))
        try:
            return None if _try_lock(fd, fcntl.LOCK_SH) else Obstacle(holder=_read_holder(fd))
        except OSError as error:
            return Obstacle(problem=f"the device lock {self._path(uuid)} can't be used: {error.strerror}.")
        finally:
            os.close(fd)

    def holding(self, descriptor: int) -> None:
        """Write this process into the file as the holder of its lock."""
        _write_holder(descriptor)

    def adopt(self, descriptor: int) -> None:
        """Write this process into the file of a lock that another process has taken."""
        _write_holder(descriptor)

    def release(self, descriptor: int) -> None:
        """Remove the holder's name from the file, and close this process's copy of the lock."""
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)

    def close(self) -> None:
        if self._directory_fd >= 0:
            os.close(self._directory_fd)
            self._directory_fd = -1

    # ------------------------------------------------------------ internals

    def _path(self, uuid: str) -> Path:
        return self._directory / f"{uuid}.lock"

    def _refuse(self, name: str, why: str) -> _Unusable:
        self._refused[name] = why, time.monotonic() + _TRIED_AGAIN_S
        return _Unusable(why)

    def _check_if_refused(self, name: str) -> None:
        """Raise the known reason why something can't be opened, until it is time to try it again."""
        if name in self._refused:
            why, until = self._refused[name]
            if time.monotonic() < until:
                raise _Unusable(why)
            del self._refused[name]

    def _open_directory(self) -> int:
        """Return a descriptor of the directory; make the directory if there is none."""
        if self._directory_fd < 0:
            self._check_if_refused("")
            try:
                self._directory_fd = _open_directory(self._directory)
            except _Unusable as error:
                raise self._refuse("", str(error)) from error
            # systemd-tmpfiles does not clean up a locked directory, see tmpfiles.d(5)
            with contextlib.suppress(OSError):
                fcntl.flock(self._directory_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return self._directory_fd

    def _is_current(self, uuid: str, fd: int) -> bool:
        """False if the file was removed or replaced meanwhile: a lock on it would exclude no process."""
        try:
            there = os.stat(f"{uuid}.lock", dir_fd=self._open_directory(), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(fd))

    def _open(self, uuid: str) -> int:
        directory = self._open_directory()
        while True:
            # O_CREAT on another user's file in a sticky directory fails with EACCES (fs.protected_regular, proc(5)),
            # so it is used only if there is no file
            with contextlib.suppress(FileNotFoundError):
                return self._open_existing(uuid)
            try:
                flags = _OPEN_FLAGS | os.O_CREAT | os.O_EXCL
                fd = os.open(f"{uuid}.lock", flags, _FILE_MODE, dir_fd=directory)
            except FileExistsError:
                continue
            except OSError as error:
                raise self._refuse(
                    uuid,
                    f"the device lock {self._path(uuid)} can't be created: {error.strerror}. "
                    "Free space there, or set SGPU_LOCK_DIR to another directory, the same for all users.",
                ) from error
            os.fchmod(fd, _FILE_MODE)  # independent of the umask
            return fd

    def _open_existing(self, uuid: str) -> int:
        """Open the lock file, which must be a plain file with one name.

        A second name would mean that another user hard-linked a file here to have this process write into it.
        """
        directory = self._open_directory()
        self._check_if_refused(uuid)
        path = self._path(uuid)
        deadline = time.monotonic() + _SETTLE_S
        while True:
            try:
                fd = os.open(path.name, _OPEN_FLAGS, dir_fd=directory)
                break
            except FileNotFoundError:
                raise
            except PermissionError as error:
                if time.monotonic() < deadline and _is_new(path.name, directory):
                    time.sleep(_PAUSE_S)
                    continue
                raise self._refuse(
                    uuid,
                    f"the device lock {path} can't be opened by this user. "
                    "Have its owner or root remove it (it is recreated with mode 0666).",
                ) from error
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                    raise self._refuse(uuid, _not_plain(path)) from error
                raise self._refuse(uuid, f"the device lock {path} can't be opened: {error.strerror}.") from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(fd)
            raise self._refuse(uuid, _not_plain(path))
        return fd


def _is_new(path: Path | str, directory: int | None) -> bool:
    """Whether a file or folder may have been created this moment, before its mode is set."""
    with contextlib.suppress(OSError):
        changed_at = os.stat(path, dir_fd=directory, follow_symlinks=False).st_ctime
        return abs(time.time() - changed_at) < _SETTLE_S
    return True


def _write_holder(fd: int) -> None:
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    # the text is only for messages: the lock holds without it, for example on a full disk
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, os.fsencode(f"{os.getpid()} {user} {host_name()}\n"), 0)


def _read_holder(fd: int) -> str:
    """Return the holder named in the file. Anybody may write there, so only text of the known form is used."""
    text = os.pread(fd, _HOLDER_BYTES, 0).decode(errors="replace").strip()
    match = _HOLDER.fullmatch(text)
    if match is None or not text.isprintable():
        return SOMEBODY
    pid, user, host = match.groups()
    return f"process {pid} of user {user} on host {host}"


def _not_plain(path: Path) -> str:
    return (
        f"the device lock {path} is not a regular file with a single link, so sgpu-magic did not create it. "
        "Have its owner or root remove it."
    )


def _open_directory(path: Path) -> int:
    """Return a descriptor of the directory; make it if there is none."""
    what = f"the device lock directory {path}"
    remedy = "Have root remove it or `chmod 1777` it, or set SGPU_LOCK_DIR to another, the same for all users."
    made = True
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        made = False
    except OSError as error:
        raise _Unusable(f"{what} can't be created: {error.strerror}. {remedy}") from error
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
            raise _Unusable(f"{what} can't be opened: {error.strerror}. {remedy}") from error
        if fd >= 0:
            os.close(fd)
        if time.monotonic() > deadline or not _is_new(path, None):
            raise _Unusable(f"{what} {problem}. {remedy}")
        time.sleep(_PAUSE_S)


def _can_share(path: Path, fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return (not mode & stat.S_IWOTH or bool(mode & stat.S_ISVTX)) and os.access(path, os.W_OK | os.X_OK)


def _lock(fd: int) -> bool:
    """Take the lock, or return False at once if another process holds it.

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
