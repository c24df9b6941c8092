"""What clients ask of a session's ranks, and the answer of one: to be replaced, and what is in their namespaces."""

from __future__ import annotations

from sgpu_magic.wire.questions import RankAnswer, RankQuestion
from sgpu_magic.wire.record import Record


class RestartRanks(Record, frozen=True, tag="restart-ranks", kw_only=True):
    """Replace ranks of a session by new processes; answered by `Accepted` when they have joined, or `Refused`.

    Args:
        session: The session's run id.
        ranks: Which; empty means all.
    """

    request: int
    session: str
    ranks: tuple[int, ...] = ()


class AskRank(Record, frozen=True, tag="ask-rank", kw_only=True):
    """Ask an idle rank of a session about its namespace; answered by `RankAnswered`."""

    request: int
    session: str
    question: RankQuestion


class RankAnswered(Record, frozen=True, tag="rank-answered", kw_only=True):
    """What the rank said."""

    request: int
    answer: RankAnswer
