"""Questions to idle ranks of a session, and who waits for the answers."""

from __future__ import annotations

from collections.abc import Callable

from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.wire.questions import RankAnswer, RankQuestion
from sgpu_magic.wire.rank_messages import AnswerQuestion

Answered = Callable[[RankAnswer], None]


class Questions:
    """Those that are under way.

    Args:
        group: The ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._asked: dict[int, tuple[int, Answered]] = {}

    def ask(self, request: int, question: RankQuestion, done: Answered, *, busy: bool) -> None:
        """Ask a rank; `done` is called with its answer, or with why there is none.

        Args:
            request: The question's number.
            question: What is asked of which rank.
            done: Takes the answer.
            busy: The ranks can't be asked now.
        """
        rank = question.rank
        if not 0 <= rank < len(self._group.ranks) or not self._group.rank(rank).alive:
            done(RankAnswer(problem=f"there is no rank {rank}"))
        elif busy:
            done(RankAnswer(problem=f"rank {rank} is busy"))
        else:
            self._asked[request] = (rank, done)
            self._group.order(rank, AnswerQuestion(request=request, question=question))

    def answered(self, request: int, answer: RankAnswer) -> None:
        """A rank has answered."""
        _, done = self._asked.pop(request, (0, None))
        if done is not None:
            done(answer)

    def died(self, rank: int) -> None:
        """The rank answers nothing any more."""
        for request in [number for number, (asked, _) in self._asked.items() if asked == rank]:
            self.answered(request, RankAnswer(problem=f"rank {rank} has died"))
