"""Ranks of a real zygote, controlled over the wire as by an agent."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from sgpu_magic.agent.ranks.rank_process import StackFile
from sgpu_magic.agent.ranks.stop import connections_between
from sgpu_magic.payload import pack, unpack
from sgpu_magic.system.message_stream import StreamConnection
from sgpu_magic.wire import codec
from sgpu_magic.wire.attachments import InlinePayload
from sgpu_magic.wire.base import Record, RunKind, new_id
from sgpu_magic.wire.rank import (
    AnswerQuestion,
    AskTracking,
    CellFailed,
    Cleared,
    DescendantsEnded,
    Displayed,
    Execute,
    Exit,
    Exited,
    Finished,
    Fork,
    Forked,
    FromRank,
    FromZygote,
    InPlace,
    Joined,
    Prepare,
    QuestionAnswered,
    Release,
    Renew,
    Renewed,
    TrackingAnswered,
    ZygoteReady,
)
from sgpu_magic.wire.run import CellSource, OutputName, RankAnswer, RankContext, RankQuestion
from sgpu_magic.wire.tracking import Tracking

KEY = b"k" * 32
R = TypeVar("R")


class Zygote:
    """One zygote, started as the agent starts it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sgpu_magic.worker.process.zygote", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd="/",
        )
        theirs.close()
        self.socket = ours
        self.link: StreamConnection[FromZygote] = StreamConnection(ours, codec.from_zygote)
        assert isinstance(self.receive(60)[0], ZygoteReady)
        self.exits: dict[int, int] = {}
        self.ended: dict[int, DescendantsEnded] = {}

    def receive(self, deadline_s: float) -> tuple[FromZygote, Sequence[bytes]]:
        if not self.link.has_message():
            assert select.select([self.link], [], [], deadline_s)[0], f"the zygote says nothing for {deadline_s} s"
        received = self.link.receive()
        assert received is not None, "the zygote is gone"
        return received

    def fork(self, order: Fork, descriptors: Sequence[int]) -> int:
        """Fork a rank and return its pid."""
        self.link.send(order, (), descriptors)
        while True:
            message, _ = self.receive(10)
            if isinstance(message, Forked):
                return message.pid
            self._note(message)

    def wait(self, pid: int, deadline_s: float = 10) -> int:
        """Wait for the end of the rank and return how it ended."""
        while pid not in self.exits:
            self._note(self.receive(deadline_s)[0])
        return self.exits[pid]

    def _note(self, message: FromZygote) -> None:
        if isinstance(message, Exited):
            self.exits[message.pid] = message.status
        else:
            assert isinstance(message, DescendantsEnded), message
            self.ended[message.pid] = message

    def close(self) -> None:
        self.link.close()
        assert self.process.wait(10) == 0


class Rank:
    """One rank: its connection and its output."""

    def __init__(self, zygote: Zygote, order: Fork, store_fd: int, scratch: Path) -> None:
        ours, theirs = socket.socketpair()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        self.rank = order.rank
        self.stack_file = StackFile(scratch)
        self.link: StreamConnection[FromRank] = StreamConnection(ours, codec.from_rank)
        self.zygote = zygote
        self.pid = zygote.fork(order, [theirs.fileno(), out_write, err_write, self.stack_file.fd, store_fd])
        for descriptor in (out_write, err_write):
            os.close(descriptor)
        theirs.close()
        self._text = b""
        self._readers = [threading.Thread(target=self._read, args=(fd,), daemon=True) for fd in (out_read, err_read)]
        for reader in self._readers:
            reader.start()
        self.displays: list[Displayed | Cleared] = []
        self.answer: TrackingAnswered | None = None
        self.others: list[tuple[FromRank, Sequence[bytes]]] = []

    def _read(self, descriptor: int) -> None:
        while data := os.read(descriptor, 65536):
            self._text += data
        os.close(descriptor)

    @property
    def printed(self) -> str:
        return self._text.decode()

    def send(self, message: Record, blobs: Sequence[bytes] = (), descriptors: Sequence[int] = ()) -> None:
        self.link.send(message, blobs, descriptors)

    def expect(self, *kinds: type[R], deadline_s: float = 30) -> R:
        """Return the next message of these kinds; displays and remarks before it are kept."""
        return self.expect_with_frames(*kinds, deadline_s=deadline_s)[0]

    def expect_with_frames(self, *kinds: type[R], deadline_s: float = 30) -> tuple[R, Sequence[bytes]]:
        end = time.monotonic() + deadline_s
        while True:
            if not self.link.has_message():
                left = max(0.0, end - time.monotonic())
                ready = select.select([self.link], [], [], left)[0]
                assert ready, f"rank {self.rank} says nothing for {deadline_s} s; it printed {self.printed}"
            received = self.link.receive()
            assert received is not None, f"rank {self.rank} is gone; it printed {self.printed}"
            message, frames = received
            if isinstance(message, kinds):
                return message, frames
            if isinstance(message, Displayed | Cleared):
                self.displays.append(message)
                self.send(InPlace())
                continue
            if isinstance(message, AskTracking) and self.answer is not None:
                self.send(self.answer)
            assert not isinstance(message, CellFailed), (
                f"{message.failure.traceback_text or message.failure.message}\nit printed {self.printed}"
            )
            self.others.append((message, frames))

    def ask(
        self, what: str, code: str = "", cursor: int | None = None, detail: int = 0, patterns: Sequence[str] = ()
    ) -> RankAnswer:
        question = RankQuestion(
            rank=self.rank,
            what=what,
            code=code,
            cursor=len(code) if cursor is None else cursor,
            detail=detail,
            patterns=tuple(patterns),
        )
        self.send(AnswerQuestion(request=7, question=question))
        answered = self.expect(QuestionAnswered)
        assert answered.request == 7
        return answered.answer

    def interrupt(self) -> None:
        os.kill(self.pid, signal.SIGINT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self.zygote.wait(self.pid) == -signal.SIGKILL

    def close(self) -> None:
        """Close the connection and wait until the rank is gone."""
        self.link.close()
        self.zygote.wait(self.pid)
        for reader in self._readers:
            reader.join(10)
        self.stack_file.close()


class Session:
    """A session of N ranks, with this object as their agent.

    Args:
        zygote: The zygote that forks them.
        ranks: World size.
        environ: The kernel's environment.
    """

    def __init__(self, zygote: Zygote, ranks: int, environ: dict[str, str] | None = None, cwd: str = "/") -> None:
        self.zygote = zygote
        self.size = ranks
        self.scratch = tempfile.TemporaryDirectory()
        self.environ = dict(environ or {"PATH": os.environ["PATH"], "HOME": self.scratch.name})
        self.cwd = cwd
        self.lone_training = True
        self.sys_path = tuple(sys.path)
        self.group = new_id()
        store = os.memfd_create("store")
        self.ranks = [self._fork(rank, store) for rank in range(ranks)]
        os.close(store)
        self.master_port = 0
        self.cells = 0

    def _fork(self, rank: int, store: int) -> Rank:
        order = Fork(group_id=self.group, rank=rank, ranks=self.size, join_early=False)
        return Rank(self.zygote, order, store, Path(self.scratch.name))

    @property
    def context(self) -> RankContext:
        own = {"cwd": self.cwd, "sys_path": self.sys_path, "environ": dict(self.environ)}
        return RankContext(umask=0o022, key=KEY, lone_training=self.lone_training, **own)

    def variables(self, rank: int) -> dict[str, str]:
        size = str(self.size)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.master_port),
        }

    def prepare(self, *, stays: bool = True, only: Sequence[int] = (), renewal: bool = False) -> None:
        """Send `Prepare`; `joined` waits for the answers."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            # as in the agent: the port belongs to rank 0, for as long as its process is the same
            if not only or 0 in only:
                self.master_port = listening.getsockname()[1]
            for rank in only or range(self.size):
                order = Prepare(
                    context=self.context,
                    device="cpu",
                    rank_variables=self.variables(rank),
                    stays=stays,
                    renewal=renewal,
                )
                self.ranks[rank].send(order, (), [listening.fileno()] if rank == 0 else [])

    def connect(self) -> Session:
        self.prepare()
        for rank in self.ranks:
            rank.expect(Joined)
        return self

    def execute(
        self,
        body: str,
        *,
        names: dict[str, object] | None = None,
        outputs: Sequence[str] = (),
        all_ranks: bool = True,
        only: Sequence[int] = (),
        kind: RunKind = RunKind.CELL,
        reload: bool = False,
        in_session: bool = True,
        tracking: Tracking | None = None,
        profile: bool = False,
    ) -> None:
        """Send a cell; `results` or `failures` wait for its outcome."""
        self.cells += 1
        packed = pack.pack_namespace(names or {}, names or {}, KEY)
        data = packed.to_bytes()
        inline = len(data) <= 65536
        payload = -1 if inline else os.memfd_create("payload")
        if not inline:
            os.write(payload, data)
        for rank in only or range(self.size):
            order = Execute(
                run_id=f"run-{self.cells}",
                cell=CellSource(body=body, magic_line="%%distributed", execution_count=self.cells),
                context=self.context,
                layout=packed.layout,
                inline=inline,
                outputs=tuple(OutputName(name, all_ranks) for name in outputs),
                run_dir=self.scratch.name,
                device="cpu",
                rank_variables=self.variables(rank),
                kind=kind,
                in_session=in_session,
                reload=reload,
                only=tuple(only),
                tracking=tracking,
                profile=profile,
            )
            self.ranks[rank].send(order, [data] if inline else [], [] if inline else [payload])
        if not inline:
            os.close(payload)

    def result(self, rank: int, deadline_s: float = 60) -> dict[str, Any]:
        """Return `names`, `value` and `text` of the rank's result."""
        message, frames = self.ranks[rank].expect_with_frames(Finished, deadline_s=deadline_s)
        assert message.grouped
        found: dict[str, Any] = {"names": {}, "value": None, "text": message.result.value_repr}
        payload = message.result.payload
        if payload is None:
            return found
        if isinstance(payload.source, InlinePayload):
            data = frames[0]
        else:
            descriptor = self.ranks[rank].link.take_descriptors(1)[0]
            data = os.pread(descriptor, payload.source.size, 0)
            os.close(descriptor)
        value = unpack.unpack(bytearray(data), payload.layout, KEY, {})
        assert isinstance(value, dict)
        return found | value

    def run(self, body: str, **options: Any) -> list[dict[str, Any]]:
        """Execute a cell on all ranks (or `only`) and return their results."""
        self.execute(body, **options)
        return [self.result(rank) for rank in options.get("only") or range(self.size)]

    def failure(self, rank: int, deadline_s: float = 60) -> CellFailed:
        return self.ranks[rank].expect(CellFailed, deadline_s=deadline_s)

    def release(self) -> None:
        """Shut the connections between the ranks down."""
        ends = connections_between([rank.pid for rank in self.ranks])
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError):
                rank.send(Release(fds=ends.get(rank.pid, ()), interrupt=True))

    def renew(self, replaced: Sequence[int] = ()) -> list[str]:
        """Reconnect all ranks, of which `replaced` are new processes; return what each survivor reports as lost."""
        store = os.memfd_create("store")
        for rank in replaced:
            self.ranks[rank].close()
            self.ranks[rank] = self._fork(rank, store)
        if replaced:
            self.prepare(only=replaced, renewal=True)
        survivors = [rank for rank in self.ranks if rank.rank not in replaced]
        for rank in survivors:
            rank.send(Renew(replaced=tuple(replaced)), (), [store])
        os.close(store)
        for rank in replaced:
            self.ranks[rank].expect(Joined)
        answers = [rank.expect(Renewed) for rank in survivors]
        assert not any(answer.problem for answer in answers), answers
        return [answer.lost for answer in answers]

    def leave(self) -> None:
        """End the ranks with `Exit`."""
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.send(Exit())
        for rank in self.ranks:
            rank.close()
        self.scratch.cleanup()
