"""One rank as the agent sees it: its process, its socket, its stack file, and the two pipes of its output.

Output goes to the rank's log and, in bounded batches, to the pool. The first pipe carries stdout and Python's stderr,
which is marked (see `worker.process.terminal`); the second carries the stderr of C code and child processes.
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
# limit per rank between two batches: a rank that writes faster blocks on its pipe
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
        whole_bytes: Bytes of output that are sent whole; later batches are cut to their tail.
        emit: Receives each batch.
        log_ended: Called with the rank and the reason when the log can't be written any more.
    """

    rank: int
    whole_bytes: int
    emit: Callable[[OutputWritten], None]
    log_ended: Callable[[int, str], None]

    def __post_init__(self) -> None:
        self.lines = 0
        self.total_bytes = 0
        # opened on the first write, so that a silent rank makes no file
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
        # pipes that still have a writer
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
                # fewer wake-ups under a flood; refused beyond the user's limit for pipe buffers
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
        """Start a run's log; output that a standby rank printed before is dropped."""
        self._read_all()
        self._pending.clear()
        self.switch_log(path)

    def switch_log(self, path: str, lines: int = 0, total_bytes: int = 0) -> None:
        """Write to this log from now on, including what is still in the pipes; call `drain` before to keep that out.

        Args:
            path: The log, to which output is appended.
            lines: The number of lines that it already has.
            total_bytes: Its current size.
        """
        self.lines = lines
        self._pending_start = self.total_bytes = total_bytes
        self._last_data = b""
        self._close_log()
        self._log_path = path

    def drain(self, *, last: bool = False) -> None:
        """Read what is in the pipes now and send it. Does not wait for end of file: a child may hold a pipe open.

        Args:
            last: Whether this is the end of the output, so that a partial mark at the end is output.
        """
        self._read_all()
        if last and self._held:
            held, self._held = self._held, b""
            self._take(_STDERR if self._in_stderr else _STDOUT, held)
        self.flush()

    def tail(self, limit: int = 5) -> str:
        """Return the last lines written, to describe an exit."""
        return "\n".join(self._last_data.decode("utf-8", "replace").splitlines()[-limit:])

    def flush(self) -> None:
        """Send the pending batch."""
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
            # `drain` has read it
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
        """Read only what is in the pipes at this moment: a child may go on writing forever."""
        for index, reader in enumerate(self._readers):
            (waiting,) = struct.unpack("i", fcntl.ioctl(reader, termios.FIONREAD, bytes(4)))
            while waiting > 0 and (size := self._read(index, min(waiting, _READ_BYTES))):
                waiting -= size

    def _read(self, index: int, most: int) -> int | None:
        """Read up to `most` bytes of a pipe; return their number, 0 at its end, None if it is empty now."""
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
                # a nearly full disk may accept only a part
                rest = rest[os.write(self._log, rest) :]
        except OSError as error:
            # a full disk stops the log, never the training
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
    """Return the length of the longest suffix of `data` that is a prefix of `mark`."""
    for size in range(min(len(mark) - 1, len(data)), 0, -1):
        if data.endswith(mark[:size]):
            return size
    return 0


class RankProcess:
    """The agent's resources for one rank; they outlive the process."""

    def __init__(self, rank: int, output: RankOutput, stack_file: StackFile) -> None:
        self.rank = rank
        self.output = output
        self.stack_file = stack_file
        self.pid: int | None = None
        self.pidfd: int | None = None
        # reaped before the agent could open a pidfd; the zygote has yet to report its status
        self.is_reaped = False
        # killed as soon as it is forked
        self.is_doomed = False
        self.exit_status: int | None = None
        self.peak_bytes = 0
        self.stream: MessageStream[FromRank] | None = None

    @property
    def alive(self) -> bool:
        return self.pid is not None and self.exit_status is None

    def is_dead(self) -> bool:
        """Whether it has ended, even if the zygote has not reported it yet."""
        if self.exit_status is not None or self.pidfd is None:
            return not self.alive
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Free the agent's resources; the process must be gone or exiting."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.output.close()
        self.stack_file.close()

    def signal(self, number: int, *, whole_session: bool = False) -> None:
        """Signal the rank, or its whole process group.

        SIGKILL to a rank that is not forked yet is sent after the fork; other signals are dropped. The zygote may reap
        a dead rank before the agent knows; the pidfd guarantees that the pid is still the rank's.

        Args:
            number: The signal.
            whole_session: Whether to signal the rank's process group.
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
                # just after the fork it has no process group of its own yet
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, number)
                    return
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, number)
            else:
                os.kill(self.pid, number)
