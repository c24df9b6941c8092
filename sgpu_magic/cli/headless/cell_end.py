"""What a cell's exception means for `sgpu run`. Decided in the kernel, which has the exception itself."""

from __future__ import annotations

import ast
import enum
import signal
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from sgpu_magic import errors
from sgpu_magic.options.notebook_job import NotebookExit
from sgpu_magic.wire.decoding import decode_json

# without `import`, so that no name appears in the notebook's namespace
EXPRESSION = f"__import__({__name__!r}, fromlist=['_']).last_end()"
"""The expression that a kernel evaluates after a failed cell; `read_end` reads the answer."""


class ExitCode(enum.IntEnum):
    """Exit codes of `sgpu run`."""

    OK = 0
    FAILED = 1
    USAGE = 2
    POOL = 3
    TIMED_OUT = 124
    INTERRUPTED = 128 + signal.SIGINT
    TERMINATED = 128 + signal.SIGTERM


_CODES: Mapping[type[BaseException], ExitCode] = {
    # neither other options nor another attempt help
    errors.CellSyntaxError: ExitCode.FAILED,
    errors.RunFileUnknown: ExitCode.FAILED,
    errors.KeyRefused: ExitCode.FAILED,
    errors.UsageError: ExitCode.USAGE,
    # not caused by the notebook, so a retry may succeed
    errors.CapacityError: ExitCode.POOL,
    errors.EnvironmentFailed: ExitCode.POOL,
    errors.PoolError: ExitCode.POOL,
    errors.NodeLost: ExitCode.POOL,
    errors.InternalError: ExitCode.POOL,
    errors.RunTimeout: ExitCode.TIMED_OUT,
}


class CellEnd(msgspec.Struct, frozen=True):
    """How a cell ended that raised an exception.

    Args:
        code: The exit code for it.
        exit_value: The value of `dbutils.notebook.exit`; None if the cell did not call it.
        is_clean_exit: Whether the exception ends a script with exit code 0, as `sys.exit()` does.
    """

    code: ExitCode = ExitCode.FAILED
    exit_value: str | None = None
    is_clean_exit: bool = False


def end_of(error: BaseException | None) -> CellEnd:
    """Return how a cell ended that raised this exception."""
    if isinstance(error, NotebookExit):
        return CellEnd(ExitCode.OK, exit_value=error.value)
    if isinstance(error, SystemExit):
        return CellEnd(is_clean_exit=error.code in (None, 0, ""))
    return CellEnd(next((_CODES[cls] for cls in type(error).__mro__ if cls in _CODES), ExitCode.FAILED))


def last_end() -> str:
    """Return how the kernel's last failed cell ended, as JSON."""
    # set by IPython for each exception that it shows
    return msgspec.json.encode(end_of(getattr(sys, "last_value", None))).decode()


def read_end(answer: Mapping[str, Any]) -> CellEnd:
    """Return what a kernel answered to `EXPRESSION`; a plain failure if it could not evaluate it.

    Args:
        answer: The expression's entry in `user_expressions` of the kernel's reply.
    """
    text = answer.get("data", {}).get("text/plain", "")
    try:
        return decode_json(ast.literal_eval(text), CellEnd)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, msgspec.DecodeError):
        # from a kernel without this package
        return CellEnd()
