"""What the agent asks of everything that it runs, and what all of it does alike.

That is fresh runs, sessions, the cells in them, and runs that are only being made ready. What ranks say besides output
and results is the same for all: a display takes its place among what the rank prints; what widgets say is bounded; a
rank asks for the run's place in MLflow, and an idle rank of a session answers questions such as for completion.
"""

from __future__ import annotations

import abc
import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.agent.ranks.group import Group, RankProcess
from sgpu_magic.agent.reports import Reports
from sgpu_magic.agent.runs.run_files import RunFiles
from sgpu_magic.agent.runs.run_memory import BackgroundCopier
from sgpu_magic.agent.runs.send_files_to_pool import FilesToPool
from sgpu_magic.agent.watch.sampling import Sampling
from sgpu_magic.config import Settings
from sgpu_magic.system.message_stream import Pending
from sgpu_magic.wire.client import TellComms
from sgpu_magic.wire.events import EventBody, Noted
from sgpu_magic.wire.failures import Failure, RankStack
from sgpu_magic.wire.node import Launch, TrackingAsked, TrackingKnown
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
from sgpu_magic.wire.states import FailureKind, RunState
from sgpu_magic.wire.tracking import TrackedRun

if TYPE_CHECKING:
    from sgpu_magic.agent.run_registry import RunRegistry


class Surroundings(msgspec.Struct, frozen=True):
    """What every run of an agent shares.

    Args:
        copier: Copies large parts into the runs' directories.
        settings: For the largest payload that is kept and the default grace.
        sampling: Samples what the ranks and their devices use.
        reports: Asks the pool service.
        listener: Hears what happened.
        far: Takes what belongs to the machine of the pool, where that is another one.
    """

    copier: BackgroundCopier
    settings: Settings
    sampling: Sampling
    reports: Reports
    listener: RunRegistry
    far: FilesToPool


class Attempt(msgspec.Struct, frozen=True):
    """What a run on this node is made of.

    Args:
        launch: What to run.
        frames: Raw frames of the launch; the first is an inline payload.
        predecessor: The attempt before this one, or what made it ready: its payload is taken over.
    """

    launch: Launch
    frames: Sequence[bytes]
    predecessor: NodeRun | None = None


class NodeRun(abc.ABC):
    """A run on this node.

    Args:
        attempt: What it is made of.
        here: What it shares with other runs.

    Attributes:
        ended: Its last word was said; its ranks may still be there.
        gone: Its ranks are dead and reaped, or idle again in their session.

    Raises:
        OSError: The run's directory can't be made.
    """

    def __init__(self, attempt: Attempt, here: Surroundings) -> None:
        self.launch = attempt.launch
        self.run_id = attempt.launch.spec.run_id
        self._here = here
        self._listener = here.listener
        self._loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []
        self._host = socket.gethostname()
        self._launched_at = time.monotonic()
        self.ended = False
        self.gone = False
        self.files = RunFiles(attempt, here, self._say)

    # ------------------------------------------------------------ what the agent asks

    @property
    @abc.abstractmethod
    def pids(self) -> list[int]:
        """Of its ranks; none while it is being made ready."""

    @property
    @abc.abstractmethod
    def state(self) -> RunState:
        """Where it stands."""

    @property
    def age_s(self) -> float:
        """Seconds since its launch."""
        return time.monotonic() - self._launched_at

    @abc.abstractmethod
    def start(self) -> None:
        """Begin. Failures come as events like any other."""

    @abc.abstractmethod
    def end_as(self, state: RunState, reason: str) -> None:
        """It was asked to end."""

    @abc.abstractmethod
    def fail_whole(self, kind: FailureKind, message: str) -> None:
        """The run fails as a whole; no rank is to blame."""

    def faulted(self, error: Exception) -> None:
        """A callback that worked for the run raised an exception."""
        self._listener.faulted(self.run_id, error)

    def abandon(self) -> None:
        """A fault keeps it from ending: nothing of it is pending any more, nothing more is said."""
        self.ended = True
        self._ranks_gone()

    @abc.abstractmethod
    def kill(self) -> None:
        """KILL the ranks that were asked to end and have not."""

    def detach(self) -> None:
        """The run goes on when its notebook is gone."""
        spec = msgspec.structs.replace(self.launch.spec, detach=True)
        self.launch = msgspec.structs.replace(self.launch, spec=spec)

    def tracking_known(self, message: TrackingKnown) -> None:  # noqa: B027  most runs do nothing
        """The pool service has told the run's place in MLflow, or that it has none."""

    def hear_comms(self, message: TellComms, frames: Sequence[bytes]) -> None:  # noqa: B027  as above
        """The front end says something to widgets of a rank; while the run is made ready there are none."""

    def adopted(self) -> None:  # noqa: B027  most runs do nothing
        """Another pool service has taken the run over."""

    @abc.abstractmethod
    def give_payload_up(self) -> None:
        """The notebook wants its memory file back."""

    def results_received(self) -> None:  # noqa: B027  most runs do nothing
        """The notebook holds the results itself."""

    @abc.abstractmethod
    def take_stacks(self, done: Callable[[tuple[RankStack, ...]], None]) -> None:
        """Look where each rank is and call `done` within half a second."""

    # ------------------------------------------------------------ within

    def _say(self, body: EventBody, frames: Sequence[bytes] = ()) -> None:
        self._listener.happened(self.run_id, body, frames)

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call back after some seconds, unless the run is gone by then."""
        self._timers.append(self._loop.call_later(delay_s, call))

    def _grace(self) -> float:
        """Seconds for ranks to end after a cancel or a time-out."""
        asked_s = self.launch.spec.grace_s
        return self._here.settings.grace_s if asked_s is None else asked_s

    def _failure_now(self, kind: FailureKind, message: str) -> Failure:
        """The run fails as a whole; no rank is to blame."""
        return Failure(kind=kind, message=message, host=self._host, at=time.time())

    def _ranks_gone(self) -> None:
        """It has no ranks any more: what is pending is dropped."""
        self.gone = True
        for timer in self._timers:
            timer.cancel()

    def _is_over(self) -> None:
        """Nothing more happens to it."""
        self._ranks_gone()
        self.files.ended(self.state)
        self._listener.run_gone(self)


# ---------------------------------------------------------------- what ranks say


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
        reports: Asks the pool service, if there is one.
    """

    def __init__(self, run_id: str, group: Group, reports: Reports) -> None:
        self._run_id = run_id
        self._group = group
        self._reports = reports
        self._known: TrackedRun | None = None
        self._asking: list[int] = []

    def asked(self, rank: int) -> None:
        """A rank wants to know it."""
        if self._known is not None:
            self._answer(rank, self._known, "")
            return
        self._asking.append(rank)
        if len(self._asking) == 1:
            self.ask_again()

    def ask_again(self) -> None:
        """Another pool service has the run now, and was asked nothing yet."""
        if self._asking:
            self._reports.ask(TrackingAsked(run_id=self._run_id))

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
        self._asked = Pending[int, tuple[int, Answered]]()

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
            self._asked.add(request, (rank, done))
            self._group.order(rank, AnswerQuestion(request=request, question=question))

    def answered(self, request: int, answer: RankAnswer) -> None:
        """A rank has answered."""
        if (asked := self._asked.take(request)) is not None:
            asked[1](answer)

    def died(self, rank: int) -> None:
        """The rank answers nothing any more."""
        for _, done in self._asked.take_all(lambda asked: asked[0] == rank):
            done(RankAnswer(problem=f"rank {rank} has died"))
