"""Who uses a device besides the pool: NVML's process list against /proc."""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from pathlib import Path

BUSY_MEMORY_SHARE = 0.05
_MAX_ANCESTORS = 256
_PROC = Path("/proc")
# The inode of the machine's first pid namespace, PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h.
_FIRST_PID_NAMESPACE = 0xEFFFFFFC


def outside_use(pids: Sequence[int], own: frozenset[int], total_bytes: int, used_bytes: int | None) -> str:
    """Say why a device counts as in use outside the pool, "" when it does not.

    Args:
        pids: The processes that NVML sees on it.
        own: The pool's own processes; their descendants count as own too.
        total_bytes: Its memory.
        used_bytes: What is in use of it, None when the driver does not tell.
    """
    is_own = {pid: _descends_from(pid, own) for pid in pids}
    foreign = [pid for pid in pids if not is_own[pid] and not _is_gone(pid)]
    if len(foreign) > 1:
        return f"{_process_text(foreign[0])} and {len(foreign) - 1} more use it"
    if foreign:
        return f"{_process_text(foreign[0])} uses it"
    if used_bytes is not None and used_bytes > BUSY_MEMORY_SHARE * total_bytes and not any(is_own.values()):
        return f"{used_bytes / 1e9:.1f} of {total_bytes / 1e9:.0f} GB are in use"
    return ""


def _descends_from(pid: int, ancestors: frozenset[int]) -> bool:
    for _ in range(_MAX_ANCESTORS):
        if pid in ancestors:
            return True
        parent = _parent(pid)
        if parent <= 1:
            return parent in ancestors
        pid = parent
    return False


def _parent(pid: int) -> int:
    """The parent's pid, 0 when there is none or it can't be seen."""
    try:
        status = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return 0
    # the command between the parentheses may hold anything: `pid (command) state ppid ...`, proc(5)
    return int(status.rpartition(")")[2].split()[1])


def _is_gone(pid: int) -> bool:
    """True when the process surely ended since NVML was asked."""
    if _in_container():  # an unknown pid may be the host's
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _in_container() -> bool:
    try:
        return (_PROC / "self/ns/pid").stat().st_ino != _FIRST_PID_NAMESPACE
    except OSError:
        return False


def _process_text(pid: int) -> str:
    try:
        uid = (_PROC / str(pid)).stat().st_uid
    except OSError:
        return f"process {pid} outside this container" if _in_container() else f"process {pid}"
    try:
        return f"process {pid} of user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"process {pid} of user {uid}"
