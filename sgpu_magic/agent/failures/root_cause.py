"""Which of several failures is to blame. Pure.

When one rank fails, the others fail in their collectives within milliseconds, and a victim's report may arrive
first. The rule: the earliest failure that does not look like the loss of a peer; if there is none, the earliest.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

from sgpu_magic.system.processes import signal_name
from sgpu_magic.wire.records import Failure
from sgpu_magic.wire.states import FailureKind

_SIGNAL_MEANINGS: dict[int, str] = {
    signal.SIGKILL: "out of memory, or somebody killed it",
    signal.SIGSEGV: "a crash in C code: it touched memory that is not its own, or its stack overflowed",
    signal.SIGBUS: "a crash in C code, or a memory-mapped file whose disk or memory ran out",
    signal.SIGABRT: "C code gave up; its last words are in the rank's output",
    signal.SIGFPE: "a crash in C code: a division by zero",
    signal.SIGILL: "a library was built for another processor",
    signal.SIGTERM: "somebody asked it to end",
    signal.SIGHUP: "somebody asked it to end",
}


def find_root_cause(failures: Iterable[Failure]) -> tuple[Failure, tuple[Failure, ...]] | None:
    """Return the culprit and the others in order of time, None when nothing failed."""
    by_time = sorted(failures, key=lambda failure: (failure.is_consequence, failure.at))
    if not by_time:
        return None
    culprit = by_time[0]
    others = sorted((failure for failure in by_time[1:]), key=lambda failure: failure.at)
    return culprit, tuple(others)


def death(
    rank: int,
    ranks: int,
    host: str,
    status: int,
    at: float,
    *,
    pid: int | None = None,
    meaning: str = "",
    last_line: str = "",
    last_output: str = "",
) -> Failure:
    """Describe a rank whose process ended without a word.

    Args:
        status: Exit code, negative for a signal.
        pid: Its process.
        meaning: What its signal was, where more is known than the signal usually means.
        last_line: Where in Python it was last, "" when unknown.
        last_output: Its last lines.
    """
    who = f"rank {rank} of {ranks}" + (f" (process {pid})" if pid is not None else "")
    if status < 0:
        meaning = meaning or _SIGNAL_MEANINGS.get(-status, "")
        message = f"{who} was killed by {signal_name(-status)}" + (f": {meaning}" if meaning else "")
    else:
        message = (
            f"{who} left with exit code {status} before its cell was done: something in it "
            "called os._exit or ended the process"
        )
    if last_line:
        message += f"\nits last Python line: {last_line}"
    if last_output.strip():
        lines = last_output.strip().splitlines()
        message += "\nits last output: " + "\n  ".join(lines)
    return Failure(
        kind=FailureKind.WORKER_DIED, message=message, rank=rank, host=host, at=at, exit_status=status, pid=pid
    )
