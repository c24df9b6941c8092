"""What ranks say besides output and results: displays, words of widgets, and questions in both directions.

A display takes its place among what the rank prints; what widgets say is bounded. A rank asks for the run's place in
MLflow, and an idle rank of a session answers questions such as for completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sgpu_magic.agent.ranks.group import Group, RankProcess
from sgpu_magic.wire.events import EventBody, Noted
from sgpu_magic.wire.node import TrackingKnown
from sgpu_magic.wire.rank import (
    AnswerQuestion,
    Cleared,
    CommsSaid,
    Displayed,
    InPlace,
    RankAnswer,
    RankQuestion,
    TrackingAnswered,
)
from sgpu_magic.wire.rank_events import CommsMoved, DisplayPublished, OutputCleared
from sgpu_magic.wire.tracking import TrackedRun

# of one run, of all its ranks: events are kept on disk
MOST_COMM_BYTES = 256 << 20
Answered = Callable[[RankAnswer], None]


def show(process: RankProcess, message: Displayed | Cleared, say: Callable[[EventBody], None]) -> None:
    """Tell of a display or a clearing after all that the rank had printed before it, and let the rank go on.

    Args:
        process: The rank, which waits for the answer.
        message: What it displayed, or that it cleared its output.
        say: Tells what happened.
    """
    process.output.drain()
    if isinstance(message, Cleared):
        say(OutputCleared(rank=process.rank, wait=message.wait))
    else:
        say(
            DisplayPublished(
                rank=process.rank,
                bundle=message.bundle,
                metadata=message.metadata,
                display_id=message.display_id,
                update=message.update,
            )
        )
    if process.stream is not None:
        process.stream.send(InPlace())


class CommReports:
    """Tells what the widgets of one run's ranks say, up to a number of bytes.

    Args:
        say: Tells what happened, with raw frames.
    """

    def __init__(self, say: Callable[[EventBody, Sequence[bytes]], None]) -> None:
        self._say = say
        self._bytes = 0

    def told(self, rank: int, message: CommsSaid, frames: Sequence[bytes]) -> None:
        """A rank's widgets said something."""
        had = self._bytes
        self._bytes += sum(len(each.data) + len(each.metadata) for each in message.messages) + sum(map(len, frames))
        if self._bytes <= MOST_COMM_BYTES:
            self._say(CommsMoved(rank=rank, messages=message.messages), frames)
        elif had <= MOST_COMM_BYTES:
            text = f"widgets of this run's ranks have sent {MOST_COMM_BYTES >> 20} MB and are updated no further"
            self._say(Noted(text=text), ())


class TrackingAnswers:
    """One run's place in MLflow, as its ranks ask for it: the pool service is asked once, its answer remembered.

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


class Questions:
    """Questions to idle ranks of a session, and who waits for the answers.

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
