"""One rank as the agent holds it: its process, its socket, its stack file, and its output's two pipes.

The pipes are taken apart into the rank's log and into bounded batches for the pool. Python's stderr arrives marked in
the first (see `worker.process.terminal`); C code's and child processes' in the second.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import fcntl
import os
import select
import signal
import struct
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sgpu_magic.agent.watch.stacks import StackFile
from sgpu_magic.system.message_stream import MessageStream
from sgpu_magic.wire.rank import FromRank
from sgpu_magic.wire.rank_events import OutputWritten
from sgpu_magic.wire.zygote import STDERR_BEGIN, STDERR_END

_PIPE_BYTES = 1 << 20
# of one rank between two batches: who writes faster waits in its pipe
_BURST_BYTES = 4 << 20
_READ_BYTES = 1 << 18
_F_SETPIPE_SZ = 1031
BATCH_INTERVAL_S = 0.05
_TAIL_BYTES = 16_384
_LAST_BYTES = 2_000
_STDOUT, _STDERR = "stdout", "stderr"


@dataclass(eq=False, repr=False)
class RankOutput:
    """Reads one rank's pipes.

    Args:
        rank: The rank.
        whole_bytes: Bytes of output per stream that are sent whole; later batches are cut to their tail.
        emit: Takes each batch.
        log_ended: Told once, with the rank and why, when the log can't be written any more.
    """

    rank: int
    whole_bytes: int
    emit: Callable[[OutputWritten], None]
    log_ended: Callable[[int, str], None]

    def __post_init__(self) -> None:
        self.lines = 0
        self.total_bytes = 0
        # opened when there is something to write: what a rank does not print is no file
        self._log_path = ""
        self._log: int | None = None
        self._pending: list[tuple[str, bytearray]] = []
        self._paused = False
        self._pending_start = 0
        self._decoders = {stream: codecs.getincrementaldecoder("utf-8")("replace") for stream in (_STDOUT, _STDERR)}
        self._in_stderr = False
        self._held = b""
        self._last_data = b""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._last_emitted = 0.0
        self._readers: list[int] = []
        # those that have a writer left
        self._open: set[int] = {0, 1}
        self.child_ends: tuple[int, ...] = ()
        try:
            self._open_pipes()
        except BaseException:
            self.close()
            raise

    def _open_pipes(self) -> None:
        for _ in range(2):
            reader, writer = os.pipe2(os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
            self._readers.append(reader)
            self.child_ends += (writer,)
            os.set_blocking(reader, False)
            with contextlib.suppress(OSError):
                # fewer wake-ups under a flood; the system may refuse more than a user's share
                fcntl.fcntl(writer, _F_SETPIPE_SZ, _PIPE_BYTES)
        self._listen()

    def _listen(self) -> None:
        self._paused = False
        for index in self._open:
            self._loop.add_reader(self._readers[index], self._readable, index)

    def close_child_ends(self) -> None:
        for writer in self.child_ends:
            with contextlib.suppress(OSError):
                os.close(writer)
        self.child_ends = ()

    def begin_log(self, path: str) -> None:
        """From now on write to this file; what a standby rank printed before belongs to no run."""
        self._read_all()
        self._pending.clear()
        self.switch_log(path)

    def switch_log(self, path: str, lines: int = 0, total_bytes: int = 0) -> None:
        """From now on write to this file, to which also belongs what is in the pipes; `drain` before takes that out.

        Args:
            path: The file; what it has stays.
            lines: Lines that it has.
            total_bytes: Its size.
        """
        self.lines = lines
        self._pending_start = self.total_bytes = total_bytes
        self._last_data = b""
        self._close_log()
        self._log_path = path

    def drain(self, *, last: bool = False) -> None:
        """Read what is in the pipes now, and send it. Not until end of file: a child may hold a pipe open.

        Args:
            last: Nothing more is to come, so what looks like the beginning of a mark is none.
        """
        self._read_all()
        if last and self._held:
            held, self._held = self._held, b""
            self._take(_STDERR if self._in_stderr else _STDOUT, held)
        self.flush()

    def tail(self, limit: int = 5) -> str:
        """The last lines written, for a death's story."""
        return "\n".join(self._last_data.decode("utf-8", "replace").splitlines()[-limit:])

    def flush(self) -> None:
        """Send what waits for its batch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pending:
            if self._paused:
                self._listen()
            pending, self._pending = self._pending, []
            start, self._pending_start = self._pending_start, self.total_bytes
            self._last_emitted = self._loop.time()
            for batch in self._batches(pending, start):
                self.emit(batch)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for reader in self._readers:
            self._loop.remove_reader(reader)
            os.close(reader)
        self._readers = []
        self._open.clear()
        self.close_child_ends()
        self._close_log()

    def _readable(self, index: int) -> None:
        size = self._read(index, _READ_BYTES)
        if size is None:
            # `drain` was quicker
            return
        if not size:
            # every writer is gone
            self._open.discard(index)
            self._loop.remove_reader(self._readers[index])
            return
        self._schedule()
        if self.total_bytes - self._pending_start > _BURST_BYTES and self._timer is not None:
            self._paused = True
            for each in self._open:
                self._loop.remove_reader(self._readers[each])

    def _read_all(self) -> None:
        """Read what is in the pipes at this moment: a child may go on writing for ever."""
        for index, reader in enumerate(self._readers):
            (waiting,) = struct.unpack("i", fcntl.ioctl(reader, termios.FIONREAD, bytes(4)))
            while waiting > 0 and (size := self._read(index, min(waiting, _READ_BYTES))):
                waiting -= size

    def _read(self, index: int, most: int) -> int | None:
        """Take up to `most` bytes of a pipe; return how many there were, 0 at its end, None if there is nothing now."""
        try:
            data = os.read(self._readers[index], most)
        except BlockingIOError:
            return None
        if index == 1:
            self._take(_STDERR, data)
        else:
            for stream, part in self._split_marks(data):
                self._take(stream, part)
        return len(data)

    def _split_marks(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        data = self._held + data
        self._held = b""
        while data:
            mark = STDERR_END if self._in_stderr else STDERR_BEGIN
            before, found, rest = data.partition(mark)
            stream = _STDERR if self._in_stderr else _STDOUT
            if found:
                self._in_stderr = not self._in_stderr
            else:
                # a mark may be cut in two by the end of this read
                cut = _suffix_of_mark(before, mark)
                if cut:
                    before, self._held = before[:-cut], before[-cut:]
            if before:
                yield stream, before
            data = rest

    def _take(self, stream: str, data: bytes) -> None:
        self.lines += data.count(b"\n")
        self.total_bytes += len(data)
        self._last_data = (self._last_data + data[-_LAST_BYTES:])[-_LAST_BYTES:]
        if self._log_path and data:
            self._write(data)
        if self._pending and self._pending[-1][0] == stream:
            self._pending[-1][1].extend(data)
        elif data:
            self._pending.append((stream, bytearray(data)))

    def _write(self, data: bytes) -> None:
        try:
            if self._log is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._log = os.open(self._log_path, flags, 0o600)
            rest = memoryview(data)
            while rest:
                # a disk that is nearly full takes a part
                rest = rest[os.write(self._log, rest) :]
        except OSError as error:
            # a full disk stops the capture, never the training
            self._close_log()
            self.log_ended(self.rank, error.strerror or str(error))

    def _close_log(self) -> None:
        self._log_path = ""
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _schedule(self) -> None:
        if self._timer is None:
            due = self._last_emitted + BATCH_INTERVAL_S
            if due <= self._loop.time():
                self.flush()
            else:
                self._timer = self._loop.call_at(due, self.flush)

    def _batches(self, pending: list[tuple[str, bytearray]], start: int) -> Iterator[OutputWritten]:
        for stream, data in pending:
            end = start + len(data)
            skipped = b""
            if start >= self.whole_bytes and len(data) > _TAIL_BYTES:
                cut = data.find(b"\n", len(data) - _TAIL_BYTES) + 1 or len(data) - _TAIL_BYTES
                skipped, data = data[:cut], data[cut:]
                self._decoders[stream].reset()
            yield OutputWritten(
                rank=self.rank,
                stream=stream,
                text=self._decoders[stream].decode(data),
                start=start,
                end=end,
                skipped_bytes=len(skipped),
                skipped_lines=skipped.count(b"\n"),
            )
            start = end


def _suffix_of_mark(data: bytes, mark: bytes) -> int:
    """Length of the longest end of `data` that begins `mark`."""
    for size in range(min(len(mark) - 1, len(data)), 0, -1):
        if data.endswith(mark[:size]):
            return size
    return 0


class RankProcess:
    """What the agent has of one rank, also when the process is no more."""

    def __init__(self, rank: int, output: RankOutput, stack_file: StackFile) -> None:
        self.rank = rank
        self.output = output
        self.stack_file = stack_file
        self.pid: int | None = None
        self.pidfd: int | None = None
        # it had been reaped before the agent could watch it; the zygote has yet to report its status
        self.is_reaped = False
        # it was to be killed before it was forked
        self.is_doomed = False
        self.exit_status: int | None = None
        self.peak_bytes = 0
        self.stream: MessageStream[FromRank] | None = None

    @property
    def alive(self) -> bool:
        return self.pid is not None and self.exit_status is None

    def is_dead(self) -> bool:
        """Whether it has ended, also when the zygote has not yet told so."""
        if self.exit_status is not None or self.pidfd is None:
            return not self.alive
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Free what the agent holds of it; the process must be gone or about to go."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.output.close()
        self.stack_file.close()

    def signal(self, number: int, *, whole_session: bool = False) -> None:
        """Signal the rank, or with it all that stayed in its process group.

        One that is not forked yet is killed as soon as it is; other signals do not reach it. The zygote reaps a dead
        rank before the agent hears of it; the pidfd says for sure that the pid is still its.
        """
        if self.pid is None:
            self.is_doomed = self.is_doomed or number == signal.SIGKILL
            return
        if self.exit_status is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if whole_session:
                if self.pidfd is not None:
                    signal.pidfd_send_signal(self.pidfd, 0)
                # before its first steps it has none of its own
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, number)
                    return
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, number)
            else:
                os.kill(self.pid, number)
