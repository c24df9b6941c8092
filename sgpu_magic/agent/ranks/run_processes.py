"""The processes of runs: which they are, what they use, connections to their ports, the end of those left behind.

Linux, from /proc, as one look at all processes for all runs of the agent has to be quick; elsewhere nothing is known.
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
from sgpu_magic.system.byte_stream import ByteStream, Send
from sgpu_magic.wire.files import OpenStream, StreamClosed, StreamMessage, StreamOpened
from sgpu_magic.wire.record import short

if TYPE_CHECKING:
    from sgpu_magic.agent.runs.node_run import NodeRun

RUN_VARIABLE = "SGPU_RUN_ID"
_CONNECT_S = 10.0
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


# ---------------------------------------------------------------- CPU and memory


# processes whose parents are believed unseen for so many looks: they change when a parent dies
_BELIEVED_LOOKS = 30
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class TreeUse(msgspec.Struct, frozen=True):
    """What a process and the living ones below it use.

    Args:
        pids: All of them.
        cpu_s: CPU time that they, and children of theirs that have ended, have used so far.
        rss_bytes: Resident memory. Pages that several share, such as a notebook's payload or the libraries that all
            ranks were forked with, count for each: telling them apart (PSS) takes milliseconds for each process.
    """

    pids: frozenset[int]
    cpu_s: float
    rss_bytes: int


class _Process(msgspec.Struct):
    parent: int
    ticks: int
    pages: int


class ProcessTable:
    """Looks at processes. Only those that are new, or below a rank, are read at each look.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[int, _Process] = {}
        self._trees: dict[int, TreeUse] = {}
        self._looked_at = float("-inf")
        self._looks = 0

    def trees(self, roots: Collection[int], max_age_s: float = 0.0) -> Mapping[int, TreeUse]:
        """Return what each of these processes uses; without those that are gone.

        Args:
            roots: None is to be below another.
            max_age_s: What was seen so many seconds ago may be told again.
        """
        now = self._clock()
        if now - self._looked_at > max_age_s or any(root not in self._trees for root in roots):
            # who asked before asks again: one look serves all
            self._look({*roots, *self._trees})
            self._looked_at = now
        return {root: self._trees[root] for root in roots if root in self._trees}

    def _look(self, roots: Iterable[int]) -> None:
        try:
            living = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        except OSError:
            living = set[int]()
        self._looks += 1
        if self._looks % _BELIEVED_LOOKS == 0:
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
            if any(pid == root for pid, _ in found):
                self._trees[root] = TreeUse(
                    pids=frozenset(pid for pid, _ in found),
                    cpu_s=sum(process.ticks for _, process in found) / _TICKS_PER_S,
                    rss_bytes=sum(process.pages for _, process in found) * _PAGE_BYTES,
                )

    def _read(self, pid: int) -> _Process | None:
        # the built-in open() would make of each file three system calls more
        try:
            file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
            try:
                text = os.read(file, 1024)
            finally:
                os.close(file)
            # the command in parentheses may hold anything; the state is the first field after it, see proc(5)
            fields = text[text.rindex(b")") + 2 :].split(None, 22)
            # with the time of children that were waited for, so that a tree's time never goes back
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
