"""The agent's own socket, through which a pool service that was started again comes back to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from sgpu_magic.system import processes


class Door:
    """Listens on a Unix socket in the private runtime directory and lets processes of the same user in.

    Args:
        path: The socket's path; what a killed agent left there is removed.
        came: Called with each connection.
        lock: Who comes holds this file's lock; None asks for no more than the user.
    """

    def __init__(self, path: Path, came: Callable[[socket.socket], None], lock: Path | None = None) -> None:
        self._lock = lock
        self._path = path
        self._came = came
        self._loop = asyncio.get_running_loop()
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.listen(4)
        self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return
        if self._is_welcome(connection):
            self._came(connection)
        else:
            connection.close()

    def _is_welcome(self, connection: socket.socket) -> bool:
        """Whether it is a pool's. Where the system does not tell it is: the directory is private."""
        peer = processes.peer_of(connection)
        if peer is None:
            return True
        if peer.uid != os.getuid():
            return False
        # anybody else would take the place of the pool that is there
        holder = processes.flock_holder(self._lock) if self._lock is not None else 0
        return holder in (0, peer.pid)
