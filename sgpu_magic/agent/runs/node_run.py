"""The interface of everything that the agent runs, and the behaviour that all of it shares.

That is fresh runs, sessions, the cells in them, and runs that are being prepared. The messages of ranks besides output
and results are handled alike: a display is reported in order with the rank's output, widget messages are bounded, ranks
can ask for the run's MLflow target, and idle ranks of a session answer questions such as completion requests.
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
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.client import TellComms
from sgpu_magic.wire.events import EventBody, Noted
from sgpu_magic.wire.node import Launch, TrackingAsked, TrackingKnown
from sgpu_magic.wire.rank import AnswerQuestion, Cleared, CommsSaid, Displayed, InPlace, TrackingAnswered
from sgpu_magic.wire.rank_events import CommsMoved, DisplayPublished, Failure, OutputCleared, RankStack
from sgpu_magic.wire.run import RankAnswer, RankQuestion
from sgpu_magic.wire.tracking import TrackedRun

if TYPE_CHECKING:
    from sgpu_magic.agent.run_registry import RunRegistry


class Surroundings(msgspec.Struct, frozen=True):
    """What every run of an agent shares.

    Args:
        copier: Copies payloads and results into the runs' directories in the background.
        settings: The pool's settings.
        sampling: Samples the usage of ranks and devices.
        reports: Sends requests to the pool service.
        listener: Receives the runs' events.
        far: Sends run files to a pool on another machine.
    """

    copier: BackgroundCopier
    settings: Settings
    sampling: Sampling
    reports: Reports
    listener: RunRegistry
    far: FilesToPool


class Attempt(msgspec.Struct, frozen=True):
    """One attempt to execute a run on this node.

    Args:
        launch: The launch to execute.
        frames: Raw frames of the launch; the first is an inline payload.
        predecessor: The previous attempt, or the `PreparingRun` that prepared this one; its payload is reused.
    """

    launch: Launch
    frames: Sequence[bytes]
    predecessor: NodeRun | None = None


class NodeRun(abc.ABC):
    """A run on this node.

    Args:
        attempt: The launch and its payload.
        here: What all runs of the agent share.

    Attributes:
        ended: Whether its `RunEnded` was reported; its ranks may still exist.
        gone: Whether its ranks are dead and reaped, or idle again in their session.

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

    # ------------------------------------------------------------ the agent's interface

    @property
    @abc.abstractmethod
    def pids(self) -> list[int]:
        """Process ids of its ranks; empty while it is being prepared."""

    @property
    @abc.abstractmethod
    def state(self) -> RunState:
        """The run's state on this node."""

    @property
    def age_s(self) -> float:
        """Seconds since its launch."""
        return time.monotonic() - self._launched_at

    @abc.abstractmethod
    def start(self) -> None:
        """Start the run. Failures are reported as events."""

    @abc.abstractmethod
    def end_as(self, state: RunState, reason: str) -> None:
        """Stop the run; it ends with this state and reason."""

    @abc.abstractmethod
    def fail_whole(self, kind: FailureKind, message: str) -> None:
        """Fail the run as a whole; no rank is to blame."""

    def faulted(self, error: Exception) -> None:
        """Handle an exception in a callback that served the run."""
        self._listener.faulted(self.run_id, error)

    def abandon(self) -> None:
        """Drop everything pending and report nothing more: a fault prevents the run from ending normally."""
        self.ended = True
        self._ranks_gone()

    @abc.abstractmethod
    def kill(self) -> None:
        """Send SIGKILL to ranks that were told to end and have not."""

    def detach(self) -> None:
        """Keep the run running when its notebook is gone."""
        spec = msgspec.structs.replace(self.launch.spec, detach=True)
        self.launch = msgspec.structs.replace(self.launch, spec=spec)

    def tracking_known(self, message: TrackingKnown) -> None:  # noqa: B027  most runs do nothing
        """Handle the pool service's answer with the run's MLflow target, which may be None."""

    def hear_comms(self, message: TellComms, frames: Sequence[bytes]) -> None:  # noqa: B027  as above
        """Pass a front end's message to widgets of a rank; ignored while there are no ranks."""

    def adopted(self) -> None:  # noqa: B027  most runs do nothing
        """Handle the adoption of the run by another pool service."""

    @abc.abstractmethod
    def give_payload_up(self) -> None:
        """Release the payload's memory, which the notebook wants to reuse."""

    def results_received(self) -> None:  # noqa: B027  most runs do nothing
        """Release the results in memory: the notebook has received them."""

    @abc.abstractmethod
    def take_stacks(self, done: Callable[[tuple[RankStack, ...]], None]) -> None:
        """Take each rank's stack and call `done` within half a second."""

    # ------------------------------------------------------------ within

    def _say(self, body: EventBody, frames: Sequence[bytes] = ()) -> None:
        self._listener.happened(self.run_id, body, frames)

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call `call` after `delay_s` seconds unless the run is gone by then."""
        self._timers.append(self._loop.call_later(delay_s, call))

    def _grace(self) -> float:
        """Seconds that ranks get to end after a cancel or timeout."""
        asked_s = self.launch.spec.grace_s
        return self._here.settings.grace_s if asked_s is None else asked_s

    def _failure_now(self, kind: FailureKind, message: str) -> Failure:
        """Return a failure of the whole run, without a rank."""
        return Failure(kind=kind, message=message, host=self._host, at=time.time())

    def _ranks_gone(self) -> None:
        """Mark the run as gone and cancel its timers."""
        self.gone = True
        for timer in self._timers:
            timer.cancel()

    def _is_over(self) -> None:
        """Finish the run: its ranks are gone."""
        self._ranks_gone()
        self.files.ended(self.state)
        self._listener.run_gone(self)


# ---------------------------------------------------------------- messages from ranks


# limit for all ranks of one run together, since events are kept on disk
MOST_COMM_BYTES = 256 << 20
Answered = Callable[[RankAnswer], None]


def show(process: RankProcess, message: Displayed | Cleared, say: Callable[[EventBody], None]) -> None:
    """Report a display or a clearing of output after everything the rank printed before, then let the rank continue.

    Args:
        process: The rank, which waits for the reply.
        message: The display or clearing.
        say: Reports an event.
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
    """Reports widget messages of one run's ranks, up to `MOST_COMM_BYTES`.

    Args:
        say: Reports an event with raw frames.
    """

    def __init__(self, say: Callable[[EventBody, Sequence[bytes]], None]) -> None:
        self._say = say
        self._bytes = 0

    def told(self, rank: int, message: CommsSaid, frames: Sequence[bytes]) -> None:
        """Report messages of a rank's widgets."""
        had = self._bytes
        self._bytes += sum(len(each.data) + len(each.metadata) for each in message.messages) + sum(map(len, frames))
        if self._bytes <= MOST_COMM_BYTES:
            self._say(CommsMoved(rank=rank, messages=message.messages), frames)
        elif had <= MOST_COMM_BYTES:
            text = f"widgets of this run's ranks have sent {MOST_COMM_BYTES >> 20} MB and are no longer updated"
            self._say(Noted(text=text), ())


class TrackingAnswers:
    """Answers ranks that ask for the run's MLflow target. The pool service is asked once; its answer is cached.

    Args:
        run_id: The run.
        group: The ranks' group.
        reports: Sends the request to the pool service.
    """

    def __init__(self, run_id: str, group: Group, reports: Reports) -> None:
        self._run_id = run_id
        self._group = group
        self._reports = reports
        self._known: TrackedRun | None = None
        self._asking: list[int] = []

    def asked(self, rank: int) -> None:
        """Answer a rank's request, or forward it to the pool service."""
        if self._known is not None:
            self._answer(rank, self._known, "")
            return
        self._asking.append(rank)
        if len(self._asking) == 1:
            self.ask_again()

    def ask_again(self) -> None:
        """Send a pending request to the pool service, again if another service has adopted the run."""
        if self._asking:
            self._reports.ask(TrackingAsked(run_id=self._run_id))

    def known(self, message: TrackingKnown) -> None:
        """Answer the waiting ranks. A missing target is not cached: the next rank's request is sent again."""
        self._known = message.tracked
        asking, self._asking = self._asking, []
        for rank in asking:
            self._answer(rank, message.tracked, message.problem)

    def _answer(self, rank: int, tracked: TrackedRun | None, problem: str) -> None:
        self._group.order(rank, TrackingAnswered(run_id=self._run_id, tracked=tracked, problem=problem))


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
            done(RankAnswer(problem=f"rank {rank} is busy"))
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
