"""The processes of a run: their signals and sockets, connections to their ports, the end of those left behind.

Linux, from /proc: each look at all processes has to be quick.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from sgpu_magic.agent import faults
from sgpu_magic.agent.background_call import call_in_background
from sgpu_magic.system.byte_stream import ByteStream, Send
from sgpu_magic.wire.files import OpenStream, StreamClosed, StreamMessage, StreamOpened
from sgpu_magic.wire.ids import short

if TYPE_CHECKING:
    from sgpu_magic.agent.runs.node_run import NodeRun

RUN_VARIABLE = "SGPU_RUN_ID"
_CONNECT_S = 10.0
_ESTABLISHED = "01"
# what listens everywhere is reached through the loopback
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


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


# ---------------------------------------------------------------- sockets


def connections_between(pids: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Return for each process its descriptors that are connected to another one of `pids`.

    SIGINT does not interrupt a gloo collective and `abort` does not release it. What does is the loss of its
    connections: every rank then gets a RuntimeError within milliseconds. Only connections whose two ends both belong
    to ranks of the run are taken; listeners and the user's own connections are left alone.
    """
    owner = {inode: (pid, fd) for pid in pids for inode, fd in _sockets_of(pid).items()}
    ends = {(local, remote): inode for local, remote, inode in _tcp_connections()}
    found: dict[int, list[int]] = {}
    for (local, remote), inode in ends.items():
        if inode in owner and ends.get((remote, local)) in owner:
            pid, fd = owner[inode]
            found.setdefault(pid, []).append(fd)
    return {pid: tuple(fds) for pid, fds in found.items()}


def _sockets_of(pid: int) -> dict[str, int]:
    """The process's descriptors that are sockets, by inode."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.startswith("socket:["):
                    found[target[8:-1]] = int(descriptor)
    return found


def _tcp_connections() -> Iterator[tuple[str, str, str]]:
    """(local address, remote address, inode) of this machine's TCP connections. Source: proc(5)."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}", encoding="ascii") as file:
            for line in list(file)[1:]:
                fields = line.split()
                if fields[3] == _ESTABLISHED:
                    yield fields[1], fields[2], fields[9]


# ---------------------------------------------------------------- ports


class RunPorts:
    """The open ones, by number. Used from the loop's thread only.

    Args:
        find: A run of this node by its id, None when there is none.
        send: Sends a message to the pool.
    """

    def __init__(self, find: Callable[[str], NodeRun | None], send: Send) -> None:
        self._find = find
        self._send = send
        self._streams: dict[int, ByteStream] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}

    def opens(self, message: OpenStream) -> None:
        """Connect, if the port is the run's; the answer follows."""
        task = faults.in_background(self._open(message))
        self._opening[message.stream] = task
        task.add_done_callback(lambda _: self._opening.pop(message.stream, None))

    def heard(self, message: StreamMessage, frames: Sequence[bytes]) -> None:
        """Take what the client says of a stream."""
        stream = self._streams.get(message.stream)
        if stream is not None:
            stream.heard(message, frames)
        elif isinstance(message, StreamClosed) and (task := self._opening.get(message.stream)) is not None:
            task.cancel()

    def close(self) -> None:
        """The pool service is gone, and with it the clients; or this program ends."""
        for task in list(self._opening.values()):
            task.cancel()
        for stream in list(self._streams.values()):
            stream.close("the pool is gone")

    async def _open(self, message: OpenStream) -> None:
        number, run_id = message.stream, message.run
        run = self._find(run_id)
        if run is None or run.gone:
            self._send(StreamClosed(stream=number, problem=f"run {short(run_id)} has no ranks on this node"), ())
            return
        ranks = set(run.pids)
        address, problem = await call_in_background(lambda: address_of(run_id, ranks, message.port), "sgpu-ports")
        if message.watches:
            self._send(StreamOpened(stream=number, run_id=run_id, problem=problem), ())
            return
        if problem:
            self._send(StreamClosed(stream=number, problem=problem), ())
            return
        try:
            connecting = asyncio.open_connection(address, message.port)
            reader, writer = await asyncio.wait_for(connecting, _CONNECT_S)
        except OSError as error:
            why = error.strerror or "it does not answer"
            self._send(StreamClosed(stream=number, problem=f"port {message.port} can't be connected to: {why}"), ())
            return
        self._send(StreamOpened(stream=number, run_id=run_id), ())
        self._streams[number] = ByteStream(
            number, reader, writer, self._send, lambda _: self._streams.pop(number, None) and None
        )


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
    listening = {
        each.pid: str(each.laddr.ip)
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port
    }
    if not listening:
        return "", f"nothing listens on port {port} there"
    for pid in processes_of(run_id, ranks):
        if pid in listening:
            address = listening[pid]
            return _ANY.get(address, address).removeprefix("::ffff:"), ""
    return "", f"no process of the run listens on port {port} there"
