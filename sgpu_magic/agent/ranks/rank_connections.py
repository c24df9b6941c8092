"""Find the connections between the ranks of a run, so that each rank can shut its own ends down.

SIGINT does not interrupt a gloo collective and `abort` does not release it. What does is the loss of its
connections: every rank then gets a RuntimeError within milliseconds. Only connections whose two ends both belong
to ranks of the run are taken; listeners and the user's own connections are left alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

_ESTABLISHED = "01"


def connections_between(pids: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Return for each process its descriptors that are connected to another one of `pids`. Linux only."""
    owner: dict[str, tuple[int, int]] = {}
    for pid in pids:
        directory = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            for entry in os.listdir(directory):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"{directory}/{entry}")
                    if target.startswith("socket:["):
                        owner[target[8:-1]] = (pid, int(entry))
    found: dict[int, list[int]] = {}
    ends = _established_connections()
    for (local, remote), inode in ends.items():
        other = ends.get((remote, local))
        if inode in owner and other in owner:
            pid, fd = owner[inode]
            found.setdefault(pid, []).append(fd)
    return {pid: tuple(fds) for pid, fds in found.items()}


def _established_connections() -> dict[tuple[str, str], str]:
    """(local address, remote address) -> inode of every TCP connection on this machine."""
    ends: dict[tuple[str, str], str] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as file:
            next(file, None)
            for line in file:
                fields = line.split()
                if fields[3] == _ESTABLISHED:
                    ends[fields[1], fields[2]] = fields[9]
    return ends
