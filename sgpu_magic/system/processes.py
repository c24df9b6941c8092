"""Processes and memory: prctl, thread and core counts, descendants, socket peers, the log of a service, free memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

IS_LINUX = sys.platform == "linux"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_THP_DISABLE = 41
_MADV_DONTNEED = 4
_MADV_COLLAPSE = 25
_CREDENTIALS = struct.Struct("3i")
_HUGE_PAGE = 2 << 20
_LOOK_AGAIN_S = 0.005


def become_subreaper(on: bool = True) -> None:
    """Make orphaned descendants children of this process instead of init's (PR_SET_CHILD_SUBREAPER), or stop that."""
    if IS_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Get SIGKILL when the parent exits (PR_SET_PDEATHSIG). Exit at once if it has exited already."""
    if IS_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def process_start(pid: int) -> int:
    """Return the process's start time in clock ticks since boot, 0 if it is unavailable or the process has ended.

    A zombie counts as ended: in a container, a killed pool may never be reaped.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0


def is_running(pid: int, started: int) -> bool:
    """Whether the process that had this start time (`process_start`) when it was alive still is."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    now = process_start(pid)
    # elsewhere the start time is always 0
    return now == started and (now > 0 or not IS_LINUX)


class Peer(NamedTuple):
    """The process at the other end of a socket."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer | None:
    """Return the peer process, None if the system does not provide it (SO_PEERCRED, unix(7))."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return Peer(pid, uid)


def flock_holder(path: Path) -> int:
    """Return the pid of the process that holds a file's `flock`; 0 if it is unknown (proc_locks(5))."""
    try:
        inode = f":{path.stat().st_ino}"
        fields = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return 0
    # 1: FLOCK ADVISORY WRITE 708 08:02:13 0 EOF; waiting processes have `->` after the first number
    held = [line for line in fields if len(line) > 5 and line[1] == "FLOCK" and line[5].endswith(inode)]
    return int(held[0][4]) if held and held[0][4].isdigit() else 0


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGKILL`; `signal 35` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not count: in a container it may never be reaped."""
    if IS_LINUX:
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
    """Whether a process may be alive; assumed for other machines (`host` as in `config.host_name()`)."""
    return host != (socket.gethostname().split(".")[0] or "localhost") or is_alive(pid)


def collapse_pages() -> None:
    """Collapse this process's memory into huge pages (MADV_COLLAPSE, Linux 6.1 or newer).

    A fork copies page tables. With huge pages they are smaller: it takes 1.0 ms instead of 1.7 (3.1 with none).
    """
    if not IS_LINUX:
        return
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps]
    for fields in regions:
        anonymous = fields[4] == "0" and (len(fields) == 5 or fields[5] == "[heap]")
        if anonymous and fields[1] == "rw-p":
            begin, end = (int(bound, 16) for bound in fields[0].split("-"))
            begin = -(-begin // _HUGE_PAGE) * _HUGE_PAGE
            end = end // _HUGE_PAGE * _HUGE_PAGE
            if end > begin:
                # may fail if there are no free huge pages: forks are then merely slower
                _madvise(begin, end, _MADV_COLLAPSE)


def unmap_file_pages() -> None:
    """Give back the pages of files that this process has only read: code and tables that imports used once.

    They stay in the page cache and are mapped again when they are touched; forks do not copy them. A process that has
    imported torch has 50 MB less. For processes with one thread, on Linux.
    """
    if not IS_LINUX:
        return
    region = [""]
    with open("/proc/self/smaps") as maps:
        for line in maps:
            fields = line.split()
            if not fields[0].endswith(":"):
                region = fields
            elif fields[:2] == ["Anonymous:", "0"] and region[1] in ("r--p", "r-xp") and region[4] != "0":
                # no page of it was changed, as the loader's relocations do
                begin, end = (int(bound, 16) for bound in region[0].split("-"))
                _madvise(begin, end, _MADV_DONTNEED)


def _madvise(begin: int, end: int, advice: int) -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    madvise(begin, end - begin, advice)


def allow_huge_pages(allowed: bool) -> None:
    """Allow or forbid huge pages for memory that this process touches from now on. Linux only.

    With huge pages, an idle process takes 2 MB for each touched part of its heap. Existing pages are not changed.
    """
    if IS_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, int(not allowed), 0, 0, 0)


def core_count() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count() -> int:
    """The number of threads of this process, including those of C and C++ libraries."""
    if IS_LINUX:
        return len(os.listdir("/proc/self/task"))
    import threading

    return threading.active_count()


def descendants(root: int) -> list[int]:
    """Pids below `root`, parents first. Linux only; elsewhere empty."""
    if not IS_LINUX:
        return []
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with (
                contextlib.suppress(OSError, IndexError, ValueError),
                open(f"/proc/{entry}/stat", "rb") as file,
            ):
                # the command in parentheses may contain blanks; the parent is the second field after it
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    level = [root]
    while level:
        level = [child for parent in level for child in children.get(parent, ())]
        found += level
    return found


def kill_descendants() -> None:
    """Kill and reap all descendants of this process; as a subreaper, also the orphans of its children.

    Repeats until there are none: a child may be forked between the listing and its parent's death.
    """
    while pids := descendants(os.getpid()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
            # give the killed processes a moment to exit
            time.sleep(_LOOK_AGAIN_S)


def write_log(text: str, error: BaseException | None = None) -> None:
    """Write a text, and the traceback of an error, to standard error, which may be a log on a full disk."""
    trace = "" if error is None else "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}{trace}")


# ---------------------------------------------------------------- memory

_MEMORY_RESERVE = 1.25
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
# limit, usage, and the `memory.stat` field of reclaimable file cache, for cgroups v2 and v1
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def leave_the_cores_to_ranks() -> None:
    """Let this thread, and those that it starts, work only while no other thread wants the core (SCHED_IDLE)."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


def fits_memory(size: int) -> bool:
    """Whether a memory file of `size` bytes, and a reserve of 25 %, fits into the available memory."""
    return hasattr(os, "memfd_create") and size * _MEMORY_RESERVE < memory_available_bytes()


def memory_available_bytes() -> int:
    """Return the available memory: the machine's, or less if a control group limits it further."""
    kilobytes = number_in(_MEMINFO, "MemAvailable:")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if kilobytes is None else kilobytes * 1024
    available = [free]
    for group in memory_groups():
        for limit_name, usage_name, cached_name in _GROUP_FILES:
            limit, usage = _number(group / limit_name), _number(group / usage_name)
            if limit is not None and usage is not None:
                cached = number_in(group / "memory.stat", cached_name) or 0
                available.append(max(0, limit - usage + cached))
    return min(available)


def memory_limit() -> int:
    """Return the machine's memory in bytes, or the control group's limit if that is smaller; 0 if unknown."""
    limits = [(number_in(_MEMINFO, "MemTotal:") or 0) * 1024]
    limits += [_number(group / names[0]) or 0 for group in memory_groups() for names in _GROUP_FILES]
    return min(filter(None, limits), default=0)


def memory_groups() -> Iterator[Path]:
    """Yield this process's memory control groups up to the root, for cgroups v1 and v2."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUP / "memory" if controllers else _CGROUP
        # in a container the path may be the host's, with the group mounted at the root
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            yield root.joinpath(*parts[:depth])


def number_in(file: Path, name: str) -> int | None:
    """Return the number after a name at the beginning of a line, None if there is none."""
    lines = _text(file).splitlines()
    return next((int(fields[1]) for line in lines if (fields := line.split())[:1] == [name]), None)


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
