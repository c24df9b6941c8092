"""Failures of ranks: what each rank reported, how it exited, and which failure is the root cause.

When one rank fails, the others fail in their collectives within milliseconds, and a victim's report may arrive first.
Then the agent stops the rest, which fail as well. So the root cause is the earliest of the first of these that exist:

1. failures of a rank by itself: an exception of its code, or its death
2. failures in a collective (`Failure.is_consequence`), which may be caused by the loss of a peer
3. failures after the agent's order to stop (`Failure.after_stop`)

These are facts about where and when a failure happened. No text of an exception is read.

Only on Linux, the kernel's counters and the run's memory show whether the out-of-memory killer ended a rank.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.agent.native_aborts import Cause, NativeAbort, find_native_abort
from sgpu_magic.packages.secrets import Blanker, hidden_values
from sgpu_magic.system.processes import memory_groups, memory_limit, number_in, signal_name
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.rank_events import CollectiveTimeout, Failure
from sgpu_magic.wire.run import RankResult

# the key of a failure that no rank caused
_WHOLE_RUN = -1
# share of the memory limit above which an unexplained SIGKILL most likely came from the out-of-memory killer
_HIGH = 0.8
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


def find_root_cause(failures: Iterable[Failure]) -> tuple[Failure, tuple[Failure, ...]] | None:
    """Return the root cause and the other failures in order of time, or None when nothing failed. Pure."""
    by_time = sorted(failures, key=lambda failure: (failure.after_stop, failure.is_consequence, failure.at))
    if not by_time:
        return None
    return by_time[0], tuple(sorted(by_time[1:], key=lambda failure: failure.at))


def without_secrets(
    failure: Failure, frames: Sequence[bytes], environ: Mapping[str, str], given: Iterable[str] = ()
) -> tuple[Failure, Sequence[bytes]]:
    """Redact secrets of the ranks' environment from a failure and its raw frames, before they are stored or shown.

    A pickled exception that contains a secret is dropped; the notebook then raises one with its type name, message and
    traceback.

    Args:
        failure: The failure as the rank reported it.
        frames: The pickled exception, if any.
        environ: The ranks' environment variables.
        given: Names of the variables that `--env` sets, whose values are redacted too.
    """
    blanker = Blanker(hidden_values(environ, given))
    exception, type_name = failure.exception, blanker.clear(failure.type_name)
    # the pickled exception contains the class name too
    if type_name != failure.type_name or any(blanker.is_in(frame) for frame in frames):
        exception, frames = None, ()
    cleared = msgspec.structs.replace(
        failure,
        type_name=type_name,
        message=blanker.clear(failure.message),
        traceback_text=blanker.clear(failure.traceback_text),
        traceback_ansi=blanker.clear(failure.traceback_ansi),
        exception=exception,
    )
    return (failure if cleared == failure else cleared), frames


class RankOutcomes:
    """Collects results and failures by rank and builds the run's `RunEnded`. Each rank's first failure counts.

    No I/O.

    Args:
        ranks: The participating ranks' numbers, ascending.

    Attributes:
        failures: The first failure of each rank that has failed, and of the run as a whole.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._results: dict[int, RankResult] = {}
        self.failures: dict[int, Failure] = {}
        self._result_frames: dict[int, bytes] = {}
        self._exception_frames: dict[int, bytes] = {}

    def has_reported(self, rank: int) -> bool:
        return rank in self._results or rank in self.failures

    def has_finished(self, rank: int) -> bool:
        """Whether the rank's cell completed and the rank has not failed since."""
        return rank in self._results and rank not in self.failures

    @property
    def complete(self) -> bool:
        return not self.unreported

    @property
    def unreported(self) -> tuple[int, ...]:
        """Ranks that have neither finished nor failed."""
        return tuple(rank for rank in self._ranks if not self.has_reported(rank))

    @property
    def failed_alike(self) -> bool:
        """Whether every rank raised the same type at the same line, so presumably all called the same collectives."""
        kinds = {(failure.type_name, failure.line, failure.where) for failure in self.failures.values()}
        return len(self.failures) == len(self._ranks) and len(kinds) == 1 and not self._results

    def add_result(self, result: RankResult, frames: Sequence[bytes]) -> None:
        """Add a rank's result; `frames` holds the packed result when it came inline."""
        self._results[result.rank] = result
        if frames:
            self._result_frames[result.rank] = frames[0]

    def count_output(self, rank: int, lines: int, output_bytes: int) -> None:
        """Set how much a rank has printed, if it has a result: it may print more after its cell."""
        if (result := self._results.get(rank)) is not None:
            self._results[rank] = msgspec.structs.replace(result, lines=lines, output_bytes=output_bytes)

    def add_failure(self, failure: Failure, frames: Sequence[bytes] = ()) -> None:
        """Add a failure unless its rank has failed before; `frames` holds the packed exception, if any."""
        rank = _WHOLE_RUN if failure.rank is None else failure.rank
        self.failures.setdefault(rank, failure)
        if frames:
            self._exception_frames.setdefault(rank, frames[0])

    def last_word(self, ended: RunEnded) -> tuple[RunEnded, list[bytes]]:
        """Return the run's final event with its failures or results, and its raw frames."""
        blamed = find_root_cause(self.failures.values())
        if ended.state is RunState.FAILED and blamed is not None:
            failure, others = blamed
            frames: list[bytes] = []
            if failure.exception is not None and failure.rank is not None:
                frames.append(self._exception_frames[failure.rank])
            # only the root cause's exception is sent
            others = tuple(msgspec.structs.replace(other, exception=None) for other in others)
            return msgspec.structs.replace(ended, failure=failure, others=others), frames
        if ended.state is RunState.SUCCEEDED:
            results = tuple(self._results[rank] for rank in self._ranks)
            frames = [self._result_frames[rank] for rank in sorted(self._result_frames)]
            return msgspec.structs.replace(ended, results=results), frames
        return ended, []


# ---------------------------------------------------------------- ranks that exited without a report


def death(
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

    An abort by torch, because of a collective that timed out or lost a peer, is a consequence.

    Args:
        failure: The failure without a message; its exit status is negative for a signal.
        ranks: The number of ranks in the run.
        meaning: A diagnosis of the signal; "" for its usual meaning.
        last_line: The last Python line that it executed, "" when unknown.
        line_age_s: The time from that line to its end, as far as it is known to have passed.
        last_output: The end of its output.
        finishing: Whether its cell had ended, and it finished what the cell has started.
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
        message = f"{who} was killed by {signal_name(-status)}{when}" + (f": {meaning}" if meaning else "")
    elif finishing:
        message = (
            f"{who} exited with code {status} after its cell had ended: a thread or an exit function of it called "
            "os._exit or ended the process"
        )
    else:
        message = (
            f"{who} exited with code {status} before its cell ended: something in it "
            "called os._exit or ended the process"
        )
    if last_line:
        age = f", {line_age_s:.1f} s before its end" if line_age_s >= _OLD_LINE_S else ""
        message += f"\nits last Python line{age}: {last_line}"
    if tail.strip():
        message += "\nits last output: " + "\n  ".join(tail.strip().splitlines())
    return msgspec.structs.replace(failure, message=message)


def _why_aborted(abort: NativeAbort) -> str:
    if abort.cause is Cause.PEER_LOST:
        return "torch aborted it, because it lost the connection to another rank"
    timeout = abort.timeout or CollectiveTimeout()
    which = "a collective" if timeout.collective is None else timeout.collective.label
    limit = "in time" if timeout.seconds is None else f"within {timeout.seconds:g} s"
    return f"torch aborted it, because {which} was not complete {limit}"


class MemoryWatch:
    """Counts out-of-memory kills of the machine and of this process's memory cgroups since a run began.

    Args:
        limit_bytes: The memory limit; None asks the system.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._before: dict[str, int] = {}

    def begin(self) -> None:
        """Record the counters' current values. Costs 0.3 ms."""
        self._before = _kill_counts()

    def killed_since(self) -> bool:
        """Whether the out-of-memory killer has killed a process here since the run began."""
        return any(count > self._before.get(name, count) for name, count in _kill_counts().items())

    def verdict(self, peak_bytes: int, other_pids: Iterable[int]) -> str:
        """Return the likely cause of a SIGKILL that the agent did not send.

        Args:
            peak_bytes: The dead rank's peak memory; 0 when unknown.
            other_pids: Process ids of the run's other ranks, whose memory counts too.
        """
        limit = memory_limit() if self._limit_bytes is None else self._limit_bytes
        held = _held(peak_bytes, limit)
        if self.killed_since():
            return "the system's out-of-memory killer ended it" + held
        together = peak_bytes + sum(peak_memory(pid) for pid in other_pids)
        if limit and together > _HIGH * limit:
            return "most likely out of memory" + held
        return "another process or the system killed it" + held


def _held(peak_bytes: int, limit_bytes: int) -> str:
    if not peak_bytes:
        return ""
    if not limit_bytes:
        return f" (it held {peak_bytes / 1e9:.1f} GB)"
    return f" (it held {peak_bytes / 1e9:.1f} of {limit_bytes / 1e9:.0f} GB)"


def peak_memory(pid: int) -> int:
    """Return a live process's peak memory in bytes, 0 when unknown."""
    return (number_in(Path(f"/proc/{pid}/status"), "VmHWM:") or 0) * 1024


def _kill_counts() -> dict[str, int]:
    files = [Path("/proc/vmstat")]
    for group in memory_groups():
        files += [group / "memory.events", group / "memory.oom_control"]
    counts = {str(file): number_in(file, "oom_kill") for file in files}
    return {name: count for name, count in counts.items() if count is not None}
