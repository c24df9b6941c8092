"""Process plumbing that every kind of process needs: prctl, thread count, descendants."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_THP_DISABLE = 41
_MADV_COLLAPSE = 25
_CREDENTIALS = struct.Struct("3i")
_HUGE_PAGE = 2 << 20
_LOOK_AGAIN_S = 0.005
_LINUX = sys.platform == "linux"


def become_subreaper(on: bool = True) -> None:
    """Let orphaned descendants become our children instead of init's, so that none escapes; or no longer."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Get SIGKILL when the parent ends. Exits at once when it is gone already."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class Peer(NamedTuple):
    """Who is at the other end of a socket."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer | None:
    """Return who has connected, None where the system does not tell (SO_PEERCRED, unix(7))."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return Peer(pid, uid)


def flock_holder(path: Path) -> int:
    """Return the process that holds a file's `flock`; 0 when that is not told (proc_locks(5))."""
    try:
        inode = f":{path.stat().st_ino}"
        fields = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return 0
    # 1: FLOCK ADVISORY WRITE 708 08:02:13 0 EOF; who waits for it has an arrow behind the number
    held = [line for line in fields if len(line) > 5 and line[1] == "FLOCK" and line[5].endswith(inode)]
    return int(held[0][4]) if held and held[0][4].isdigit() else 0


def signal_name(number: int) -> str:
    """Return `SIGKILL`; `signal 35` for one that has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not: in a container nobody may reap it."""
    if _LINUX:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
        except OSError:
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def may_be_alive(pid: int, host: str) -> bool:
    """Whether a process of a machine may live: one of another machine (`config.host_name()`) can't be looked at."""
    return host != (socket.gethostname().split(".")[0] or "localhost") or is_alive(pid)


def collapse_pages() -> None:
    """Gather this process's memory into huge pages where Linux (6.1 or newer) can.

    A fork copies page tables; with huge pages there are fewer, and it takes 1.0 ms instead of 1.7 (3.1 with none).
    """
    if not _LINUX:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps]
    for fields in regions:
        anonymous = fields[4] == "0" and (len(fields) == 5 or fields[5] == "[heap]")
        if anonymous and fields[1] == "rw-p":
            begin, end = (int(bound, 16) for bound in fields[0].split("-"))
            begin = -(-begin // _HUGE_PAGE) * _HUGE_PAGE
            end = end // _HUGE_PAGE * _HUGE_PAGE
            if end > begin:
                # refused where the system has no huge pages to give: forks are then merely slower
                madvise(begin, end - begin, _MADV_COLLAPSE)


def allow_huge_pages(allowed: bool) -> None:
    """Whether memory that this process touches for the first time may come as huge pages. Linux only.

    A process that only waits takes 2 MB for each corner of its heap otherwise. Pages that it has stay as they are.
    """
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, int(not allowed), 0, 0, 0)


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count() -> int:
    """Threads of this process, C and C++ ones included."""
    if _LINUX:
        return len(os.listdir("/proc/self/task"))
    import threading

    return threading.active_count()


def descendants(root: int) -> list[int]:
    """Pids below `root`, parents first. Linux only; elsewhere empty."""
    if not _LINUX:
        return []
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with (
                contextlib.suppress(OSError, IndexError, ValueError),
                open(f"/proc/{entry}/stat", "rb") as file,
            ):
                # the command in parentheses may hold blanks; the parent is the second field after it
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    level = [root]
    while level:
        level = [child for parent in level for child in children.get(parent, ())]
        found += level
    return found


def kill_descendants() -> None:
    """Kill and reap everything below this process. As a subreaper it also gets what its children leave behind.

    Looked for anew until nothing is there: a child may be forked between the look and its parent's death.
    """
    while pids := descendants(os.getpid()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
            # they need a moment to die
            time.sleep(_LOOK_AGAIN_S)
