"""One pool per state directory: its lock, its address file, and its shutdown when idle."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from sgpu_magic import __version__
from sgpu_magic.config import SET_IN_NOTEBOOK, Settings, host_name, private_dir
from sgpu_magic.errors import UsageError
from sgpu_magic.files.atomic_file import read_json, write_whole
from sgpu_magic.files.locks import HeldLock, take_lock_or_none
from sgpu_magic.system.processes import boot_id, process_start
from sgpu_magic.wire.pool_status import (
    PROTOCOL_VERSION,
    PoolAddress,
    address_file,
    agent_socket_file,
    lock_file,
    socket_file,
)

_POLL_S = 2.0
_WARN_BEFORE_S = 300.0


class AlreadyRunning(Exception):
    """Another pool has this state directory."""


def with_socket_directory(settings: Settings) -> Settings:
    """Return settings that name the directory of the pool's sockets, for all its processes.

    If no setting names it, the previous pool's directory is used, since its agent may wait there with its runs: the
    environment of the session that starts this pool may name another one.
    """
    if settings.runtime_dir:
        return settings
    before = read_json(address_file(settings.state_path), PoolAddress)
    runtime = settings.runtime_path
    if before is not None and before.runtime:
        with contextlib.suppress(OSError, UsageError):
            if Path(before.runtime).is_dir():
                runtime = private_dir(Path(before.runtime))
    return msgspec.structs.replace(settings, runtime_dir=str(runtime))


class PoolPresence:
    """The pool's locks, socket path and address file.

    A state directory has one pool: it is running while the lock there is held, and the address file beside the lock
    names the directory of its sockets. A lock in that directory keeps two pools from sharing it.

    Args:
        runtime: The private directory of sockets.
        state: The state directory.

    Raises:
        AlreadyRunning: Another pool has the state directory.
        UsageError: The pool of another state directory uses this directory of sockets.
    """

    def __init__(self, runtime: Path, state: Path) -> None:
        self._runtime = runtime
        self._state = state
        self._lock: HeldLock | None = None
        self._state_lock: HeldLock | None = None
        self._withdrawn = False
        try:
            # if the state directory accepts no files, the runtime directory has the only lock and the address file
            with contextlib.suppress(OSError):
                self._state_lock = _locked(lock_file(state))
            if (lock := take_lock_or_none(lock_file(runtime))) is None:
                if self._state_lock is None or _state_of(runtime) == str(state):
                    # the other pool's state directory was removed, and that pool is about to recreate it
                    raise AlreadyRunning(f"another pool holds {lock_file(runtime)}")
                raise UsageError(
                    f"the pool of another state directory has its sockets in {runtime}. Set SGPU_RUNTIME_DIR to "
                    f"another directory {SET_IN_NOTEBOOK}, or unset it: then each state directory has its own."
                )
            self._lock = lock
            _name_state(lock, state)
        except BaseException:
            self._close()
            raise
        # remove what a killed pool left behind
        for stale in (self.socket_path, address_file(runtime), address_file(state)):
            with contextlib.suppress(OSError):
                stale.unlink(missing_ok=True)

    @property
    def socket_path(self) -> Path:
        return socket_file(self._runtime)

    def restore_files(self, listen: Callable[[Path], None], failed: Callable[[str, Exception], None]) -> None:
        """Check regularly that clients can find the pool, and restore what was removed.

        Args:
            listen: Listens at the socket's path again.
            failed: Called with a sentence and the error when restoring fails; the next check tries again.
        """
        if self._withdrawn or self._lock is None:
            return
        try:
            if not self._lock.is_at(lock_file(self._runtime)):
                self._replace_runtime()
                listen(self.socket_path)
                self.announce()
            if self._state_lock is not None and not self._state_lock.is_at(lock_file(self._state)):
                # the lock file was removed, or hidden by a mount
                lock = _locked(lock_file(private_dir(self._state)))
                self._state_lock.close()
                self._state_lock = lock
                self.announce()
            if not any(address_file(directory).exists() for directory in (self._state, self._runtime)):
                self.announce()
        except (OSError, UsageError, AlreadyRunning) as error:
            failed("one of its directories was removed and can't be recreated", error)
        asyncio.get_running_loop().call_later(_POLL_S, self.restore_files, listen, failed)

    def _replace_runtime(self) -> None:
        try:
            runtime = private_dir(self._runtime)
        except (OSError, UsageError):
            # for example, the system removes a user's runtime directory with its parent at logout
            runtime = private_dir(Settings(state_dir=str(self._state)).runtime_path)
        lock = _locked(lock_file(runtime))
        _name_state(lock, self._state)
        if self._lock is not None:
            self._lock.close()
        self._lock, self._runtime = lock, runtime

    def announce(self) -> None:
        """Write the address file, by which clients find the pool."""
        address = PoolAddress(
            pid=os.getpid(),
            process_start=process_start(os.getpid()),
            protocol_version=PROTOCOL_VERSION,
            package_version=__version__,
            started_at=time.time(),
            runtime=str(self._runtime),
            host=host_name(),
            boot=boot_id(),
        )
        try:
            if self._state_lock is None:
                raise OSError("the state directory accepts no file")
            write_whole(address_file(self._state), msgspec.json.encode(address))
        except OSError:
            # on a full disk, use the runtime directory: clients search it too
            write_whole(address_file(self._runtime), msgspec.json.encode(address))

    def conceal(self) -> None:
        """Remove the address, so that clients wait for the end of this pool and start the next."""
        self._withdrawn = True
        for directory in (self._state, self._runtime):
            with contextlib.suppress(OSError):
                address_file(directory).unlink()

    def hand_over(self) -> None:
        """Release the locks for the next pool, which finds the agent where this address says."""
        self._withdrawn = True
        self._close()

    def withdraw(self) -> None:
        """Remove the address file and the sockets, then release the locks, which shows that the pool has ended."""
        self.conceal()
        # the agent removes its own socket, unless it was killed
        for path in (self.socket_path, agent_socket_file(self._runtime)):
            with contextlib.suppress(OSError):
                path.unlink()
        self._close()

    def _close(self) -> None:
        for lock in (self._lock, self._state_lock):
            if lock is not None:
                lock.close()
        self._lock = self._state_lock = None


def _name_state(lock: HeldLock, state: Path) -> None:
    """Write the state directory of the pool that owns a directory of sockets into the directory's lock file."""
    # the lock is valid without this text, for example on a full disk
    with contextlib.suppress(OSError):
        os.ftruncate(lock.fileno(), 0)
        os.pwrite(lock.fileno(), os.fsencode(state), 0)


def _state_of(runtime: Path) -> str:
    """Return the state directory of the pool that has its sockets in a directory; "" if it is unknown."""
    try:
        return os.fsdecode(lock_file(runtime).read_bytes())
    except OSError:
        return ""


def _locked(path: Path) -> HeldLock:
    if (lock := take_lock_or_none(path)) is None:
        raise AlreadyRunning(f"another pool holds {path}")
    return lock


class Idleness:
    """Ends the pool after a period without runs and requests.

    Args:
        idle_s: Idle seconds after which the pool ends; infinite for never.
        in_use: Returns whether any run is active.
        warn: Sends a notice to all connected clients; "" clears it.
        give_back: Ends the pool.
    """

    def __init__(
        self, idle_s: float, in_use: Callable[[], bool], warn: Callable[[str], None], give_back: Callable[[], None]
    ) -> None:
        self._idle_s = idle_s
        self._warn_s = min(_WARN_BEFORE_S, idle_s / 4)
        self._interval_s = max(0.1, min(30.0, self._warn_s / 2))
        self._in_use = in_use
        self._warn = warn
        self._give_back = give_back
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._warned = False
        self._timer = self._loop.call_later(self._interval_s, self._check)

    @property
    def ends_at(self) -> float | None:
        """Wall-clock time at which the pool ends if nothing happens, None while it is in use."""
        if self._in_use() or self._idle_s == math.inf:
            return None
        return time.time() + max(0.0, self._idle_s - (self._loop.time() - self._since))

    def touched(self) -> None:
        """Restart the idle period, because a client or a run used the pool."""
        self._since = self._loop.time()
        if self._warned:
            self._warned = False
            self._warn("")

    def close(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        if self._in_use():
            self.touched()
        idle_s = self._loop.time() - self._since
        if idle_s > self._idle_s:
            self._give_back()
            return
        if idle_s > self._idle_s - self._warn_s and not self._warned:
            self._warned = True
            left = self._idle_s - idle_s
            span = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
            self._warn(
                f"the pool has been idle for {idle_s / 60:.0f} min and ends its processes in {span}; "
                "the next run starts them again"
            )
        self._timer = self._loop.call_later(self._interval_s, self._check)
