"""The processes of a run, their sockets and signals, and the end of those that it left behind. Linux; from /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path

RUN_VARIABLE = "SGPU_RUN_ID"


def now_in_ticks() -> int:
    """The time as /proc counts processes' starts: clock ticks since boot. 0 where there is no such clock."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def processes_of(run_id: str, sessions: Collection[int], since_ticks: int = 0, *, marked: bool = True) -> Iterator[int]:
    """Find the pids of what lives of a run.

    A process belongs to the run when its session was made by one of the run's ranks, or when it was started with
    the run's `SGPU_RUN_ID` in its environment (so also one that left its session).

    Args:
        run_id: The run.
        sessions: The ranks' pids, each the id of its session.
        since_ticks: When the run began (`now_in_ticks`); what is older can't be of it and is not looked into.
        marked: Also those that have left their sessions.
    """
    mark = f"{RUN_VARIABLE}={run_id}".encode()
    own_uid = os.getuid()
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            if os.stat(f"/proc/{entry}").st_uid != own_uid:
                continue
            with open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            if fields[0] in (b"Z", b"X"):
                continue
            if int(fields[3]) not in sessions:
                if not marked or int(fields[19]) < since_ticks:
                    continue
                with open(f"/proc/{entry}/environ", "rb") as file:
                    if mark not in file.read().split(b"\0"):
                        continue
            yield int(entry)


def kill_leftovers(
    run_id: str, sessions: Collection[int], since_ticks: int = 0, *, marked: bool = True, reaped: bool = False
) -> list[int]:
    """Kill what still lives of a run and return the pids. Arguments as of `processes_of`.

    Args:
        reaped: The ranks themselves are gone. A process that has the number of one is another's then, and so is its
            session: the kernel gives no number anew while a session has it.
    """
    if reaped:
        sessions = [pid for pid in sessions if not os.path.exists(f"/proc/{pid}")]
    killed: list[int] = []
    for pid in processes_of(run_id, sessions, since_ticks, marked=marked):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    return killed


def catches(pid: int, number: int) -> bool | None:
    """Whether the process has a handler for the signal; None where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False if Path("/proc/self/status").exists() else None
    except OSError:
        return False
    for line in status.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return None


def sockets_of(pid: int) -> dict[str, int]:
    """The process's descriptors that are sockets, by inode."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.startswith("socket:["):
                    found[target[8:-1]] = int(descriptor)
    return found


def tcp_sockets(state: str) -> Iterator[tuple[str, str, str]]:
    """(local address, remote address, inode) of this machine's TCP sockets in a state. Source: proc(5)."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}", encoding="ascii") as file:
            for line in list(file)[1:]:
                fields = line.split()
                if fields[3] == state:
                    yield fields[1], fields[2], fields[9]
