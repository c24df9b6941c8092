"""A group: N ranks from fork to exit. `RunRanks` are those of its ranks that take part in one run.

The group of a fresh run gets one `Execute`, that of a session gets many; a standby group has had none yet.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sgpu_magic.agent import faults
from sgpu_magic.agent.ranks.rank_output import RankOutput
from sgpu_magic.agent.ranks.rank_process import GroupStore, RankProcess, StackFile
from sgpu_magic.agent.ranks.zygotes import Zygote
from sgpu_magic.system.message_stream import Limits, MessageStream
from sgpu_magic.wire import codec
from sgpu_magic.wire.base import FailureKind, new_id
from sgpu_magic.wire.client import SendComms
from sgpu_magic.wire.rank import (
    CommsFromFrontEnd,
    DescendantsEnded,
    Exit,
    Exited,
    Fork,
    FromRank,
    Release,
    StandsBy,
    ToRank,
)
from sgpu_magic.wire.rank_events import OutputWritten

if TYPE_CHECKING:
    from sgpu_magic.agent.runs.execution_kinds import FreshRun
    from sgpu_magic.agent.runs.session import NodeSession


RANK_LIMITS = Limits(message_bytes=1 << 30, descriptors=64)
"""What the agent accepts from a rank. Results above 64 kB are not in messages."""


@dataclass(eq=False, repr=False)
class Group:
    """N ranks of one zygote.

    Args:
        zygote: Forks the ranks.
        size: The number of ranks on this node.
        join_early: Whether they join the process group before they have a run.
        whole_bytes: Bytes of output per rank that are sent untruncated.
        scratch: Directory for files on systems without memory files.
        warm_up: Whether they run a small warm-up cell while they wait.
        first_rank: The first rank's number; more than 0 when lower ranks are on other nodes.
        world_size: The number of ranks on all nodes; by default, all are on this node.
    """

    zygote: Zygote
    size: int
    join_early: bool
    whole_bytes: int
    scratch: Path
    _: KW_ONLY
    warm_up: bool = False
    first_rank: int = 0
    world_size: int = 0

    def __post_init__(self) -> None:
        self.group_id = new_id()
        self.world_size = self.world_size or self.size
        self.listener: FreshRun | NodeSession | None = None
        self.broken = ""
        self.broken_kind = FailureKind.ENVIRONMENT
        self.wanted_at = asyncio.get_running_loop().time()
        # port of the socket that rank 0 got with Prepare; 0 while the ranks are not prepared
        self.master_port = 0
        self._unforked = self.size
        # ranks that stand by for a run, and whether their processes are stopped (SIGSTOP) until then
        self._standing_by: set[int] = set()
        self._paused = False
        self.ranks: list[RankProcess] = []
        self._store = GroupStore(self.scratch)
        try:
            with faults.charging(self.faulted):
                for rank in range(self.first_rank, self.first_rank + self.size):
                    self.ranks.append(self._make(rank))
                for process in self.ranks:
                    self._order(process)
        except BaseException:
            # ranks that are already forked exit when their sockets close
            self.close()
            raise

    def rank(self, number: int) -> RankProcess:
        """Return the current process of rank `number`."""
        return self.ranks[number - self.first_rank]

    def order(self, rank: int, order: ToRank, blobs: Sequence[bytes] = (), descriptors: Sequence[int] = ()) -> None:
        """Send the rank an order, even before it is forked."""
        stream = self.rank(rank).stream
        if stream is not None:
            stream.send(order, blobs, descriptors)

    def relay_comms(self, message: SendComms, frames: Sequence[bytes]) -> None:
        """Send a front end's message to a rank's widgets. The rank's first order must have been sent."""
        index = message.rank - self.first_rank
        if 0 <= index < len(self.ranks) and self.ranks[index].alive:
            self.order(message.rank, CommsFromFrontEnd(messages=message.messages), frames)

    def replace(self, numbers: Sequence[int], store: GroupStore) -> None:
        """Fork new processes for dead ranks; they join late, over a new store.

        Args:
            numbers: The ranks to replace.
            store: The store over which they join the ranks that stay. The group owns it.
        """
        self._store.close()
        self._store, self.warm_up, self.join_early = store, False, False
        self._unforked += len(numbers)
        with faults.charging(self.faulted):
            for number in numbers:
                self.rank(number).close()
                self.ranks[number - self.first_rank] = self._make(number)
                self._order(self.rank(number))

    def request_exit(self) -> None:
        """Tell every rank to exit. A rank that has executed nothing exits at end of file."""
        for process in self.ranks:
            if process.stream is not None:
                process.stream.send(Exit())

    def pause(self) -> None:
        """Stop the processes of ranks that all stand by: each of gloo's loops wakes up a hundred times a second."""
        if not self._paused and len(self._standing_by) == len(self.ranks):
            self._paused = True
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue paused ranks. Call it before they get an order."""
        if self._paused:
            self._paused = False
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self.ranks:
            process.signal(number)

    def dismiss(self) -> None:
        """End a group without a run: its ranks exit when their sockets close."""
        self.resume()
        for process in self.ranks:
            if process.stream is not None:
                process.stream.close()

    def release(self, connections: dict[int, tuple[int, ...]], *, interrupt: bool) -> None:
        """Tell each rank to shut down its connections to its peers.

        Args:
            connections: The descriptors of these connections, by process id.
            interrupt: Whether the ranks that have not reported are interrupted afterwards.
        """
        for process in self.ranks:
            if process.stream is not None and process.pid is not None:
                process.stream.send(Release(fds=connections.get(process.pid, ()), interrupt=interrupt))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.ranks if process.pid is not None]

    @property
    def has_exited(self) -> bool:
        """Whether every rank has ended, with all its descendants."""
        return self._unforked == 0 and all(process.has_exited for process in self.ranks)

    def has_dead_rank(self) -> bool:
        """Whether a rank has ended, even if the zygote has not reported it yet."""
        if self.broken or any(process.is_reaped for process in self.ranks):
            return True
        return any(process.is_ending() for process in self.ranks if process.pidfd is not None)

    def is_dead(self) -> bool:
        """Whether every rank has ended, even if an exit status is unknown."""
        return all(process.is_dead() for process in self.ranks)

    def close(self) -> None:
        """Free the agent's resources; the ranks must be gone or exiting."""
        self.zygote.forget(self.group_id)
        self._store.close()
        for process in self.ranks:
            if process.pidfd is not None:
                asyncio.get_running_loop().remove_reader(process.pidfd)
            process.close()

    # ------------------------------------------------------------ from the zygote

    def forked(self, rank: int, pid: int) -> None:
        process = self.rank(rank)
        process.pid = pid
        if hasattr(os, "pidfd_open"):
            try:
                process.pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                process.is_reaped = True
            except OSError:
                # out of descriptors: only the zygote reports the rank's exit
                pass
        if process.is_doomed:
            process.signal(signal.SIGKILL, whole_session=True)
        self._order_done()
        messages, process.early_messages = process.early_messages, []
        for message, frames in messages:
            with faults.guarded(self.faulted):
                self._on_message(rank, message, frames)

    def fork_refused(self, rank: int, message: str) -> None:
        self._order_done()
        self._break(FailureKind.ENVIRONMENT, f"a rank could not be started: {message}.")

    def exited(self, message: Exited) -> None:
        status = message.status
        for process in self.ranks:
            if process.pid == message.pid and process.exit_status is None:
                process.exit_status, process.peak_bytes = status, message.peak_bytes
                process.has_descendants = message.descendants
                if self.listener is not None:
                    self.listener.rank_exited(process.rank, status)
                else:
                    self.broken = self.broken or f"a standby rank ended with status {status}"

    def descendants_ended(self, message: DescendantsEnded) -> None:
        for process in self.ranks:
            if process.pid == message.pid and process.has_descendants:
                process.has_descendants = False
                if self.listener is not None:
                    self.listener.on_descendants_ended(process.rank, message)

    def faulted(self, error: Exception) -> None:
        """Handle an exception in a callback that served the group's ranks."""
        if self.listener is not None:
            self.listener.faulted(error)
        else:
            self.broken = self.broken or f"an internal error in the agent: {error!r}"

    def zygote_lost(self, kind: FailureKind, message: str) -> None:
        self._unforked = 0
        self._store.close()
        self._break(kind, message)
        for process in self.ranks:
            if process.has_descendants and process.pid is not None:
                # the agent itself has ended the descendants, which it adopted; nobody else reports their end
                self.descendants_ended(DescendantsEnded(pid=process.pid))
            if process.alive:
                process.signal(signal.SIGKILL, whole_session=True)
                self._ended_without_zygote(process)

    def _ended_without_zygote(self, process: RankProcess) -> None:
        """Report a rank that dies with its zygote, which can't report its status, once its process has ended."""
        if process.exit_status is not None:
            return
        if process.pidfd is not None and not process.is_dead():
            # it may be blocked in a system call, and holds its devices until it ends
            loop = asyncio.get_running_loop()
            descriptor = process.pidfd

            def ended() -> None:
                loop.remove_reader(descriptor)
                with faults.guarded(self.faulted):
                    self._ended_without_zygote(process)

            loop.add_reader(descriptor, ended)
            return
        process.exit_status = -signal.SIGKILL
        if self.listener is not None:
            self.listener.rank_exited(process.rank, -signal.SIGKILL)

    # ------------------------------------------------------------ internals

    def _make(self, rank: int) -> RankProcess:
        output = RankOutput(rank, self.whole_bytes, self._wrote, self._log_ended)
        try:
            return RankProcess(rank, output, StackFile(self.scratch))
        except BaseException:
            output.close()
            raise

    def _order(self, process: RankProcess) -> None:
        ours, theirs = socket.socketpair()
        process.stream = MessageStream[FromRank](
            ours,
            codec.from_rank,
            lambda message, frames: self._on_message(process.rank, message, frames),
            lambda: None,  # end of file alone means nothing; the zygote reports how a rank ended
            limits=RANK_LIMITS,
            on_damaged=lambda reason: self._damaged(process, reason),
        )
        descriptors = [theirs.fileno(), *process.output.child_ends, process.stack_file.fd, *self._store.descriptors]
        order = Fork(
            group_id=self.group_id,
            rank=process.rank,
            ranks=self.world_size,
            join_early=self.join_early,
            warm_up=self.warm_up,
            announce=self.warm_up,
            store_path=self._store.path,
        )
        self.zygote.fork(order, descriptors, self)
        theirs.close()
        process.output.close_child_ends()

    def _order_done(self) -> None:
        self._unforked -= 1
        if self._unforked == 0:
            self._store.close()

    def _on_message(self, rank: int, message: FromRank, frames: Sequence[bytes]) -> None:
        process = self.rank(rank)
        if process.pid is None:
            # on a busy machine, a rank's message may arrive before the zygote reports the fork
            process.early_messages.append((message, frames))
        elif isinstance(message, StandsBy):
            self._standing_by.add(rank)
        elif self.listener is not None:
            self.listener.on_rank_message(rank, message, frames)

    def _damaged(self, process: RankProcess, reason: str) -> None:
        """End a rank whose data can't be decoded: no later message can be recognized, not even its result."""
        self._break(
            FailureKind.WORKER_DIED,
            f"rank {process.rank} was ended: what it sent to the agent can't be read ({reason}). Code that writes to "
            "descriptors which it has not opened can be the cause, and so can a display of more than "
            f"{RANK_LIMITS.message_bytes >> 30} GiB.",
        )
        process.signal(signal.SIGKILL, whole_session=True)

    def _log_ended(self, rank: int, problem: str) -> None:
        if self.listener is not None:
            self.listener.rank_log_ended(rank, problem)

    def _wrote(self, batch: OutputWritten) -> None:
        if self.listener is not None:
            self.listener.rank_wrote(batch)

    def _break(self, kind: FailureKind, message: str) -> None:
        if not self.broken:
            self.broken, self.broken_kind = message, kind
            if self.listener is not None:
                self.listener.group_broken(kind, message)


class RunRanks:
    """A run's ranks: all ranks of a group, or some of a session's.

    Looked up in the group each time, since a session's ranks may be replaced by new processes.

    Args:
        group: The ranks' group.
        numbers: The ranks' numbers, ascending.
    """

    def __init__(self, group: Group, numbers: Sequence[int]) -> None:
        self.group = group
        self.numbers = tuple(numbers)

    @property
    def ranks(self) -> list[RankProcess]:
        """Their processes, ascending."""
        return [self.group.rank(number) for number in self.numbers]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.ranks if process.pid is not None]
