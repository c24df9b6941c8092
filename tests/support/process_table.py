"""Processes as the system reports them: the table, their descriptors, threads and listening sockets."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from waiting import eventually

# descriptors per pidfd: for a rank of an agent, two pipes, the stack file, and a socket once the rank stands by in a
# group or runs; otherwise a socket
_FDS_PER_RANK = 5
_FDS_PER_NEW_RANK = 4
_FDS_PER_CLIENT = 2
# the state of a TCP socket that listens, in /proc/net/tcp
_LISTEN = "0A"
_SOCKET = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True)
class Process:
    """One row of the process table.

    Args:
        start: Its start in clock ticks since boot, which differs when a pid is reused.
        stdout: The target of its standard output.
    """

    pid: int
    parent: int
    state: str
    start: int
    command: str = ""
    cwd: str = ""
    stdout: str = ""
    environ: bytes = b""

    def __str__(self) -> str:
        return f"{self.pid} (parent {self.parent}, {self.state}) {self.command[:120]}"

    __repr__ = __str__


def process_table(strangers: Mapping[int, int] | None = None) -> dict[int, Process]:
    """Return all processes of this machine; zombies have neither command nor environment.

    Args:
        strangers: Pid and start of processes of which only the parent is read, to save time.
    """
    strangers = strangers or {}
    found: dict[int, Process] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        base = Path("/proc") / entry
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (base / "stat").read_bytes().rpartition(b")")[2].split()
            if strangers.get(int(entry)) == int(fields[19]):
                found[int(entry)] = Process(int(entry), int(fields[1]), fields[0].decode(), int(fields[19]))
                continue
            command = (base / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            cwd, stdout, environ = "", "", b""
            with contextlib.suppress(OSError):
                cwd, environ = os.readlink(base / "cwd"), (base / "environ").read_bytes()
                stdout = os.readlink(base / "fd" / "1")
            found[int(entry)] = Process(
                pid=int(entry),
                parent=int(fields[1]),
                state=fields[0].decode(),
                start=int(fields[19]),
                command=command,
                cwd=cwd,
                stdout=stdout,
                environ=environ,
            )
    return found


def below(roots: Iterable[int], table: Mapping[int, Process]) -> set[int]:
    """Return the pids of the descendants of `roots`."""
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    found: set[int] = set()
    current = list(roots)
    while current:
        current = [child for pid in current for child in children.get(pid, ()) if child not in found]
        found.update(current)
    return found


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def wait_gone(pid: int, deadline_s: float = 10.0) -> None:
    """Wait until the process has ended."""
    eventually(lambda: not is_alive(pid), deadline_s, f"process {pid} does not end")


def stop_process(pid: int, number: int, deadline_s: float) -> None:
    """Signal a process that is not a child of this one, and wait for its end."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(descriptor, number)
        ready, _, _ = select.select([descriptor], [], [], deadline_s)
        assert ready, f"process {pid} did not end within {deadline_s:g} s of signal {number}:\n{waits_of(pid)}"
    finally:
        os.close(descriptor)


def waits_of(root: int) -> str:
    """Return what each thread of a process and its descendants is waiting in, one line each."""
    table = process_table()
    lines: list[str] = []
    for pid in (root, *sorted(below([root], table))):
        lines.append(
            f"{pid} {table[pid].state if pid in table else '-'} {table[pid].command[:90] if pid in table else ''}"
        )
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                reported = []
                for name in ("comm", "wchan", "syscall"):
                    with contextlib.suppress(OSError):
                        reported.append(Path(f"/proc/{pid}/task/{thread}/{name}").read_text().strip()[:60])
                lines.append(f"    {thread} {' | '.join(reported)}")
    return "\n".join(lines)


def descriptors(pid: int) -> dict[int, str]:
    """Return the open descriptors of a process with their targets."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found[int(entry)] = os.readlink(f"/proc/{pid}/fd/{entry}")
    return found


def watched_pids(pid: int) -> set[int]:
    """Return the pids of living processes that the process has a pidfd of."""
    found: set[int] = set()
    for fd, link in descriptors(pid).items():
        if "pidfd" in link:
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines()
                found |= {int(line.split()[1]) for line in lines if line.startswith("Pid:")}
    return found - {-1}


def thread_count(pid: int) -> int:
    # not by listing its threads: that makes its end expensive, see `processes.has_children`
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(re.search(r"^Threads:\s*(\d+)", status, re.MULTILINE)[1])


def library_count(pid: int) -> int:
    """Return the number of shared libraries that the process has loaded."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return 0
    return len({line.split(maxsplit=5)[-1] for line in lines if ".so" in line})


def listening(pids: Iterable[int] | None = None) -> dict[int, str]:
    """Return listening TCP sockets: inode and `address:port`, as the system writes it.

    Args:
        pids: Only sockets that these processes hold open; None for all of this machine.
    """
    found: dict[int, str] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN:
                    found[int(fields[9])] = fields[1]
    if pids is None:
        return found
    links = [link for pid in pids for link in descriptors(pid).values()]
    held = {int(match[1]) for link in links if (match := _SOCKET.fullmatch(link))}
    return {inode: where for inode, where in found.items() if inode in held}


def level(pid: int) -> dict[str, int]:
    """Return the counts that must not grow: threads, memory files, and descriptors.

    Descriptors of ranks, clients and payloads are left out.

    `most fds` equals `fds` if no rank has its socket yet.
    """
    links = list(descriptors(pid).values())
    watched = sum("pidfd" in link for link in links)
    memory = memory_files(pid)
    # a notebook keeps the memory of its payloads for a minute, for the next ones
    kept = sum(link == "/memfd:sgpu-payload (deleted)" for link in links)
    try:
        is_agent = b"sgpu_magic.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        is_agent = False
    return {
        "fds": len(links) - (_FDS_PER_RANK if is_agent else _FDS_PER_CLIENT) * watched - memory,
        "most fds": len(links) - (_FDS_PER_NEW_RANK if is_agent else _FDS_PER_CLIENT) * watched - memory,
        "threads": thread_count(pid),
        "libraries": library_count(pid),
        "memory files": memory - (0 if is_agent else kept),
    }


def memory_files(pid: int) -> int:
    """Return the number of runs' memory files; a rank's stack file is counted with the rank."""
    links = descriptors(pid).values()
    return sum(link.startswith("/memfd:sgpu") and not link.startswith("/memfd:sgpu-stack") for link in links)


def resident_bytes(pid: int | None) -> int:
    """Return the resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def no_more(now: Mapping[str, int], before: Mapping[str, int], slack: int = 2) -> bool:
    """Whether a process's level has not grown.

    Args:
        now: `level` of the process.
        before: Its level before.
        slack: Allowed growth: a second zygote, a timer's thread.
    """
    limits = before | {"fds": before["most fds"]}
    return all(now[name] <= limits[name] + slack for name in before if name != "most fds")
