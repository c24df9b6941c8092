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

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from sgpu_magic.packages.secrets import Blanker, hidden_values
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.rank_events import Failure
from sgpu_magic.wire.run import RankResult

# the key of a failure that no rank caused
_WHOLE_RUN = -1


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
    death = failure.death
    if death is not None:
        death = msgspec.structs.replace(
            death,
            what=blanker.clear(death.what),
            last_line=blanker.clear(death.last_line),
            last_output=tuple(map(blanker.clear, death.last_output)),
        )
    cleared = msgspec.structs.replace(
        failure,
        death=death,
        type_name=type_name,
        message=blanker.clear(failure.message),
        traceback_text=blanker.clear(failure.traceback_text),
        traceback_ansi=blanker.clear(failure.traceback_ansi),
        missing_file=blanker.clear(failure.missing_file),
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

    def final_event(self, ended: RunEnded) -> tuple[RunEnded, list[bytes]]:
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
