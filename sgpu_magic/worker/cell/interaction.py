"""A rank has no keyboard: whatever asks for one fails at once and says what to do instead; `exit` ends its cell."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import builtins
import getpass
import io
import sys
from typing import Any, NoReturn

from IPython.core.error import StdinNotImplementedError
from IPython.core.interactiveshell import InteractiveShell


def refuse(shell: InteractiveShell, rank: int) -> None:
    """Replace `input`, `getpass`, `breakpoint`, `exit` and the debugger's magics."""

    def leave(code: object = None) -> NoReturn:
        raise SystemExit(code)

    def no_input(*args: object, **kwargs: object) -> NoReturn:
        raise StdinNotImplementedError(
            f"input() on rank {rank} has no keyboard to read from. Ask in a plain cell of the notebook and use the "
            "variable here: it is shipped with the cell."
        )

    def no_breakpoint(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"breakpoint() on rank {rank} has no terminal. Print from the rank, call the function in a plain cell of "
            "the notebook, or run the cell's _air.py from the run's directory under torchrun in a terminal."
        )

    def no_debugger(line: str = "", cell: str | None = None) -> NoReturn:
        raise RuntimeError(
            f"%debug and %pdb need a terminal, which rank {rank} has not. The notebook has the rank's traceback; "
            "run the failing function in a plain cell to step through it there."
        )

    for name in ("exit", "quit"):
        shell.user_ns[name] = shell.user_ns_hidden[name] = leave
    shell.ask_exit = leave  # pyright: ignore[reportAttributeAccessIssue]

    def no_kernel(shell: InteractiveShell) -> NoReturn:
        raise AttributeError(
            f"rank {rank} has no Jupyter kernel, so get_ipython().kernel is missing. Use it in a plain cell of the "
            "notebook."
        )

    type(shell).kernel = property(no_kernel)  # pyright: ignore[reportAttributeAccessIssue]
    builtins.input = no_input
    getpass.getpass = no_input
    sys.breakpointhook = no_breakpoint
    sys.stdin = _NoKeyboard(no_input)
    for magic in ("debug", "pdb"):
        shell.register_magic_function(no_debugger, "line", magic)  # pyright: ignore[reportArgumentType]
    shell.raw_input = no_input  # pyright: ignore[reportAttributeAccessIssue]

    import pdb

    pdb.Pdb.set_trace = no_breakpoint  # pyright: ignore[reportAttributeAccessIssue]
    pdb.set_trace = no_breakpoint


class _NoKeyboard(io.TextIOBase):
    """`sys.stdin` of a rank."""

    def __init__(self, refuse_reading: Any) -> None:
        self._refuse = refuse_reading

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def isatty(self) -> bool:
        return False

    def read(self, size: int | None = -1, /) -> str:
        return self._refuse()

    def readline(self, size: int = -1, /) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._refuse()
