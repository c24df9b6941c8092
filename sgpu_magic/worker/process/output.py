"""A rank's stdout and stderr: two pipes at descriptor level, in exact order for Python's own writes.

C code and child processes write to descriptors 1 and 2 directly. Python's `sys.stderr` writes into the *same* pipe
as `sys.stdout`, each write framed by two marks, so that what a program prints to the two in turn arrives in that
turn; the agent takes the marks away again.

stdout is block-buffered, which is several times faster than line-buffered. A line after a pause goes out at once, so
that the last words of a rank that dies are not lost with its buffer; `flush` is called every 50 ms by the rank's helper
thread, before each display, before each write to stderr and at the end.
"""

from __future__ import annotations

import io
import os
import sys
import time
from typing import TYPE_CHECKING

from sgpu_magic.wire.zygote import STDERR_BEGIN, STDERR_END

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BUFFER_BYTES = 1 << 16
# a line that comes sooner after the last one that was written out waits in the buffer: that is a flood
_PAUSE_S = 0.005


class _LineBuffer(io.BufferedWriter):
    """Asked for a flush at every line's end, it writes out only after a pause. Costs 0.6 us a line."""

    pause_s = _PAUSE_S
    line_at = 0.0

    def flush(self) -> None:
        now = time.monotonic()
        if now - self.line_at > self.pause_s:
            self.line_at = now
            super().flush()

    def write_out(self) -> None:
        """Flush whatever the time."""
        super().flush()


class _Stdout(io.TextIOWrapper):
    """Hands each line over to a `_LineBuffer`; an explicit flush is always done."""

    def __init__(self, lines: _LineBuffer) -> None:
        super().__init__(lines, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        self._lines = lines

    def flush(self) -> None:
        # the helper's flushes are no lines: the next line is not held back because of one
        line_at = self._lines.line_at
        super().flush()
        self._lines.line_at = line_at
        self._lines.write_out()

    def write_every_line(self, on: bool = True) -> None:
        self._lines.pause_s = -1.0 if on else _PAUSE_S


class _MarkedStderr(io.RawIOBase):
    """Descriptor 2 to those who ask for it; what Python writes goes marked into descriptor 1."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2

    def isatty(self) -> bool:
        return False

    def write(self, data: Buffer, /) -> int:
        text = bytes(data)
        sys.stdout.flush()
        rest = memoryview(STDERR_BEGIN + text + STDERR_END)
        while rest:
            rest = rest[os.write(1, rest) :]
        return len(text)


def install(stdout_pipe: int, stderr_pipe: int) -> None:
    """Make the two pipes this process's descriptors 1 and 2, `/dev/null` 0, and replace Python's streams."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout_pipe, 1), (stderr_pipe, 2)):
        os.dup2(source, target, inheritable=True)
        os.close(source)
    sys.stdout = _Stdout(_LineBuffer(io.FileIO(1, "wb", closefd=False), _BUFFER_BYTES))
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(_MarkedStderr(), _BUFFER_BYTES),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # pyright: ignore[reportConstantRedefinition]
    # a forked child must not print again what its parent had buffered
    os.register_at_fork(before=flush, after_in_child=_buffer_lines)


def flush() -> None:
    """Write out what Python has buffered. Never fails: user code may have closed or replaced the streams."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue


def hold_lines_back() -> None:
    """A cell runs, and the helper thread flushes: lines that come fast are written out together."""
    if isinstance(sys.stdout, _Stdout):
        sys.stdout.write_every_line(False)


def write_each_line() -> None:
    """No cell runs, and nobody flushes what the user's threads print."""
    if isinstance(sys.stdout, _Stdout):
        sys.stdout.write_every_line()


def _buffer_lines() -> None:
    """A child has no helper thread that flushes."""
    if isinstance(sys.stdout, _Stdout):
        sys.stdout.write_every_line()
