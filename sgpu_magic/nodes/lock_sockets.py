"""Device locks as names of Unix sockets in the abstract namespace (unix(7)), which all users of the machine share.

The process that has bound a device's name holds the device. The kernel refuses the name to all others, and frees it
when the last copy of the descriptor is closed. There is no file: nothing depends on TMPDIR or on which /tmp a process
sees, no user can replace a lock by a link or take away a permission, and nothing is left to clean up.

The namespace belongs to the network namespace. Pools in containers that have networks of their own do not see each
other's locks; `lock_dir` names a directory that they share (`lock_files`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import socket

from sgpu_magic.nodes.lock_obstacle import SOMEBODY, Obstacle
from sgpu_magic.system.processes import peer_of

_NAME = "\0sgpu-magic/device/{}"
# a process that queries the holder connects, and stays connected until the holder releases the lock
_BACKLOG = 4096
_REMEDY = (
    "Have what confines this process (AppArmor, seccomp) allow it, or set SGPU_LOCK_DIR to a directory, the same for "
    "all users."
)


class LockSockets:
    """Takes and probes locks. Use it from one thread."""

    def __init__(self) -> None:
        # connections to the holders of devices; each ends when its holder releases the lock
        self._holders: dict[str, tuple[socket.socket, Obstacle]] = {}

    def take(self, uuid: str) -> int | Obstacle:
        """Return a descriptor that holds the device's lock, or why there is none."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.bind(_NAME.format(uuid))
            made.listen(_BACKLOG)
        except OSError as error:
            made.close()
            if error.errno == errno.EADDRINUSE:
                return self.obstacle(uuid) or Obstacle(holder=SOMEBODY)
            return _unusable(uuid, error)
        return made.detach()

    def obstacle(self, uuid: str) -> Obstacle | None:
        """Return why the device can't be locked, None if it can. Does not take the lock."""
        if uuid in self._holders:
            connection, known = self._holders[uuid]
            if _is_open(connection):
                return known
            connection.close()
            del self._holders[uuid]
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect(_NAME.format(uuid))
        except ConnectionRefusedError:
            found = None
        except BlockingIOError:
            # the holder's backlog is full of processes that query it
            found = Obstacle(holder=SOMEBODY)
        except OSError as error:
            found = _unusable(uuid, error)
        else:
            found = Obstacle(holder=_peer(connection))
            self._holders[uuid] = connection, found
            return found
        connection.close()
        return found

    def adopt(self, descriptor: int) -> None:
        """Become the process that others see as the holder, with a lock that another process has taken."""
        handed = socket.socket(fileno=descriptor)
        try:
            # `listen` records this process's credentials, which SO_PEERCRED reports to peers
            with contextlib.suppress(OSError):
                handed.listen(_BACKLOG)
        finally:
            handed.detach()

    def holding(self, descriptor: int) -> None:
        """Do nothing: the kernel already reports this process as the holder."""

    def release(self, descriptor: int) -> None:
        """Close this process's copy of a lock."""
        os.close(descriptor)

    def close(self) -> None:
        for connection, _ in self._holders.values():
            connection.close()
        self._holders.clear()


def _is_open(connection: socket.socket) -> bool:
    """Whether the other end still has the socket: nothing is ever sent, so a read returns only at end of file."""
    try:
        connection.recv(1)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _peer(connection: socket.socket) -> str:
    peer = peer_of(connection)
    if peer is None:
        return SOMEBODY
    try:
        user = pwd.getpwuid(peer.uid).pw_name
    except KeyError:
        user = str(peer.uid)
    process = f"process {peer.pid}" if peer.pid else "a process that this one can't see (in another container)"
    return f"{process} of user {user}"


def _unusable(uuid: str, error: OSError) -> Obstacle:
    return Obstacle(problem=f"the machine's lock of {uuid} can't be used: {error.strerror}. {_REMEDY}")
