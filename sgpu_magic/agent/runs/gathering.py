"""What the ranks of one run reported, and the run's last word made of it. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sgpu_magic.agent.failures.root_cause import find_root_cause
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.measures import RankStack
from sgpu_magic.wire.records import Failure, RankResult
from sgpu_magic.wire.states import FailureKind, RunState

# the key of a failure that no rank is to blame for
_WHOLE_RUN = -1


class Gathering:
    """Results and failures by rank; of each rank the first failure counts.

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
