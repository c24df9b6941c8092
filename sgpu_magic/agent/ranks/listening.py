"""Which ports the processes of a run listen on, from /proc. Linux only: elsewhere there is none."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Collection

from sgpu_magic.agent.ranks.leftovers import RUN_VARIABLE

_LISTENS = "0A"


def address_of(run_id: str, ranks: Collection[int], port: int) -> tuple[str, str]:
    """Find where a process of the run listens on a port.

    Only then it is the run's: whoever else listens on this machine is none of its user's business.

    Args:
        run_id: The run; what it has started is known by a variable.
        ranks: Its ranks' pids, each the id of its session.
        port: The TCP port.

    Returns:
        The address to connect to, and a sentence about why there is none, one of them "".
    """
    sockets = _listening_sockets(port)
    if not sockets:
        return "", f"nothing listens on port {port} there"
    for pid in _processes_of(run_id, ranks):
        for inode in _socket_inodes(pid):
            if inode in sockets:
                return sockets[inode], ""
    return "", f"no process of the run listens on port {port} there"


def _listening_sockets(port: int) -> dict[str, str]:
    """By inode, the address to connect to. Source: proc(5), /proc/net/tcp."""
    found: dict[str, str] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}", encoding="ascii") as file:
            for line in list(file)[1:]:
                fields = line.split()
                local, _, hexadecimal = fields[1].rpartition(":")
                if fields[3] == _LISTENS and int(hexadecimal, 16) == port:
                    found[fields[9]] = _reachable(local)
    return found


def _reachable(local: str) -> str:
    """The kernel writes addresses as words in the machine's byte order."""
    words = [bytes.fromhex(local[at : at + 8])[::-1] for at in range(0, len(local), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    address = mapped or address
    if not address.is_unspecified:
        return str(address)
    return "127.0.0.1" if address.version == 4 else "::1"


def _processes_of(run_id: str, ranks: Collection[int]) -> list[int]:
    """The ranks, what is in their sessions, and what has the run's variable."""
    mark = f"{RUN_VARIABLE}={run_id}".encode()
    own = os.getuid()
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            if os.stat(f"/proc/{entry}").st_uid != own:
                continue
            with open(f"/proc/{entry}/stat", "rb") as file:
                session = int(file.read().rpartition(b")")[2].split()[3])
            if session not in ranks:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    if mark not in file.read().split(b"\0"):
                        continue
            found.append(int(entry))
    return found


def _socket_inodes(pid: int) -> list[str]:
    found: list[str] = []
    with contextlib.suppress(OSError):
        folder = f"/proc/{pid}/fd"
        for descriptor in os.listdir(folder):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{folder}/{descriptor}")
                if target.startswith("socket:["):
                    found.append(target[8:-1])
    return found
