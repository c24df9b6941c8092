"""A rank's stdout, stderr and stdin: two pipes for its output, and no keyboard.

stdout and stderr are redirected at descriptor level. C code and child processes write to descriptors 1 and 2 directly.
Python's `sys.stderr` writes into the *same* pipe as `sys.stdout`, each write framed by two marks, so that Python's
writes to the two arrive in their exact order; the agent removes the marks.

stdout is block-buffered, which is several times faster than line-buffered. A line after a pause is written at once, so
that the last lines of a rank that dies are not lost with its buffer. `flush` is called every 50 ms by the rank's helper
thread, before each display, before each write to stderr and at the end of the cell.

Functions that read from a keyboard fail at once with a message that says what to do instead. `exit` ends the cell.
"""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import builtins
import contextlib
import getpass
import io
import os
import sys
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

from sgpu_magic.wire.codec import STDERR_BEGIN, STDERR_END
from sgpu_magic.worker.process import patches

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from typing_extensions import Buffer

_BUFFER_BYTES = 1 << 16
# a line that follows the last written one within this time is part of a flood, and stays in the buffer
_PAUSE_S = 0.005


# called for each printed line, where `super()` would take a tenth of the line's time
_buffered_write = io.BufferedWriter.write


class _Buffer(io.BufferedWriter):
    """Accepts what a signal handler writes although it has interrupted a write of the same buffer.

    Python refuses that with "reentrant call inside ...", since the buffer's lock is held. Here it would end a handler
    that is about to save a checkpoint. What the handler writes is passed on unbuffered.
    """

    def write(self, data: Buffer, /) -> int:
        try:
            return _buffered_write(self, data)
        except RuntimeError:
            rest = memoryview(data)
            while rest:
                rest = rest[self.raw.write(rest) :]
            return memoryview(data).nbytes

    def flush(self) -> None:
        try:
            super().flush()
        except RuntimeError:
            # the interrupted write goes on with the rest of the buffer
            return


class _LineBuffer(_Buffer):
    """Flushes at the end of a line only after a pause."""

    pause_s = _PAUSE_S
    line_at = 0.0

    def flush(self) -> None:
        now = monotonic()
        if now - self.line_at > self.pause_s:
            self.line_at = now
            super().flush()


class _Stdout(io.TextIOWrapper):
    """Passes each line to a `_LineBuffer`; an explicit flush always writes."""

    def __init__(self, lines: _LineBuffer) -> None:
        super().__init__(lines, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        self.lines = lines

    def flush(self) -> None:
        # the helper's flushes are not lines: they must not hold back the next line
        line_at = self.lines.line_at
        super().flush()
        self.lines.line_at = line_at
        # without regard to the pause
        _Buffer.flush(self.lines)


class _MarkedStderr(io.RawIOBase):
    """Writes to descriptor 1 between two marks; `fileno` is descriptor 2."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2

    def write(self, data: Buffer, /) -> int:
        text = bytes(data)
        sys.stdout.flush()
        rest = memoryview(STDERR_BEGIN + text + STDERR_END)
        while rest:
            rest = rest[os.write(1, rest) :]
        return len(text)


def install(stdout_pipe: int, stderr_pipe: int) -> None:
    """Make the pipes descriptors 1 and 2, open `/dev/null` as descriptor 0, and replace Python's streams."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout_pipe, 1), (stderr_pipe, 2)):
        os.dup2(source, target, inheritable=True)
        os.close(source)
    sys.stdout = _Stdout(_LineBuffer(io.FileIO(1, "wb", closefd=False), _BUFFER_BYTES))
    sys.stderr = io.TextIOWrapper(
        _Buffer(_MarkedStderr(), _BUFFER_BYTES),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # pyright: ignore[reportConstantRedefinition]
    # a forked child must not print its parent's buffer again
    os.register_at_fork(before=flush, after_in_child=write_each_line)


def flush() -> None:
    """Write out Python's buffers. Never fails, even if user code has closed or replaced the streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def write_each_line(on: bool = True) -> None:
    """Write each line out at once, or (`on` false) buffer lines that follow quickly.

    Buffering needs the helper thread's flushes, which happen only while a cell runs, and never in a forked child.
    """
    if isinstance(sys.stdout, _Stdout):
        sys.stdout.lines.pause_s = -1.0 if on else _PAUSE_S


# ---------------------------------------------------------------- no keyboard


class _Refusals:
    """What the messages of refused functions name.

    Attributes:
        rank: This process's rank.
    """

    rank = 0


refusals = _Refusals()


def refuse_input(shell: InteractiveShell) -> None:
    """Replace `input`, `getpass`, `breakpoint`, `exit` and the debugger's magics.

    Called by the zygote: what it does would copy 0.4 MB in each rank. `refusals.rank` is set by the rank.
    """
    import pdb

    from IPython.core.error import StdinNotImplementedError

    def no_input(*args: object, **kwargs: object) -> NoReturn:
        raise StdinNotImplementedError(
            f"input() on rank {refusals.rank} has no keyboard to read from. Ask in a plain cell of the notebook and "
            "use the variable here: it is shipped with the cell."
        )

    def no_breakpoint(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"breakpoint() on rank {refusals.rank} has no terminal. Print from the rank, call the function in a plain "
            "cell of the notebook, or run the cell's _air.py from the run's directory under torchrun in a terminal."
        )

    def no_debugger(line: str = "", cell: str | None = None) -> NoReturn:
        raise RuntimeError(
            f"%debug and %pdb need a terminal, and rank {refusals.rank} has none. The notebook has the "
            "rank's traceback; run the failing function in a plain cell to step through it there."
        )

    leave = _Exit()
    for name in ("exit", "quit"):
        shell.user_ns[name] = shell.user_ns_hidden[name] = leave
    shell.ask_exit = leave  # pyright: ignore[reportAttributeAccessIssue]

    def no_kernel(shell: InteractiveShell) -> NoReturn:
        raise AttributeError(
            f"rank {refusals.rank} has no Jupyter kernel, so get_ipython().kernel is missing. Use it in a plain cell "
            "of the notebook."
        )

    type(shell).kernel = property(no_kernel)  # pyright: ignore[reportAttributeAccessIssue]
    builtins.input = no_input
    getpass.getpass = no_input
    sys.breakpointhook = no_breakpoint
    sys.stdin = _NoKeyboard(no_input)

    def refuse_prompts(module: Any) -> None:
        module.create_input = no_input

    patches.after_import(("prompt_toolkit.input.defaults",), refuse_prompts)
    for magic in ("debug", "pdb"):
        shell.register_magic_function(no_debugger, "line", magic)  # pyright: ignore[reportArgumentType]
    shell.raw_input = no_input  # pyright: ignore[reportAttributeAccessIssue]
    pdb.Pdb.set_trace = no_breakpoint  # pyright: ignore[reportAttributeAccessIssue]
    pdb.set_trace = no_breakpoint


class _Exit:
    """`exit` and `quit` of a rank."""

    def __call__(self, code: object = None) -> NoReturn:
        raise SystemExit(code)

    def __repr__(self) -> str:
        return "exit() ends the cell on this rank"


class _NoKeyboard(io.TextIOBase):
    """`sys.stdin` of a rank.

    Args:
        refuse: Raises the error of what reads from it.
    """

    encoding = "utf-8"
    errors = "strict"

    def __init__(self, refuse: Callable[..., NoReturn]) -> None:
        # instance attributes, since they are called with and without a size
        self.read = self.readline = self.readlines = refuse
        self.buffer = _NoBytes(refuse)

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0


class _NoBytes(io.BufferedIOBase):
    """`sys.stdin.buffer` of a rank. Takes the arguments of `_NoKeyboard`."""

    def __init__(self, refuse: Callable[..., NoReturn]) -> None:
        self.read = self.read1 = self.readline = self.readlines = self.readinto = self.readinto1 = self.peek = refuse

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0
