"""What the ranks of one run reported, which of several failures is to blame, and when that is known.

When one rank fails, the others fail in their collectives within milliseconds, and a victim's report may arrive first.
The rule: the earliest failure that does not look like the loss of a peer; if there is none, the earliest. So an earlier
one may still be on its way when the first is here; ranks that wait for one that has failed are freed when it is known
who is to blame, and ranks that have raised themselves wait for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from sgpu_magic.packages.secrets import Blanker, find_secrets
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.failures import Failure, RankStack
from sgpu_magic.wire.run import RankResult
from sgpu_magic.wire.states import FailureKind, RunState

# the key of a failure that no rank is to blame for
_WHOLE_RUN = -1
# seconds for which a victim's report waits for the culprit's
_PATIENCE_WITH_VICTIM_S = 0.25
# seconds for which an error waits for an earlier one whose traceback takes longer to draw
_PATIENCE_WITH_CAUSE_S = 0.03
# seconds more for the tracebacks of ranks that have all raised: to free them would cost a session's whole group
_PATIENCE_WITH_DRAWING_S = 2.0


def find_root_cause(failures: Iterable[Failure]) -> tuple[Failure, tuple[Failure, ...]] | None:
    """Return the culprit and the others in order of time, None when nothing failed. Pure."""
    by_time = sorted(failures, key=lambda failure: (failure.is_consequence, failure.at))
    if not by_time:
        return None
    culprit = by_time[0]
    others = sorted((failure for failure in by_time[1:]), key=lambda failure: failure.at)
    return culprit, tuple(others)


def without_secrets(
    failure: Failure, frames: Sequence[bytes], environ: Mapping[str, str]
) -> tuple[Failure, Sequence[bytes]]:
    """Return a rank's failure and its raw frames as they may be kept and shown: without secrets of its environment.

    A pickled exception that holds a secret is left out: the notebook then raises one that tells its type, its message
    and its traceback.

    Args:
        failure: As the rank told it.
        frames: The pickled exception, if any.
        environ: The ranks' variables.
    """
    blanker = Blanker(environ[name] for name in find_secrets(environ))
    exception = failure.exception
    if any(blanker.is_in(frame) for frame in frames):
        exception, frames = None, ()
    type_name = blanker.clear(failure.type_name)
    if type_name != failure.type_name:
        # the class goes along with its name
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


class ReportsOfRanks:
    """Results and failures by rank, and the run's last word made of them; of each rank the first failure counts.

    No I/O.

    Args:
        ranks: The numbers of the ranks that take part, ascending.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._results: dict[int, RankResult] = {}
        self._failures: dict[int, Failure] = {}
        self._result_frames: dict[int, bytes] = {}
        self._exception_frames: dict[int, bytes] = {}

    def has_reported(self, rank: int) -> bool:
        return rank in self._results or rank in self._failures

    def has_finished(self, rank: int) -> bool:
        """The rank's cell ran through, and nothing happened to the rank since."""
        return rank in self._results and rank not in self._failures

    def has_failed(self, rank: int | None) -> bool:
        return (_WHOLE_RUN if rank is None else rank) in self._failures

    @property
    def complete(self) -> bool:
        return not self.unreported

    @property
    def unreported(self) -> tuple[int, ...]:
        """Ranks that have neither finished nor failed."""
        return tuple(rank for rank in self._ranks if not self.has_reported(rank))

    @property
    def failed(self) -> bool:
        return bool(self._failures)

    @property
    def failed_alike(self) -> bool:
        """Every rank raised the same at the same line: as far as can be seen, each has called what the others have."""
        kinds = {(failure.type_name, failure.line, failure.where) for failure in self._failures.values()}
        return len(self._failures) == len(self._ranks) and len(kinds) == 1 and not self._results

    def add_result(self, result: RankResult, frames: Sequence[bytes]) -> None:
        """Args: frames: The packed result when it came inline."""
        self._results[result.rank] = result
        if frames:
            self._result_frames[result.rank] = frames[0]

    def add_failure(self, failure: Failure, frames: Sequence[bytes] = ()) -> None:
        """Args: frames: The packed exception when there is one."""
        rank = _WHOLE_RUN if failure.rank is None else failure.rank
        self._failures.setdefault(rank, failure)
        if frames:
            self._exception_frames.setdefault(rank, frames[0])

    def last_word(
        self,
        state: RunState,
        reason: str,
        *,
        host: str,
        now: float,
        starting_s: float,
        running_s: float,
        stacks: tuple[RankStack, ...] = (),
        unstopped: tuple[int, ...] = (),
    ) -> tuple[RunEnded, list[bytes]]:
        """Return the run's `RunEnded` and its raw frames.

        Args:
            state: The final state.
            reason: Why it was stopped, when it was.
            host: This node.
            now: Wall-clock time, seconds since the epoch.
            stacks: Where the ranks were when its time was over.
            unstopped: Ranks that still run the cell.
        """
        failure: Failure | None = None
        others: tuple[Failure, ...] = ()
        results: tuple[RankResult, ...] = ()
        frames: list[bytes] = []
        blamed = find_root_cause(self._failures.values())
        if state is RunState.FAILED and blamed is not None:
            failure, others = blamed
            if failure.exception is not None and failure.rank is not None:
                frames.append(self._exception_frames[failure.rank])
            # only the culprit's exception travels
            others = tuple(msgspec.structs.replace(other, exception=None) for other in others)
        elif state is RunState.SUCCEEDED:
            results = tuple(self._results[rank] for rank in self._ranks)
            frames += [self._result_frames[rank] for rank in sorted(self._result_frames)]
        elif state is RunState.TIMED_OUT:
            failure = Failure(kind=FailureKind.TIMEOUT, message=reason, host=host, at=now)
        ended = RunEnded(
            state=state,
            failure=failure,
            reason=reason if state is RunState.CANCELLED else "",
            others=others,
            results=results,
            stacks=stacks,
            unstopped=unstopped,
            starting_s=starting_s,
            running_s=running_s,
        )
        return ended, frames


class FailurePatience:
    """Says when it is known who is to blame, so that the ranks that may wait for one that has failed can be freed.

    Args:
        reports: Who has reported.
        later: Calls back after some seconds; what is pending is dropped with the run.
        stopping: Whether the run ends anyway, and nobody is to be freed.
        free_others: Called when the culprit is known. It may be called again until `stopping`.

    Attributes:
        drawing: Ranks that have raised, and draw their tracebacks or have drawn them.
    """

    def __init__(
        self,
        reports: ReportsOfRanks,
        later: Callable[[float, Callable[[], None]], None],
        stopping: Callable[[], bool],
        free_others: Callable[[], None],
    ) -> None:
        self._reports = reports
        self._later = later
        self._stopping = stopping
        self._free_others = free_others
        self._loop = asyncio.get_running_loop()
        self._deciding = False
        self.drawing: set[int] = set()
        self._drawn_by: float | None = None

    def raised(self, rank: int) -> None:
        """A rank has raised and will report it."""
        self.drawing.add(rank)

    def failed(self, failure: Failure) -> None:
        """A rank has reported its failure, or is dead."""
        if failure.is_consequence and self._deciding:
            return
        self._deciding = True
        self._later(_PATIENCE_WITH_VICTIM_S if failure.is_consequence else _PATIENCE_WITH_CAUSE_S, self._decide)

    def peer_failed(self) -> None:
        """A rank on another node has failed: it is to blame, and those here only wait for it."""
        self._deciding = True
        self._decide()

    def _decide(self) -> None:
        if self._stopping():
            return
        now = self._loop.time()
        self._drawn_by = self._drawn_by or now + _PATIENCE_WITH_DRAWING_S
        if self.drawing.issuperset(self._reports.unreported) and now < self._drawn_by:
            self._later(_PATIENCE_WITH_CAUSE_S, self._decide)
        else:
            self._free_others()
