"""How a notebook ended, as an exit code that cron, Airflow and CI can decide by."""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Sequence

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
