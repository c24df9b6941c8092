"""Where the ranks of a run were when it hung or timed out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sgpu_magic.agent.watch.stack_taking import StackTaker
from sgpu_magic.wire.rank_events import Failure, RankStack


class HangStacks:
    """The ranks' stacks, taken before any rank is stopped: they show which ranks have not reached the collective.

    Args:
        taker: Takes the stacks.

    Attributes:
        is_pending: Whether stacks are being taken.
    """

    def __init__(self, taker: StackTaker) -> None:
        self._taker = taker
        self._taken: tuple[RankStack, ...] = ()
        self.is_pending = False

    def take(self, done: Callable[[], None] = lambda: None) -> None:
        """Take the stacks and call `done` within half a second."""
        self.is_pending = True

        def keep(stacks: tuple[RankStack, ...]) -> None:
            self.is_pending = False
            self._taken = stacks
            done()

        self._taker.take(keep)

    def take_once(self) -> None:
        """Take the stacks unless they are being taken or have been."""
        if not self.is_pending and not self._taken:
            self.take()

    def at_end(self, failures: Mapping[int, Failure]) -> tuple[RankStack, ...]:
        """Return the stacks that were taken, and the positions of ranks that torch has aborted since.

        Args:
            failures: The failures by rank.
        """
        found = {stack.rank: stack for stack in self._taken}
        for rank, failure in failures.items():
            if failure.collective_timeout is not None:
                waited_in = failure.collective_timeout.collective
                found[rank] = RankStack(rank=rank, frames=failure.stack, collective=waited_in)
        return tuple(found[rank] for rank in sorted(found))
