"""The processes of runs: finding them, their CPU and memory usage, and connections to their ports.

Reads /proc directly, since one scan of all processes for all runs of the agent must be quick. On systems without /proc
nothing is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import psutil

from sgpu_magic.agent import faults
from sgpu_magic.agent.faults import call_in_background
from sgpu_magic.system import processes
from sgpu_magic.system.byte_stream import ByteStream, Send
from sgpu_magic.wire.base import short
from sgpu_magic.wire.files import StreamMessage
from sgpu_magic.wire.streams import OpenStream, StreamClosed, StreamOpened

if TYPE_CHECKING:
    from sgpu_magic.agent.runs.node_run import NodeRun

RUN_VARIABLE = "SGPU_RUN_ID"
_CONNECT_S = 10.0
# a process that listens on all interfaces is reached through the loopback interface
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# known parents are trusted for this many scans; a parent changes when it dies
_BELIEVED_LOOKS = 30
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
BUSY_SHARE = 0.05
"""A rank that uses more than this share of one core, or of its GPU, is busy."""

# CPU time is counted in steps of 10 ms, and a waiting rank wakes up now and then
_SLACK_S = 0.02


def processes_of(ranks: Collection[int]) -> set[int]:
    """Return the pids of a run's processes: its ranks, and everything below them.

    A rank is a subreaper, so processes that its code has detached stay below it.
    """
    return {pid for rank in ranks for pid in (rank, *processes.descendants(rank))}


def kill_marked(run_id: str) -> None:
    """Kill the processes that have the run's id in their environment.

    This is for the case that a whole tree of processes is lost at once: agent, zygotes and ranks.
    """
    mark = f"{RUN_VARIABLE}={run_id}".encode("ascii")
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if entry.isdigit():
            # other users' processes can't be read
            with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    os.kill(int(entry), signal.SIGKILL)


# ---------------------------------------------------------------- CPU and memory


class TreeUse(msgspec.Struct, frozen=True):
    """CPU and memory usage of a process and its live descendants.

    Args:
        pids: Process ids of the whole tree.
        cpu_s: CPU seconds that they and their reaped children have used so far.
        rss_bytes: Resident memory. Shared pages, such as a notebook's payload or the libraries of forked ranks, count
            for each process.
        own_rss_bytes: That of the process alone.
    """

    pids: frozenset[int]
    cpu_s: float
    rss_bytes: int
    own_rss_bytes: int


class _Process(msgspec.Struct):
    parent: int
    ticks: int
    pages: int


class ProcessTable:
    """Scans processes. Each scan reads only new processes and descendants of ranks.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[int, _Process] = {}
        self._trees: dict[int, TreeUse] = {}
        self._looked_at = float("-inf")
        self._scans = 0

    def trees(self, roots: Collection[int], max_age_s: float = 0.0) -> Mapping[int, TreeUse]:
        """Return the usage of each of these processes, without those that are gone.

        Args:
            roots: Pids of the processes; none may be a descendant of another.
            max_age_s: Maximum age in seconds of a scan that may be reused.
        """
        now = self._clock()
        if now - self._looked_at > max_age_s or any(root not in self._trees for root in roots):
            # callers poll, so one scan covers the roots of all of them
            self._scan({*roots, *self._trees})
            self._looked_at = now
        return {root: self._trees[root] for root in roots if root in self._trees}

    def _scan(self, roots: Iterable[int]) -> None:
        try:
            living = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        except OSError:
            living = set[int]()
        self._scans += 1
        if self._scans % _BELIEVED_LOOKS == 0:
            self._known.clear()
        for pid in self._known.keys() - living:
            del self._known[pid]
        for pid in living - self._known.keys():
            self._read(pid)
        children: dict[int, list[int]] = {}
        for pid, process in self._known.items():
            children.setdefault(process.parent, []).append(pid)
        self._trees = {}
        for root in roots:
            found = [(pid, process) for pid in _below(root, children) if (process := self._read(pid)) is not None]
            own = next((process.pages for pid, process in found if pid == root), None)
            if own is not None:
                self._trees[root] = TreeUse(
                    pids=frozenset(pid for pid, _ in found),
                    cpu_s=sum(process.ticks for _, process in found) / _TICKS_PER_S,
                    rss_bytes=sum(process.pages for _, process in found) * _PAGE_BYTES,
                    own_rss_bytes=own * _PAGE_BYTES,
                )

    def _read(self, pid: int) -> _Process | None:
        # the built-in open() would cost three more system calls per file
        try:
            file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
            try:
                text = os.read(file, 1024)
            finally:
                os.close(file)
            # the command in parentheses may contain anything; the state is the first field after it, see proc(5)
            fields = text[text.rindex(b")") + 2 :].split(None, 22)
            # includes the time of reaped children, so that a tree's time never decreases
            ticks = int(fields[11]) + int(fields[12]) + int(fields[13]) + int(fields[14])
            process = self._known[pid] = _Process(int(fields[1]), ticks, int(fields[21]))
        except (OSError, ValueError, IndexError):
            self._known.pop(pid, None)
            return None
        return process


def _below(root: int, children: Mapping[int, list[int]]) -> Iterator[int]:
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += children.get(pid, ())


class CpuWatch:
    """Measures how long each rank has used no CPU, from its own and its children's time.

    A rank whose CPU time is unknown counts as busy.

    A rank is busy if it has used more than `BUSY_SHARE` since the last check, or since the last time it was busy:
    checks in quick succession see little usage of a process that shares its core with others.
    """

    def __init__(self) -> None:
        self._last: dict[int, _Used] = {}
        self._busy: dict[int, _Used] = {}

    def forget(self) -> None:
        self._last = {}
        self._busy = {}

    def sample(self, now: float, used_s: Mapping[int, float]) -> dict[int, float]:
        """Return for each process how long it has been idle, in seconds.

        Args:
            now: Time in seconds of a monotonic clock.
            used_s: CPU seconds used so far, by process id (`TreeUse.cpu_s`).
        """
        for pid, used in used_s.items():
            since = (self._last.get(pid), self._busy.get(pid))
            if not all(before is not None and before.is_idle_until(now, used) for before in since):
                self._busy[pid] = _Used(now, used)
        self._last = {pid: _Used(now, used) for pid, used in used_s.items()}
        return {pid: now - self._busy[pid].at for pid in used_s}


class _Used(msgspec.Struct, frozen=True):
    at: float
    cpu_s: float

    def is_idle_until(self, now: float, cpu_s: float) -> bool:
        # the time decreases when a child has ended
        return 0 <= cpu_s - self.cpu_s <= BUSY_SHARE * (now - self.at) + _SLACK_S


# ---------------------------------------------------------------- ports


class RunPorts:
    """Open connections to ports of runs, by stream number. Used only in the loop's thread.

    Args:
        find: Returns a run of this node by its id, or None.
        send: Sends a message to the pool.
    """

    def __init__(self, find: Callable[[str], NodeRun | None], send: Send) -> None:
        self._find = find
        self._send = send
        self._streams: dict[int, ByteStream] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}

    def opens(self, message: OpenStream) -> None:
        """Connect to a port if one of the run's processes listens on it; the reply is sent later."""
        task = faults.in_background(self._open(message))
        self._opening[message.stream] = task
        task.add_done_callback(lambda _: self._opening.pop(message.stream, None))

    def on_message(self, message: StreamMessage, frames: Sequence[bytes]) -> None:
        """Handle a client's message about a stream."""
        stream = self._streams.get(message.stream)
        if stream is not None:
            stream.on_message(message, frames)
        elif isinstance(message, StreamClosed) and (task := self._opening.get(message.stream)) is not None:
            task.cancel()

    def close(self) -> None:
        """Close all streams: the pool service and its clients are gone, or the agent ends."""
        for task in list(self._opening.values()):
            task.cancel()
        for stream in list(self._streams.values()):
            stream.close("the connection to the pool was closed")

    async def _open(self, message: OpenStream) -> None:
        number, run_id = message.stream, message.run
        run = self._find(run_id)
        if run is None or run.has_exited:
            self._send(StreamClosed(stream=number, problem=f"run {short(run_id)} has no ranks on this node"), ())
            return
        ranks = set(run.pids)
        address, problem = await call_in_background(lambda: address_of(ranks, message.port), "sgpu-ports")
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
            self._send(StreamClosed(stream=number, problem=f"can't connect to port {message.port}: {why}"), ())
            return
        self._send(StreamOpened(stream=number, run_id=run_id), ())
        self._streams[number] = ByteStream(
            number, reader, writer, self._send, lambda _: self._streams.pop(number, None) and None
        )


def address_of(ranks: Collection[int], port: int) -> tuple[str, str | None]:
    """Find the address at which a process of the run listens on a port.

    Ports of other processes on this machine are not available to the run's user.

    Args:
        ranks: The pids of the run's ranks.
        port: The TCP port.

    Returns:
        The address to connect to and None, or "" and why there is none.
    """
    listening = {
        each.pid: str(each.laddr.ip)
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port
    }
    if not listening:
        return "", f"nothing listens on port {port} there"
    for pid in processes_of(ranks):
        if pid in listening:
            address = listening[pid]
            return _ANY.get(address, address).removeprefix("::ffff:"), None
    return "", f"no process of the run listens on port {port} there"
