"""Ranks' requests for the run's MLflow target."""

from __future__ import annotations

from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.agent.reports import EventReports
from sgpu_magic.wire.node import TrackingAsked, TrackingKnown
from sgpu_magic.wire.rank import TrackingAnswered
from sgpu_magic.wire.tracking import TrackedRun


class TrackingRequests:
    """Answers ranks that ask for the run's MLflow target. The pool service is asked once; its answer is cached.

    Args:
        run_id: The run.
        group: Its ranks.
        reports: Sends requests to the pool service.
    """

    def __init__(self, run_id: str, group: Group, reports: EventReports) -> None:
        self._run_id = run_id
        self._group = group
        self._reports = reports
        self._target: TrackedRun | None = None
        self._waiting: list[int] = []

    def on_request(self, rank: int) -> None:
        """Answer a rank, at once or when the target is known."""
        if self._target is not None:
            self._answer(rank, None)
            return
        self._waiting.append(rank)
        if len(self._waiting) == 1:
            self._ask()

    def on_known(self, message: TrackingKnown) -> None:
        """Answer the waiting ranks. A missing target is not cached: the next rank's request is sent again."""
        self._target = message.tracked
        waiting, self._waiting = self._waiting, []
        for rank in waiting:
            self._answer(rank, message.problem)

    def on_new_service(self) -> None:
        """Repeat the request to a pool service that has replaced the one that was asked."""
        if self._waiting:
            self._ask()

    def _ask(self) -> None:
        self._reports.ask(TrackingAsked(run_id=self._run_id))

    def _answer(self, rank: int, problem: str | None) -> None:
        self._group.order(rank, TrackingAnswered(run_id=self._run_id, tracked=self._target, problem=problem))
