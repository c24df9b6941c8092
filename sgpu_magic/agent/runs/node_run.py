"""What the agent asks of everything that it runs, and what all of it does alike.

That is fresh runs, sessions, the cells in them, and runs that are only being made ready.
"""

from __future__ import annotations

import abc
import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from sgpu_magic.agent.runs.run_files import RunFiles
from sgpu_magic.agent.runs.run_memory import BackgroundCopier
from sgpu_magic.agent.runs.send_files_to_pool import FilesToPool
from sgpu_magic.agent.watch.sampling import Sampling
from sgpu_magic.config import Settings
from sgpu_magic.wire.client import TellComms
from sgpu_magic.wire.events import EventBody
from sgpu_magic.wire.failures import Failure, RankStack
from sgpu_magic.wire.node import Launch, MasterBound, TrackingKnown
from sgpu_magic.wire.states import FailureKind, RunState


class NodeRunListener(Protocol):
    """The agent."""

    def tracking_asked(self, run_id: str) -> None:
        """A rank wants to know the run's place in MLflow."""
        ...

    def happened(self, run_id: str, body: EventBody, frames: Sequence[bytes]) -> None: ...
    def run_gone(self, run: NodeRun) -> None: ...

    def faulted(self, run_id: str, error: Exception) -> None:
        """A callback that worked for the run raised an exception."""
        ...

    def master_bound(self, bound: MasterBound) -> None:
        """The ranks of a run of several nodes meet here."""
        ...


@dataclass(frozen=True)
class Surroundings:
    """What every run of an agent shares.

    Args:
        copier: Copies large parts into the runs' directories.
        settings: For the largest payload that is kept and the default grace.
        sampling: Samples what the ranks and their devices use.
        listener: Hears what happened.
        far: Takes what belongs to the machine of the pool, where that is another one.
    """

    copier: BackgroundCopier
    settings: Settings
    sampling: Sampling
    listener: NodeRunListener
    far: FilesToPool


class NodeRun(abc.ABC):
    """A run on this node.

    Args:
        launch: What to run.
        frames: Raw frames of the launch; the first is an inline payload.
        here: What it shares with other runs.
        predecessor: The attempt before this one, or what made it ready: its payload is taken over.

    Attributes:
        ended: Its last word was said; its ranks may still be there.
        gone: Its ranks are dead and reaped, or idle again in their session.

    Raises:
        OSError: The run's directory can't be made.
    """

    def __init__(
        self, launch: Launch, frames: Sequence[bytes], here: Surroundings, predecessor: NodeRun | None = None
    ) -> None:
        self.launch = launch
        self.run_id = launch.spec.run_id
        self._here = here
        self._listener = here.listener
        self._loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []
        self._host = socket.gethostname()
        self._launched_at = time.monotonic()
        self.ended = False
        self.gone = False
        inherited = predecessor.files if predecessor is not None and predecessor.gone else None
        self.files = RunFiles(launch, frames, here.copier, here.settings.keep_payload, self._say, inherited, here.far)

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
