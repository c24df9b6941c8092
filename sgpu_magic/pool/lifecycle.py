"""One local pool per user and machine: a lock while it lives, a file that says where it is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

import msgspec

from sgpu_magic import __version__
from sgpu_magic.protocol.address import (
    PoolAddress,
    address_file,
    agent_socket_file,
    lock_file,
    process_start,
    socket_file,
)
from sgpu_magic.protocol.messages import PROTOCOL_VERSION


class AlreadyRunning(Exception):
    """Another pool of this user holds the lock."""


class PoolPresence:
    """The pool's lock, socket path and address file.

    Args:
        runtime: The private runtime directory.

    Raises:
        AlreadyRunning: A living pool has the lock.
    """

    def __init__(self, runtime: Path) -> None:
        self._runtime = runtime
        self._lock = os.open(lock_file(runtime), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise AlreadyRunning from None
        self.socket_path = socket_file(runtime)
        # what a killed pool left
        for stale in (self.socket_path, address_file(runtime)):
            stale.unlink(missing_ok=True)

    def announce(self) -> None:
        """From now on clients find the pool."""
        address = PoolAddress(
            pid=os.getpid(),
            process_start=process_start(os.getpid()),
            protocol_version=PROTOCOL_VERSION,
            package_version=__version__,
            started_at=time.time(),
        )
        file = address_file(self._runtime)
        temporary = file.with_suffix(".part")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as stream:
            stream.write(msgspec.json.encode(address))
        os.replace(temporary, file)

    def hand_over(self) -> None:
        """Make way for the next pool, which finds the agent by its socket."""
        with contextlib.suppress(OSError):
            address_file(self._runtime).unlink()
        os.close(self._lock)

    def withdraw(self) -> None:
        """No new client shall find the pool; those that wait for its end see the lock go last."""
        with contextlib.suppress(OSError):
            address_file(self._runtime).unlink()
        # the agent's goes with the agent, unless that was killed
        for path in (self.socket_path, agent_socket_file(self._runtime)):
            with contextlib.suppress(OSError):
                path.unlink()
        os.close(self._lock)
