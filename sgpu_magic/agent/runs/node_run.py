"""The interface of everything that the agent runs: fresh runs, sessions, cells in them, and runs being prepared."""

from __future__ import annotations

import abc
import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.agent.reports import EventReports
from sgpu_magic.agent.runs.run_files import AttemptFiles
from sgpu_magic.agent.runs.run_memory import BackgroundCopier
from sgpu_magic.agent.runs.send_files_to_pool import FilesToPool
from sgpu_magic.agent.watch.sampling import Sampling
from sgpu_magic.config import Settings
from sgpu_magic.wire.base import FailureKind, RunLimit, RunState
from sgpu_magic.wire.codec import Order
from sgpu_magic.wire.events import EventBody, RanksStarted
from sgpu_magic.wire.node import DetachRun, Launch
from sgpu_magic.wire.option_text import Text, TextWithOptions
from sgpu_magic.wire.rank_events import Failure, RankStack

if TYPE_CHECKING:
    from sgpu_magic.agent.run_registry import RunRegistry


class AgentServices(msgspec.Struct, frozen=True):
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
    reports: EventReports
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
        has_exited: Whether its ranks are dead and reaped, or idle again in their session.

    Raises:
        OSError: The run's directory can't be made.
    """

    def __init__(self, attempt: Attempt, here: AgentServices) -> None:
        self.launch = attempt.launch
        self.run_id = attempt.launch.spec.run_id
        self._here = here
        self._listener = here.listener
        self._loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []
        self._host = socket.gethostname()
        self._launched_at = time.monotonic()
        self._started_at: float | None = None
        self._ending_as: RunState | None = None
        self._end_reason: Text = ""
        self._limit: RunLimit | None = None
        self._final_state = RunState.FAILED
        self.ended = False
        self.has_exited = False
        self.files = AttemptFiles(attempt, here, self._say)

    # ------------------------------------------------------------ the agent's interface

    @property
    def pids(self) -> list[int]:
        """Process ids of its ranks; empty while it is being prepared."""
        return []

    @property
    def state(self) -> RunState:
        """The run's state on this node."""
        if self.ended:
            return self._final_state
        if self._ending_as is not None:
            return RunState.CANCELLING
        return RunState.STARTING if self._started_at is None else RunState.RUNNING

    @property
    def age_s(self) -> float:
        """Seconds since its launch."""
        return time.monotonic() - self._launched_at

    @abc.abstractmethod
    def start(self) -> None:
        """Start the run. Failures are reported as events."""

    @abc.abstractmethod
    def end_as(self, state: RunState, reason: Text, limit: RunLimit | None = None) -> None:
        """Stop the run; it ends with this state and reason, and with the limit that it reached, if any."""

    @abc.abstractmethod
    def fail_whole(self, kind: FailureKind, message: Text) -> None:
        """Fail the run as a whole; no rank is to blame."""

    def faulted(self, error: Exception) -> None:
        """Handle an exception in a callback that served the run."""
        self._listener.faulted(self.run_id, error)

    def abandon(self) -> None:
        """Drop everything pending and report nothing more: a fault prevents the run from ending normally."""
        self.ended = True
        self._on_ranks_exited()

    def on_order(self, message: Order, frames: Sequence[bytes]) -> None:
        """Execute a command of the pool service for this run; ignore one that does not concern it."""
        if isinstance(message, DetachRun):
            # it keeps running when its notebook is gone
            spec = msgspec.structs.replace(self.launch.spec, detach=True)
            self.launch = msgspec.structs.replace(self.launch, spec=spec)

    @abc.abstractmethod
    def take_stacks(self, done: Callable[[tuple[RankStack, ...]], None]) -> None:
        """Take each rank's stack and call `done` within half a second."""

    # ------------------------------------------------------------ internals

    def _say(self, body: EventBody, frames: Sequence[bytes] = ()) -> None:
        self._listener.on_event(self.run_id, body, frames)

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call `call` after `delay_s` seconds unless the run is gone by then."""
        self._timers.append(self._loop.call_later(delay_s, call))

    @property
    def grace_s(self) -> float:
        """Seconds that ranks get to end after a cancel or timeout."""
        asked_s = self.launch.spec.grace_s
        return self._here.settings.grace_s if asked_s is None else asked_s

    def _report_start(self, pids: Sequence[int], warm: str) -> None:
        """Report that all ranks have joined.

        Args:
            pids: Their process ids.
            warm: How they were started: `standby`, `zygote`, `cold` or `session`.
        """
        self._started_at = time.monotonic()
        self._say(RanksStarted(pids=tuple(pids), warm=warm))

    def _failure_now(self, kind: FailureKind, message: Text) -> Failure:
        """Return a failure of the whole run, without a rank."""
        text = message if isinstance(message, TextWithOptions) else None
        return Failure(kind=kind, message=str(message), text=text, host=self._host, at=time.time())

    def _on_ranks_exited(self) -> None:
        """Mark the run's ranks as exited and cancel its timers."""
        self.has_exited = True
        for timer in self._timers:
            timer.cancel()

    def _finish(self) -> None:
        """Finish the run: its ranks are gone."""
        self._on_ranks_exited()
        self.files.ended(self.state)
        self._listener.run_exited(self)
