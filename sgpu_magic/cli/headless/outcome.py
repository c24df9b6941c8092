"""What came of a notebook's cells: an exit code that cron, Airflow and CI can decide by, and what a cell shows."""

# nbformat is not typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Sequence
from typing import Any

from sgpu_magic.views import ansi

_TITLE_CHARS = 60
# as `errors.see` has it
_OURS = re.compile(r"See `%?sgpu[ _]help [a-z-]+`")
_USAGE = frozenset(("UsageError", "RunUnknown"))
# none of the notebook's own doing: another time it may be different
_WORTH_A_RETRY = frozenset(
    ("CapacityError", "EnvironmentFailed", "PoolError", "PoolLost", "PoolVersionError", "NodeLost", "InternalError")
)


class ExitCode(enum.IntEnum):
    """The codes of `sgpu run`."""

    OK = 0
    FAILED = 1
    USAGE = 2
    POOL = 3
    TIMED_OUT = 124
    INTERRUPTED = 128 + signal.SIGINT
    TERMINATED = 128 + signal.SIGTERM


def code_of(name: str, traceback: Sequence[str]) -> ExitCode:
    """Return the code for a failed cell.

    Args:
        name: The exception's type.
        traceback: As the kernel sent it: an error of ours ends with the line that names its page of help.
    """
    is_ours = bool(traceback) and _OURS.match(traceback[-1]) is not None
    if is_ours and name in _USAGE:
        return ExitCode.USAGE
    if is_ours and name in _WORTH_A_RETRY:
        return ExitCode.POOL
    if is_ours and name == "RunTimeout":
        return ExitCode.TIMED_OUT
    return ExitCode.FAILED


def title_of(source: str) -> str:
    """Return a line that tells a cell from others."""
    lines = [line for line in source.splitlines() if line.strip()]
    # a magic's line alone says little
    shown = lines[1] if len(lines) > 1 and lines[0].startswith("%%") else lines[0] if lines else "(empty)"
    shown = f"{lines[0].split()[0]} {shown.strip()}" if shown is not (lines or [""])[0] else shown.strip()
    return shown if len(shown) <= _TITLE_CHARS else f"{shown[: _TITLE_CHARS - 3]}..."


def traceback_of(cell: Any) -> list[str]:
    """Return the lines of a failed cell's traceback."""
    found = [output.traceback for output in cell.outputs if output.output_type == "error"]
    return [ansi.plain(line) for line in "\n".join(found[-1]).splitlines()] if found else []


def text_of(cell: Any) -> str:
    """Return all that a cell shows, as text."""
    parts: list[str] = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type == "error":
            parts.append("\n".join(output.traceback))
        else:
            parts.append(str(output.get("data", {}).get("text/plain", "")))
    return ansi.plain("\n".join(part.rstrip("\n") for part in parts if part))
