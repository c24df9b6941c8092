"""Describes how a rank died if it exited without a report."""

from __future__ import annotations

import signal

import msgspec

from sgpu_magic.agent.native_aborts import Cause, NativeAbort, find_native_abort
from sgpu_magic.system.processes import signal_name
from sgpu_magic.wire.rank_events import CollectiveTimeout, Death, Failure

_LAST_LINES = 5
# a rank samples its line twenty times a second, unless C code holds the interpreter
_OLD_LINE_S = 0.5
_SIGNAL_MEANINGS: dict[int, str] = {
    signal.SIGKILL: "out of memory, or another process killed it",
    signal.SIGSEGV: "a crash in C code: an invalid memory access or a stack overflow",
    signal.SIGBUS: "a crash in C code, or a memory-mapped file ran out of disk space or memory",
    signal.SIGABRT: "C code aborted; its last message is in the rank's output",
    signal.SIGFPE: "a crash in C code: a division by zero",
    signal.SIGILL: "a library was built for another processor",
    signal.SIGTERM: "another process asked it to end",
    signal.SIGHUP: "another process asked it to end",
}


def describe_death(
    failure: Failure,
    ranks: int,
    *,
    meaning: str = "",
    last_line: str = "",
    line_age_s: float = 0.0,
    last_output: str = "",
    finishing: bool = False,
) -> Failure:
    """Describe a rank whose process exited without a report.

    A rank that torch aborted, because a collective timed out or lost a peer, is not the root cause.

    Args:
        failure: The failure without a message; its exit status is negative for a signal.
        ranks: The number of ranks in the run.
        meaning: A diagnosis of the signal; "" for its usual meaning.
        last_line: The last Python line that it executed, "" when unknown.
        line_age_s: The least time, in seconds, that can have passed between that line and the rank's end.
        last_output: The end of its output.
        finishing: Whether its cell had ended and it was finishing threads and exit functions.
    """
    abort = find_native_abort(last_output) if failure.exit_status == -signal.SIGABRT else None
    tail = "\n".join(last_output.splitlines()[-_LAST_LINES:])
    if abort is not None:
        # below it are frames of C++ code
        tail = abort.line
        meaning = meaning or _why_aborted(abort)
        failure = msgspec.structs.replace(failure, is_consequence=True, collective_timeout=abort.timeout)
    status, pid = failure.exit_status or 0, failure.pid
    who = f"rank {failure.rank} of {ranks}" + (f" (process {pid})" if pid is not None else "")
    if status < 0:
        meaning = meaning or _SIGNAL_MEANINGS.get(-status, "")
        when = " after its cell had ended, while it finished threads and exit functions" if finishing else ""
        what = f"was killed by {signal_name(-status)}{when}" + (f": {meaning}" if meaning else "")
    elif finishing:
        what = (
            f"exited with code {status} after its cell had ended: a thread or an exit function of it called os._exit "
            "or ended the process"
        )
    else:
        what = f"exited with code {status} before its cell ended: something in it called os._exit or ended the process"
    death = Death(
        what=what,
        last_line=last_line,
        line_age_s=line_age_s if line_age_s >= _OLD_LINE_S else 0.0,
        last_output=tuple(tail.strip().splitlines()),
    )
    return msgspec.structs.replace(failure, message=f"{who} {what}", death=death)


def _why_aborted(abort: NativeAbort) -> str:
    if abort.cause is Cause.PEER_LOST:
        return "torch aborted it, because it lost the connection to another rank"
    timeout = abort.timeout or CollectiveTimeout()
    which = "a collective" if timeout.collective is None else timeout.collective.label
    limit = "in time" if timeout.seconds is None else f"within {timeout.seconds:g} s"
    return f"torch aborted it, because {which} was not complete {limit}"
