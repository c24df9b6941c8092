"""A run's place in MLflow, as its ranks ask for it: the pool service is asked once, and its answer remembered."""

from __future__ import annotations

from collections.abc import Callable

from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.wire.node_messages import TrackingKnown
from sgpu_magic.wire.rank_messages import TrackingAnswered
from sgpu_magic.wire.tracking import TrackedRun


class TrackingAnswers:
    """Of one run.

    Args:
        run_id: The run.
        group: Where its ranks are.
        ask: Asks the pool service, if there is one.
    """

    def __init__(self, run_id: str, group: Group, ask: Callable[[], None]) -> None:
        self._run_id = run_id
        self._group = group
        self._ask = ask
        self._known: TrackedRun | None = None
        self._asking: list[int] = []

    def asked(self, rank: int) -> None:
        """A rank wants to know it."""
        if self._known is not None:
            self._answer(rank, self._known, "")
            return
        self._asking.append(rank)
        if len(self._asking) == 1:
            self._ask()

    def ask_again(self) -> None:
        """Another pool service has the run now, and was asked nothing yet."""
        if self._asking:
            self._ask()

    def known(self, message: TrackingKnown) -> None:
        """The pool service has told it. That there is none may change: it is asked again by the next rank."""
        self._known = message.tracked
        asking, self._asking = self._asking, []
        for rank in asking:
            self._answer(rank, message.tracked, message.problem)

    def _answer(self, rank: int, tracked: TrackedRun | None, problem: str) -> None:
        self._group.order(rank, TrackingAnswered(run_id=self._run_id, tracked=tracked, problem=problem))
