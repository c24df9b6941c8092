"""The agent's own socket, through which a pool service that was started again comes back to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from sgpu_magic import processes


class Door:
    """Listens on a Unix socket in the private runtime directory and lets processes of the same user in.

    Args:
        path: The socket's path; what a killed agent left there is removed.
        came: Called with each connection.
    """

    def __init__(self, path: Path, came: Callable[[socket.socket], None]) -> None:
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
        if _uid(connection) == os.getuid():
            self._came(connection)
        else:
            connection.close()


def _uid(connection: socket.socket) -> int:
    """The user at the other end; our own where the system does not tell: the directory is private."""
    peer = processes.peer_of(connection)
    return peer.uid if peer is not None else os.getuid()
