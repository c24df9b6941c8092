"""What ranks still finish after their cells: threads, executors, exit functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from sgpu_magic.wire.rank_events import RanksFinishing, RankUnfinished, Unfinished


class UnfinishedWork:
    """The unfinished work of a run's ranks, reported to the notebook while it is awaited.

    Args:
        say: Reports an event of the run.
    """

    def __init__(self, say: Callable[[RanksFinishing], None]) -> None:
        self._say = say
        self._work: dict[int, tuple[Unfinished, ...]] = {}
        self._reported: tuple[RankUnfinished, ...] = ()

    @property
    def ranks(self) -> Collection[int]:
        """The ranks that have not finished; a view that follows every change."""
        return self._work.keys()

    @property
    def by_rank(self) -> tuple[RankUnfinished, ...]:
        return tuple(RankUnfinished(rank=rank, work=work) for rank, work in sorted(self._work.items()))

    @property
    def is_reported(self) -> bool:
        """Whether the notebook shows what is awaited."""
        return bool(self._reported)

    def expect(self, ranks: Iterable[int]) -> None:
        """Wait for these ranks, whose work is not known yet."""
        self._work.update(dict.fromkeys(ranks, ()))

    def update(self, rank: int, work: tuple[Unfinished, ...] | None) -> None:
        """Set what a rank has yet to finish; None when it has finished."""
        if work is None:
            self._work.pop(rank, None)
        else:
            self._work[rank] = work

    def report(self) -> None:
        """Report the present state unless it was reported before."""
        unfinished = self.by_rank
        if unfinished != self._reported:
            self._reported = unfinished
            self._say(RanksFinishing(ranks=unfinished))
