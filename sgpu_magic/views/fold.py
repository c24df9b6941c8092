"""`RunView` = fold(events): the model that text, static HTML and the widget render. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sgpu_magic.formatting import format_bytes
from sgpu_magic.options.table import as_argument
from sgpu_magic.views import run_notes
from sgpu_magic.views.live.run_progress import RunProgress
from sgpu_magic.views.metrics import RunMetrics
from sgpu_magic.views.output import RunOutput
from sgpu_magic.views.output_buffer import Item
from sgpu_magic.views.rank_models import RankModels
from sgpu_magic.views.run_notes import Notes, SessionState
from sgpu_magic.views.stacks import cancelled_note, stall_note
from sgpu_magic.views.units import RunTimes, to_steady_time
from sgpu_magic.views.usage import RunUsage
from sgpu_magic.wire.base import CancelReason, RunKind, RunLimit, RunState, short
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.events import (
    AttemptFailed,
    Described,
    Detached,
    EnvironmentMoved,
    Event,
    GroupRenewed,
    Noted,
    OwnSession,
    PayloadReleased,
    Placed,
    QueueMoved,
    RanksRestarted,
    RanksStarted,
    RunEnded,
    SessionMoved,
    StateChanged,
    Submitted,
    Tracked,
)
from sgpu_magic.wire.rank_events import (
    CommsMoved,
    DeviceBusy,
    DeviceIdle,
    DisplayPublished,
    Failure,
    MetricsLogged,
    OutputCleared,
    OutputWritten,
    RankFailed,
    RanksFinishing,
    RankUnfinished,
    Resumed,
    Sampled,
    Stalled,
)
from sgpu_magic.wire.run import RankResult, RunSpec
from sgpu_magic.wire.tracking import TrackedRun

if TYPE_CHECKING:
    from sgpu_magic.views.live.log_index import RecentLines

# larger values are named in the run's notes
_LARGE_VALUE_BYTES = 100_000_000


class RunView:
    """Everything about one run that views render.

    Args:
        spec: What was submitted.
        output_limit: Bytes of output kept: the first 40 % and the last 60 %; the middle becomes one gap. Its HTML and
            text together have at most as many.
        pool: The pool's name.
        error_follows: The cell raises the run's error below this view, where HTML is drawn, so it is short there.

    Attributes:
        state: The run's state.
        reason: Why it is in this state, "" when there is nothing to say.
        position: Position in the queue (1 is next), None when it is not queued.
        waiting_for: What it waits for, "" when it does not wait.
        own_sessions: Sessions of the process that submitted it that hold devices which it could take, while it waits.
        is_remarked: It has notes that come from no event, so that no other process can show it as this one does.
        lease: The devices, None until they are granted.
        host: Where its ranks are, "" until known.
        labels: The devices' labels in rank order, empty when there are none.
        hourly: Cost of the devices per hour, in `currency`; None without a price.
        currency: Currency of the price, "" without one.
        warm: How the ranks were started: `standby`, `zygote`, `cold`; None until then.
        rank_failures: The first failure of each rank, in order of time.
        attempt: Number of the current attempt, from 1.
        attempts: Maximum number of attempts.
        stalled: Where its ranks wait during a stall; kept when the run ends stalled.
        finishing: What ranks whose cell has ended still finish; empty while cells run, and after the end.
        usage: What its ranks and their devices use.
        metrics: What its code has logged to MLflow.
        session: A session's cells and dead ranks, None for other runs.
        directory: Where its logs are, "" when unknown.
        environment: Progress of its packages, None while there is nothing to report.
        tracked: Its run in MLflow, None until known.
        silence: A sentence that its pool can't be reached, "" while it can.
        output: The output of its ranks.
        progress: The progress of its ranks, from their progress bars.
        log: The newest lines of the ranks' logs, for a live view; None without one.
        models: Widgets of its ranks; for a session's cell those of the session.
        is_detached: It was detached, so it may continue without its notebook.
        left: Why an active run is not followed here any more, "" while it is.
        ended: The final event, None while the run is active.
        submitted_at: When it was submitted, by the views' clock.
        times: When it was placed and when its ranks started.
        version: Grows with every change; equal versions render equally, except for running times.
    """

    def __init__(
        self, spec: RunSpec, output_limit: int = 100_000, pool: str = "local", *, error_follows: bool = False
    ) -> None:
        self.error_follows = error_follows
        self.spec = spec
        self.output_limit = output_limit
        self.pool = pool
        self.state = RunState.QUEUED
        self.reason = ""
        self.position: int | None = None
        self.waiting_for = ""
        self.own_sessions: tuple[OwnSession, ...] = ()
        self.is_remarked = False
        self.is_detached = spec.detach
        self.lease: Lease | None = None
        self.host = ""
        self.labels: tuple[str, ...] = ()
        self.hourly: float | None = None
        self.currency = ""
        self.warm: str | None = None
        self.rank_failures: dict[int, Failure] = {}
        self.attempt = 1
        self.attempts = spec.retries + 1
        self.stalled: Stalled | None = None
        self.finishing: tuple[RankUnfinished, ...] = ()
        self.usage = RunUsage()
        self.metrics = RunMetrics()
        self.session = SessionState() if spec.kind is RunKind.SESSION else None
        self.directory = ""
        self.environment: EnvironmentMoved | None = None
        self.tracked: TrackedRun | None = None
        self.silence = ""
        self.left = ""
        self.ended: RunEnded | None = None
        self.models = RankModels()
        self.submitted_at = to_steady_time(spec.submitted_at)
        self.version = 0
        self.times = RunTimes()
        self._notes = Notes()
        self._last_stall = ""
        self.output = RunOutput(output_limit)
        self.progress = RunProgress()
        self.log: RecentLines | None = None
        self._cached: tuple[int, list[Item]] = (-1, [])

    def apply(self, event: Event, frames: Sequence[bytes] = ()) -> None:
        """Fold in one event.

        Args:
            event: The event.
            frames: Its raw frames; only those of widgets are used, exceptions and results are left to the client.
        """
        self.version += 1
        match event.body:
            case OutputWritten() as body:
                self.output.write(body)
                self.progress.write(body)
                if self.log is not None:
                    self.log.write(body)
            case StateChanged(state=state, reason=reason):
                self.state, self.reason = state, reason
                if state is RunState.STARTING:
                    self.times.starts(to_steady_time(event.at))
                if state is not RunState.QUEUED:
                    self._leave_queue()
            case QueueMoved(position=position, reason=reason, own_sessions=own):
                self.position, self.waiting_for, self.own_sessions = position, reason, own
            case Placed(lease=lease, host=host, labels=labels) as body:
                self.lease, self.host, self.labels = lease, host, labels
                self.hourly, self.currency = body.hourly, body.currency
                self._leave_queue()
                self.times.placed_at = to_steady_time(event.at)
                if lease.shared_cores is not None:
                    self._notes.add(run_notes.shared_cores_note(lease.ranks, lease.shared_cores))
            case RanksStarted(warm=warm):
                self.warm, self.times.started_at = warm, to_steady_time(event.at)
            case DisplayPublished() as body:
                self.output.display(body)
            case CommsMoved() as body:
                self.models.apply(body, frames)
            case OutputCleared() as body:
                self.output.clear(body)
            case RankFailed(failure=failure):
                self.rank_failures.setdefault(-1 if failure.rank is None else failure.rank, failure)
            case Noted(text=text):
                self._notes.add(text)
            case PayloadReleased(kept=kept, reason=reason):
                self._notes.add("" if kept else reason)
            case AttemptFailed() as body:
                self._start_again(body, to_steady_time(event.at))
            case Stalled() as body:
                self.stalled = body
            case Resumed():
                self._end_stall()
            case RanksFinishing(ranks=ranks):
                self.finishing = ranks
            case Sampled() | DeviceIdle() | DeviceBusy() as body:
                self.usage.apply(body, to_steady_time(event.at), self.times.started_at)
            case SessionMoved() as body:
                if self.session is not None:
                    self.session.apply_move(body, event.at)
            case GroupRenewed() as body:
                self._notes.add(run_notes.renewal_note(body, self.lease), is_warning=bool(body.problem or body.lost))
            case RanksRestarted() as body:
                self._restarted(body)
            case EnvironmentMoved() as body:
                self.environment = body
            case Tracked(tracked=tracked):
                self.tracked = tracked
            case MetricsLogged() as body:
                self.metrics.apply(body)
            case Detached():
                self.is_detached = True
            case Submitted() | Described():
                # the view has the spec already
                pass
            case RunEnded() as body:
                self._end(body)

    def remark(self, sentence: str) -> None:
        """Add a note that comes from no event."""
        self._notes.add(sentence)
        self.is_remarked = True
        self.version += 1

    def set_silence(self, sentence: str) -> None:
        """Set the sentence that its pool can't be reached, or "" when it can be again; the run continues either way."""
        if sentence != self.silence:
            self.silence = sentence
            self.version += 1

    def stop_following(self, sentence: str) -> None:
        """Note why the run, which continues, is not followed here any more."""
        self.left = sentence
        self.version += 1

    # ------------------------------------------------------------ properties

    @property
    def run_id(self) -> str:
        return self.spec.run_id

    @property
    def short_id(self) -> str:
        return short(self.spec.run_id)

    @property
    def name(self) -> str:
        return run_notes.run_name(self.spec)

    @property
    def ranks(self) -> int:
        """The world size, even if not all ranks take part; sequences indexed by rank have this length."""
        return self.spec.placement.ranks

    @property
    def rank_numbers(self) -> tuple[int, ...]:
        """The ranks that take part, ascending."""
        return self.spec.rank_numbers

    @property
    def is_final(self) -> bool:
        return self.ended is not None

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about large variables, the payload, the lease and the run."""
        large = [
            f"shipping {name} costs {format_bytes(size)}"
            for name, size in self.spec.shipped.sizes
            if size > _LARGE_VALUE_BYTES
        ]
        return [*large, *Notes(self.spec.shipped.notes).texts, *self._notes.texts]

    @property
    def warnings(self) -> list[str]:
        """The notes that ask the user for something; the others are information."""
        return [*Notes(self.spec.shipped.notes).warnings, *self._notes.warnings]

    @property
    def past_stall(self) -> list[str]:
        """After the run's end, where its ranks waited when it was cancelled, or in the last stall, which is over."""
        return [self._last_stall] if self._last_stall and self.is_final else []

    @property
    def limit(self) -> RunLimit | None:
        """The limit that ended the run; None if none did or it is unknown."""
        return self.ended.limit if self.ended else None

    @property
    def failure(self) -> Failure | None:
        """The root cause, None before the run has ended."""
        return self.ended.failure if self.ended else None

    @property
    def others(self) -> tuple[Failure, ...]:
        return self.ended.others if self.ended else ()

    @property
    def results(self) -> tuple[RankResult, ...]:
        return self.ended.results if self.ended else ()

    # ------------------------------------------------------------ output

    @property
    def items(self) -> list[Item]:
        """The output in order of arrival, bounded by `output_limit`. Do not modify the list."""
        if self._cached[0] != self.version:
            self._cached = (self.version, self.output.items)
        return self._cached[1]

    def _start_again(self, body: AttemptFailed, at: float) -> None:
        self.output.finish_lines()
        self._notes.add(run_notes.attempt_note(body, self.times.start_again(at)))
        self.attempt, self.attempts = body.attempt + 1, body.attempts
        self.rank_failures, self.stalled, self.finishing = {}, None, ()
        self.usage.start_again()
        self.progress.start_again()

    def _restarted(self, body: RanksRestarted) -> None:
        self._notes.add(run_notes.restart_note(body))
        if self.session is not None:
            self.session.dead = tuple(rank for rank in self.session.dead if rank not in body.ranks)
        for rank in body.ranks:
            self.rank_failures.pop(rank, None)

    def _end_stall(self) -> None:
        if self.stalled is not None:
            self._last_stall = stall_note(self.stalled, self.spec.cell)
            self.stalled = None

    def _leave_queue(self) -> None:
        self.position, self.waiting_for, self.own_sessions = None, "", ()

    def _end(self, body: RunEnded) -> None:
        self.output.finish_lines()
        if self.log is not None:
            self.log.finish()
        if body.stacks and body.state is not RunState.CANCELLED:
            self.stalled = None
        elif body.stacks and (note := cancelled_note(body.stacks, self.spec.cell)):
            self._last_stall, self.stalled = note, None
        elif body.state in (RunState.SUCCEEDED, RunState.CANCELLED):
            self._end_stall()
        self.usage.ended()
        self.ended = self.times.ended = body = _spelled(body, self.spec.kind)
        self.state = body.state
        self.finishing = ()
        if body.cut_off:
            self._notes.add(run_notes.cut_off_note(body), is_warning=True)
        if body.unstopped:
            self._notes.add(run_notes.unstopped_note(body.unstopped), is_warning=True)
        if body.reason == CancelReason.OWNER_GONE and self.session is None:
            # this is read in another kernel
            self._notes.add(f"%sgpu_attach {self.short_id} shows run {self.short_id} again")
        self._leave_queue()


def _spelled(ended: RunEnded, kind: RunKind) -> RunEnded:
    """Spell the options that a failure's message names as the run's caller writes them: a function's as arguments."""
    failure = ended.failure
    if kind is not RunKind.CALL or failure is None or failure.text is None:
        return ended
    return replace(ended, failure=replace(failure, message=failure.text.spelled(as_argument)))
