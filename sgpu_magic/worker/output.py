"""A rank's stdout and stderr: two pipes at descriptor level, in exact order for Python's own writes.

C code and child processes write to descriptors 1 and 2 directly. Python's `sys.stderr` writes into the *same* pipe
as `sys.stdout`, each write framed by two marks, so that what a program prints to the two in turn arrives in that
turn; the agent takes the marks away again.

stdout is block-buffered, which is several times faster than line-buffered, and `flush` is called every 50 ms by the
rank's helper thread, before each display, before each write to stderr and at the end.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

from sgpu_magic.protocol.output_marks import STDERR_BEGIN, STDERR_END

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BUFFER_BYTES = 1 << 16


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
    raw_stdout = io.FileIO(1, "wb", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(raw_stdout, _BUFFER_BYTES), encoding="utf-8", errors="backslashreplace"
    )
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


def _buffer_lines() -> None:
    """A child has no helper thread that flushes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportUnknownMemberType]
