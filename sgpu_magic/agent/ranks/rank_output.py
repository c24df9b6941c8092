"""The output of one rank: two pipes, read into the rank's log and batches.

Output goes to the rank's log and, in bounded batches, to the pool. The first pipe carries stdout and Python's stderr,
which is marked (see `worker.process.terminal`); the second carries the stderr of C code and child processes.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import fcntl
import os
import struct
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sgpu_magic.wire.codec import STDERR_BEGIN, STDERR_END
from sgpu_magic.wire.rank_events import OutputWritten

_PIPE_BYTES = 1 << 20
# limit per rank between two batches: a rank that writes faster blocks on its pipe
_BURST_BYTES = 4 << 20
_READ_BYTES = 1 << 18
_F_SETPIPE_SZ = 1031
BATCH_INTERVAL_S = 0.05
_TAIL_BYTES = 16_384
# enough for the frames that C++ code prints below its message when it aborts
_LAST_BYTES = 16_000
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
        # the stream of the log's unfinished line, None without one, and whether `\r` has rewritten that line
        self._line_of: str | None = None
        self._is_rewritten = False
        # data of the second pipe, held until the first one's line has ended
        self._late = bytearray()
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
        self._late.clear()
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
        self._line_of = None
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
            self._parse(_STDERR if self._in_stderr else _STDOUT, held)
        self.flush()

    def tail(self) -> str:
        """Return the last `_LAST_BYTES` written, to describe an exit."""
        return self._last_data.decode("utf-8", "replace")

    def flush(self) -> None:
        """Send the pending batch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._add_late()
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
            # already read by `drain`
            return
        if not size:
            # all writers have closed the pipe
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
            self._late += data
        else:
            for stream, part in self._split_marks(data):
                self._parse(stream, part)
        # a long line may take several reads: hold the second pipe's data until the line is complete
        is_open = self._line_of == _STDOUT and not self._is_rewritten
        if not is_open or len(self._late) > _READ_BYTES:
            self._add_late()
        return len(data)

    def _add_late(self) -> None:
        late, self._late = bytes(self._late), bytearray()
        if late:
            self._parse(_STDERR, late)

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

    def _parse(self, stream: str, data: bytes) -> None:
        """Write a stream's data to the log and the batch, after the end of the other stream's unfinished line.

        A line that is being rewritten, such as a progress bar, is rewritten once more: the new line takes its place.
        """
        if not data:
            return
        if self._line_of is not None and self._line_of != stream:
            self._append(self._line_of, b"\r" if self._is_rewritten else b"\n")
            self._line_of = None
        self._append(stream, data)
        _, ended, tail = data.rpartition(b"\n")
        continues_line = self._line_of is not None and not ended
        self._is_rewritten = b"\r" in tail or (continues_line and self._is_rewritten)
        self._line_of = stream if tail else None

    def _append(self, stream: str, data: bytes) -> None:
        self.lines += data.count(b"\n")
        self.total_bytes += len(data)
        self._last_data = (self._last_data + data[-_LAST_BYTES:])[-_LAST_BYTES:]
        if self._log_path:
            self._write(data)
        if self._pending and self._pending[-1][0] == stream:
            self._pending[-1][1].extend(data)
        else:
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
            # a full disk ends the log but not the run
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
    sizes = range(min(len(mark) - 1, len(data)), 0, -1)
    return next((size for size in sizes if data.endswith(mark[:size])), 0)
