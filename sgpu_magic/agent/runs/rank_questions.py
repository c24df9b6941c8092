"""Questions to a session's idle ranks."""

from __future__ import annotations

from collections.abc import Callable

from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.system.message_stream import Pending
from sgpu_magic.wire.rank import AnswerQuestion
from sgpu_magic.wire.run import RankAnswer, RankQuestion

Answered = Callable[[RankAnswer], None]


class Questions:
    """Sends questions to idle ranks of a session and delivers the answers.

    Args:
        group: The session's ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._asked = Pending[int, tuple[int, Answered]]()

    def ask(self, request: int, question: RankQuestion, done: Answered, *, busy: bool) -> None:
        """Ask a rank; `done` is called with its answer, or with the reason why there is none.

        Args:
            request: The question's number.
            question: The question and its rank.
            done: Receives the answer.
            busy: Whether the ranks can't answer now.
        """
        rank = question.rank
        if not 0 <= rank < len(self._group.ranks) or not self._group.rank(rank).alive:
            done(RankAnswer(problem=f"there is no rank {rank}"))
        elif busy:
            done(RankAnswer(problem=f"rank {rank} is busy", busy=True))
        else:
            self._asked[request] = rank, done
            self._group.order(rank, AnswerQuestion(request=request, question=question))

    def answered(self, request: int, answer: RankAnswer) -> None:
        """Deliver a rank's answer."""
        if (asked := self._asked.pop(request, None)) is not None:
            asked[1](answer)

    def died(self, rank: int) -> None:
        """Answer the dead rank's pending questions with a problem."""
        for _, done in self._asked.take_all(lambda asked: asked[0] == rank):
            done(RankAnswer(problem=f"rank {rank} has died"))
