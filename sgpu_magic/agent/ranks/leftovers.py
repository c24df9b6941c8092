"""What the ranks of a run left behind: processes of their sessions, or marked with the run's variable."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection

RUN_VARIABLE = "SGPU_RUN_ID"


def now_in_ticks() -> int:
    """The time as /proc counts processes' starts: clock ticks since boot. 0 where there is no such clock."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def kill_leftovers(
    run_id: str, sessions: Collection[int], since_ticks: int = 0, *, marked: bool = True, reaped: bool = False
) -> list[int]:
    """Kill what still lives of a run and return the pids. Linux only.

    A process belongs to the run when its session was made by one of the run's ranks, or when it was started with
    the run's `SGPU_RUN_ID` in its environment (so also one that left its session). Nothing else is touched.

    Args:
        run_id: The run.
        sessions: The ranks' pids, each the id of its session.
        since_ticks: When the run began (`now_in_ticks`); what is older can't be of it and is not looked into.
        marked: Also those that have left their sessions.
        reaped: The ranks themselves are gone. A process that has the number of one is another's then, and so is its
            session: the kernel gives no number anew while a session has it.
    """
    killed: list[int] = []
    if reaped:
        sessions = [pid for pid in sessions if not os.path.exists(f"/proc/{pid}")]
    mark = f"{RUN_VARIABLE}={run_id}".encode()
    own_uid = os.getuid()
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not entry.isdigit():
            continue
        pid = int(entry)
        with contextlib.suppress(OSError, ValueError, IndexError):
            if os.stat(f"/proc/{pid}").st_uid != own_uid:
                continue
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            if fields[0] in (b"Z", b"X"):
                continue
            if int(fields[3]) not in sessions:
                if not marked or int(fields[19]) < since_ticks:
                    continue
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if mark not in file.read().split(b"\0"):
                        continue
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    return killed
