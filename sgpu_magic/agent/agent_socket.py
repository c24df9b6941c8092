"""The sockets on which the agent accepts a restarted pool service, and notebooks with sessions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from sgpu_magic.system import processes


class AgentSocket:
    """A Unix socket in the private runtime directory, on which the agent accepts processes of the same user.

    Args:
        path: The socket's path; the socket of a killed agent is removed.
        came: Called with each connection.
        lock: A file whose lock the peer must hold; None checks only the user.
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
        """Whether the peer is accepted. True where the system can't tell: the directory is private."""
        peer = processes.peer_of(connection)
        if peer is None:
            return True
        if peer.uid != os.getuid():
            return False
        # any other process would displace the pool that holds the lock
        return self._lock is None or processes.flock_holder(self._lock) in (0, peer.pid)
