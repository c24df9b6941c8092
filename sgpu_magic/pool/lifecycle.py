"""One pool per user and machine: its lock, its address file, and its shutdown when idle."""

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
from sgpu_magic.config import private_dir
from sgpu_magic.errors import UsageError
from sgpu_magic.files.whole_file import LOCK_FILE, HeldLock, take_lock, write_whole
from sgpu_magic.system.processes import process_start
from sgpu_magic.wire.pool_status import (
    PROTOCOL_VERSION,
    PoolAddress,
    address_file,
    agent_socket_file,
    lock_file,
    socket_file,
)

_LOOK_S = 2.0
_WARN_BEFORE_S = 300.0


class AlreadyRunning(Exception):
    """Another pool of this user holds the lock."""


class PoolPresence:
    """The pool's lock, socket path and address file.

    Args:
        runtime: The private runtime directory.
        state: The state directory. A lock in it remains when the runtime directory is removed while the pool runs, as
            at a logout.

    Raises:
        AlreadyRunning: Another pool holds the lock.
    """

    def __init__(self, runtime: Path, state: Path) -> None:
        self._runtime = runtime
        self._lock: HeldLock | None = None
        self._state_lock: HeldLock | None = None
        with contextlib.suppress(OSError):
            # without it if the disk accepts no file
            self._state_lock = _locked(lock_file(state))
        try:
            self._lock = _locked(lock_file(runtime))
        except BaseException:
            self._close()
            raise
        self.socket_path = socket_file(runtime)
        # what a killed pool left
        for stale in (self.socket_path, address_file(runtime)):
            stale.unlink(missing_ok=True)

    def keep_in_place(self, listen: Callable[[], None], failed: Callable[[str, Exception], None]) -> None:
        """Check regularly that clients can find the pool, and restore what was removed.

        Args:
            listen: Listens at the socket's path again.
            failed: Called with a sentence and the error when restoring fails; the next check tries again.
        """
        if self._lock is None:
            # the pool has withdrawn
            return
        try:
            if not self._lock.is_at(lock_file(self._runtime)):
                private_dir(self._runtime)
                lock = _locked(lock_file(self._runtime))
                self._lock.close()
                self._lock = lock
                listen()
                self.announce()
        except (OSError, UsageError, AlreadyRunning) as error:
            failed("its runtime directory was removed and can't be recreated", error)
        asyncio.get_running_loop().call_later(_LOOK_S, self.keep_in_place, listen, failed)

    def announce(self) -> None:
        """Write the address file, by which clients find the pool."""
        address = PoolAddress(
            pid=os.getpid(),
            process_start=process_start(os.getpid()),
            protocol_version=PROTOCOL_VERSION,
            package_version=__version__,
            started_at=time.time(),
        )
        write_whole(address_file(self._runtime), msgspec.json.encode(address))

    def hand_over(self) -> None:
        """Release the lock for the next pool, which finds the agent by its socket."""
        with contextlib.suppress(OSError):
            address_file(self._runtime).unlink()
        self._close()

    def withdraw(self) -> None:
        """Remove the address file and the sockets, then release the lock, which shows that the pool has ended."""
        with contextlib.suppress(OSError):
            address_file(self._runtime).unlink()
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


def _locked(path: Path) -> HeldLock:
    if (lock := take_lock(path, wait=False, flags=LOCK_FILE)) is None:
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
        self,
        idle_s: float,
        in_use: Callable[[], bool],
        warn: Callable[[str], None],
        give_back: Callable[[], None],
    ) -> None:
        self._idle_s = idle_s
        self._warn_s = min(_WARN_BEFORE_S, idle_s / 4)
        self._in_use = in_use
        self._warn = warn
        self._give_back = give_back
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._warned = False
        self._timer = self._loop.call_later(self._look_s, self._look)

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

    @property
    def _look_s(self) -> float:
        return max(0.1, min(30.0, self._warn_s / 2))

    def _look(self) -> None:
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
        self._timer = self._loop.call_later(self._look_s, self._look)
