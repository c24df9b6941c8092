"""The zygotes of a node: one process per environment that imports torch once and forks ranks."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sgpu_magic.agent import faults
from sgpu_magic.system import child_process
from sgpu_magic.system.message_stream import MessageStream
from sgpu_magic.system.processes import signal_name
from sgpu_magic.wire import codec
from sgpu_magic.wire.base import FailureKind
from sgpu_magic.wire.pool_status import PROTOCOL_VERSION
from sgpu_magic.wire.rank import (
    ZYGOTE_MODULE,
    DescendantsEnded,
    Exited,
    Fork,
    Forked,
    ForkRefused,
    FromZygote,
    PausePreload,
    Preload,
    Preloaded,
    ZygoteFailed,
    ZygoteReady,
)
from sgpu_magic.wire.run import Interpreter

if TYPE_CHECKING:
    from sgpu_magic.agent.ranks.group import Group

_MAX_IDLE = 2
# time for a zygote and its descendants to exit after its socket has closed
_EXIT_S = 7.0
# a fork copies page tables; huge pages for malloc's heap halve that cost
_MALLOC_TUNABLE = "glibc.malloc.hugetlb=1"


_INITIAL_OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_open_files_limit() -> None:
    """Raise the limit of open files to the hard limit: the agent has six open for each rank."""
    soft, hard = _INITIAL_OPEN_FILES
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _restore_open_files_limit(pid: int) -> None:
    if hasattr(resource, "prlimit"):
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _INITIAL_OPEN_FILES)


class Zygote:
    """One zygote process. Orders can be sent at once; they wait in its socket until it has imported torch."""

    def __init__(self, interpreter: Interpreter, log_dir: Path, on_lost: Callable[[Zygote], None]) -> None:
        self.interpreter = interpreter
        self.ready = False
        self.last_used = asyncio.get_running_loop().time()
        self._log = log_dir / f"zygote-{interpreter.key[:12]}.log"
        self._on_lost = on_lost
        self._groups: dict[str, Group] = {}
        self._failure = ""
        self._status: int | None = None
        self._pending_report: asyncio.Handle | None = None
        self._group_of: dict[int, Group] = {}
        self._preloaded: Callable[[Preloaded], None] = lambda _: None
        environ = dict(interpreter.variables)
        tunables = environ.get("GLIBC_TUNABLES", "")
        environ["GLIBC_TUNABLES"] = f"{tunables}:{_MALLOC_TUNABLE}".strip(":")
        # skips lines of earlier zygotes
        self._log_begin = self._log.stat().st_size if self._log.exists() else 0
        command = [interpreter.executable, "-m", ZYGOTE_MODULE]
        ours, self.process = child_process.start(command, environ=environ, log=self._log)
        # ranks get the original limit of open files, not the agent's
        _restore_open_files_limit(self.process.pid)
        with faults.charging(None):
            self.stream = MessageStream[FromZygote](ours, codec.from_zygote, self._message, self._closed)

    @property
    def idle(self) -> bool:
        return not self._groups

    def fork(self, order: Fork, descriptors: Sequence[int], listener: Group) -> None:
        """Order the fork of one rank."""
        self.last_used = asyncio.get_running_loop().time()
        self._groups[order.group_id] = listener
        self.stream.send(order, descriptors=descriptors)

    def preload(self, order: Preload, done: Callable[[Preloaded], None]) -> None:
        """Order imports ahead of the first fork.

        Args:
            order: The imports.
            done: Called with the answer; never if the zygote ends before.
        """
        self._preloaded = done
        self.stream.send(order)

    def pause_preload(self, paused: bool) -> None:
        """Let the imports wait while ranks compute, or go on."""
        self.stream.send(PausePreload(paused=paused))

    def forget(self, group_id: str) -> None:
        """Forget a group that is gone."""
        self._groups.pop(group_id, None)

    def close(self) -> None:
        """Close the socket; at end of file the zygote kills its ranks and exits."""
        self.stream.close()

    def reaped(self, status: int) -> None:
        """Handle its exit and that of all its descendants; `status` is the exit code, negative for a signal."""
        self._status = status
        if self._pending_report is not None:
            self._pending_report.cancel()
            self._report_end()

    def _message(self, message: FromZygote, frames: Sequence[bytes]) -> None:
        match message:
            case ZygoteReady() if message.protocol_version != PROTOCOL_VERSION:
                self._failure = (
                    f"its sgpu-magic speaks protocol {message.protocol_version}, the pool {PROTOCOL_VERSION}. "
                    "Restart the pool with `sgpu pool stop`, and the kernel"
                )
                self.stream.close()
                self._closed()
            case ZygoteReady():
                self.ready = True
            case Preloaded():
                self._preloaded(message)
            case ZygoteFailed():
                self._failure = message.message
            case Forked() | ForkRefused() if (listener := self._groups.get(message.group_id)) is not None:
                with faults.guarded(listener.faulted):
                    if isinstance(message, Forked):
                        self._group_of[message.pid] = listener
                        listener.forked(message.rank, message.pid)
                    else:
                        listener.fork_refused(message.rank, message.message)
            case Exited():
                listener = self._group_of.get(message.pid)
                if not message.descendants:
                    self._group_of.pop(message.pid, None)
                if listener is not None:
                    with faults.guarded(listener.faulted):
                        listener.exited(message)
            case DescendantsEnded():
                listener = self._group_of.pop(message.pid, None)
                if listener is not None:
                    with faults.guarded(listener.faulted):
                        listener.descendants_ended(message)
            case _:
                pass

    def _closed(self) -> None:
        self._on_lost(self)
        if self._status is not None:
            self._report_end()
        else:
            # wait until it is reaped and all descendants of its ranks have ended
            self._pending_report = asyncio.get_running_loop().call_later(_EXIT_S, self._report_end)

    def _report_end(self) -> None:
        self._pending_report = None
        kind = FailureKind.ENVIRONMENT
        where = f"{self.interpreter.executable} (its log: {self._log})"
        if self._failure:
            text = f"the ranks' Python can't be used: {self._failure}. It is {where}."
        elif self.ready:
            # its ranks die with it
            kind = FailureKind.WORKER_DIED
            text = (
                "the process that forks ranks ended unexpectedly, and its ranks with it: another process or the "
                f"system killed it. It was {where}."
            )
        elif self._status is not None and self._status < 0:
            text = (
                f"the ranks' Python could not be started: {where} was killed by {signal_name(-self._status)} while it "
                "imported torch. Another process killed it, or the system did because memory ran out."
            )
        else:
            last_line = _last_line(self._log, self._log_begin)
            ended = "ended" if self._status is None else f"exited with code {self._status}"
            words = f"says: {last_line}" if last_line else f"{ended} and printed nothing"
            text = f"the ranks' Python could not be started: {where} {words}"
        for listener in list(self._groups.values()):
            with faults.guarded(listener.faulted):
                listener.zygote_lost(kind, text)
        self._groups.clear()


class Zygotes:
    """All zygotes of the node, by interpreter key.

    Args:
        log_dir: The directory for their own output.
        idle_s: Idle seconds after which a zygote is retired.
    """

    def __init__(self, log_dir: Path, idle_s: float) -> None:
        self._log_dir = log_dir
        self._idle_s = idle_s
        self._by_key: dict[str, Zygote] = {}
        self._others: list[Zygote] = []
        # zygotes whose process has not been reaped
        self._by_pid: dict[int, Zygote] = {}

    def get(self, interpreter: Interpreter) -> Zygote:
        """Return the interpreter's zygote, and start it if there is none.

        Raises:
            OSError: The interpreter can't be executed.
        """
        zygote = self._by_key.get(interpreter.key)
        if zygote is None:
            zygote = Zygote(interpreter, self._log_dir, self._on_zygote_lost)
            self._by_key[interpreter.key] = zygote
            self._by_pid[zygote.process.pid] = zygote
            self.retire(keep=zygote)
        zygote.last_used = asyncio.get_running_loop().time()
        return zygote

    def start_another(self, interpreter: Interpreter) -> Zygote:
        """Start a zygote beside the interpreter's own one. The caller ends it with `end`.

        Raises:
            OSError: The interpreter can't be executed.
        """
        zygote = Zygote(interpreter, self._log_dir, self._on_zygote_lost)
        self._others.append(zygote)
        self._by_pid[zygote.process.pid] = zygote
        return zygote

    def end(self, zygote: Zygote) -> None:
        """Close a zygote of `start_another`."""
        if zygote in self._others:
            self._others.remove(zygote)
            zygote.close()

    def is_alive(self, zygote: Zygote) -> bool:
        """Whether a zygote of `start_another` is neither closed nor lost."""
        return zygote in self._others

    def retire(self, keep: Zygote | None = None) -> None:
        """Close idle zygotes beyond two, and those that are unused for too long."""
        now = asyncio.get_running_loop().time()
        idle = sorted((z for z in self._by_key.values() if z.idle and z is not keep), key=lambda z: z.last_used)
        surplus = len(idle) - _MAX_IDLE + (keep is not None)
        for position, zygote in enumerate(idle):
            if position < surplus or now - zygote.last_used > self._idle_s:
                del self._by_key[zygote.interpreter.key]
                zygote.close()

    def reaped(self, pid: int, status: int) -> None:
        """Handle the end of a child; `status` is the exit code, negative for a signal."""
        zygote = self._by_pid.pop(pid, None)
        if zygote is not None:
            # its descendants were reparented to the agent when it died
            child_process.end_adopted(lambda: zygote.reaped(status))

    def pids(self) -> list[int]:
        return [zygote.process.pid for zygote in (*self._by_key.values(), *self._others)]

    def keys(self) -> list[str]:
        """Return the keys of the interpreters that have a zygote."""
        return list({*self._by_key, *(zygote.interpreter.key for zygote in self._others)})

    def close(self) -> None:
        """End every zygote and all its ranks."""
        for zygote in (*self._by_key.values(), *self._others):
            zygote.close()
        self._by_key.clear()
        self._others.clear()

    def _on_zygote_lost(self, zygote: Zygote) -> None:
        if self._by_key.get(zygote.interpreter.key) is zygote:
            del self._by_key[zygote.interpreter.key]
        if zygote in self._others:
            self._others.remove(zygote)


def _last_line(path: Path, begin: int) -> str:
    """Return the last line written after an offset, "" when there is none."""
    try:
        lines = path.read_bytes()[begin:].decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""
