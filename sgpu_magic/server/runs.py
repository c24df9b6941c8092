"""The server's model of runs: each run is folded once from its events, for all pages that show it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.client.result import RunResult
from sgpu_magic.config import Settings
from sgpu_magic.errors import RunCancelled
from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.files.tracking_progress import load_progress
from sgpu_magic.server.mlflow_ui import mlflow_run, page_mlflow
from sgpu_magic.server.page_schema import RunPage
from sgpu_magic.server.run_page import environment_changes, run_page
from sgpu_magic.server.run_places import RemotePools, RunLocation, run_here
from sgpu_magic.views.bundle import caption_bundle, mime_bundle
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.live.answers import Answers
from sgpu_magic.views.live.feed import Feed
from sgpu_magic.views.live.log_reader import LogReader
from sgpu_magic.views.live.messages import Answer, NewLines, Question
from sgpu_magic.views.live.schema import Snapshot
from sgpu_magic.views.output import Caption, ShownDisplay, TextSegment, last_text, segments
from sgpu_magic.views.phases import RunPhases
from sgpu_magic.views.remote_error import run_exception
from sgpu_magic.views.run_notes import cancelled_sentence, last_part
from sgpu_magic.wire.base import FailureKind, RunKind, RunState, is_valid_id, short
from sgpu_magic.wire.events import Detached, Event, EventBody, Noted, RanksStarted, RunEnded
from sgpu_magic.wire.rank_events import DisplayPublished, Failure, OutputCleared
from sgpu_magic.wire.tracking import TrackedRun

Output = dict[str, object]
"""One output of a cell, in the notebook format."""

IDLE_S = 60.0
"""Seconds after the last request for a run until its follower is dropped; its directory remains."""


class RunNotHere(Exception):
    """The run is unknown on this machine; the message is shown to the user."""


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What a page has received about a run.

    Args:
        after: The number of the last `NewLines` it received.
        lines: Lines of all ranks it received.
        drawn: The number of the last snapshot it received.
        displays: The last `News.displays` it received.
    """

    after: int = 0
    lines: int = 0
    drawn: int = 0
    displays: int = 0


class News(msgspec.Struct, frozen=True, kw_only=True):
    """What has changed in a run since a page's last request.

    Args:
        snapshot: The newest snapshot, None when the page has it.
        updates: New lines.
        seq: The number of the last `NewLines`.
        lines: Lines of all ranks so far.
        displays: A counter that grows when a rank displays something or clears its output.
        final: Nothing will change any more.
    """

    snapshot: Snapshot | None
    updates: tuple[NewLines, ...]
    seq: int
    lines: int
    displays: int
    final: bool

    def is_new(self, known: Known) -> bool:
        """Whether there is something that the page does not have."""
        return bool(self.snapshot or self.updates or self.final or self.displays != known.displays)


class Follower:
    """One run, folded from its events. Thread-safe.

    Methods may block, and raise `RunNotHere` when the run's directory no longer exists.

    Args:
        location: Where the run is.
        output_limit: The setting `output_limit`.

    Attributes:
        location: Where the run is.
        turn: Serializes the requests for its news; used on the server's event loop only.
        asked_at: When it was last requested, by the clock of `Followers`.
    """

    def __init__(self, location: RunLocation, output_limit: int) -> None:
        self.spec = spec = location.spec
        self.turn = asyncio.Lock()
        self.asked_at = 0.0
        self.location = location
        self._view = RunView(spec, output_limit, location.pool, error_follows=True)
        self._view.directory = str(location.directory) if location.bring is None else ""
        self._feed = Feed(self._view)
        logs = LogReader(location.directory, location.bring)
        self._answers = Answers(self._view, self._feed, logs, location.cancel, location.end_session, location.stacks)
        self._file = EventFile(location.directory)
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._seq = 0
        self._displays = 0
        self._returns = True
        self._phases = RunPhases(spec.submitted_at)
        self._started_at: float | None = None
        if spec.detach:
            self._note_detached(spec.submitted_at)

    @property
    def is_final(self) -> bool:
        return self._view.is_final

    def update(self, known: Known) -> News:
        """Return what a page does not have yet."""
        with self._lock:
            self._catch_up()
            snapshot = self._snapshot if self._snapshot and self._snapshot.seq > known.drawn else None
            lines = self._feed.since(known.lines)
            new = (msgspec.structs.replace(lines, seq=known.after + 1),) if lines is not None else ()
            # the end is reported together with its snapshot
            final = self.is_final and self._snapshot is not None and self._snapshot.final
            total = sum(lines.ranks) if lines is not None else known.lines
            seq, displays = known.after + len(new), self._displays
            return News(snapshot=snapshot, updates=new, seq=seq, lines=total, displays=displays, final=final)

    def answer(self, question: Question) -> Answer:
        """Answer a view's request."""
        with self._lock:
            self._catch_up()
        return self._answers.answer(question)

    def outputs(self) -> list[Output] | None:
        """Return the final outputs of the run's cell, None while the run is active."""
        with self._lock:
            self._catch_up()
            return cell_outputs(self._view, self.location.directory, returns=self._returns) if self.is_final else None

    def page(self) -> RunPage:
        """Return what the run's page shows beside its live view, without the differences of its environment."""
        with self._lock:
            self._catch_up()
            page = run_page(self._view, self._phases, self._started_at)
            tracked, progress = self._view.tracked, load_progress(self.location.directory)
        # without the lock: it starts processes
        mlflow = page_mlflow(tracked, progress, self.location)
        return msgspec.structs.replace(page, mlflow=mlflow)

    def tracked(self) -> TrackedRun | None:
        """Return the run's MLflow run; None if it is not tracked, or not yet."""
        with self._lock:
            self._catch_up()
            progress = load_progress(self.location.directory)
            return mlflow_run(self._view.tracked, progress)

    def displays(self) -> list[Output]:
        """Return what the ranks have displayed so far, to be shown below a live view."""
        with self._lock:
            self._catch_up()
            return [_rich(self._view, part) for part in segments(self._view) if not isinstance(part, TextSegment)]

    # ------------------------------------------------------------ called with the lock held

    def _catch_up(self) -> None:
        if not self.is_final:
            self._read()
        if not self.is_final and self.location.bring is not None:
            self.location.bring_events(self._file.taken_bytes)
            self._view.set_silence(self.location.silence)
            self._read()
        if not self.is_final:
            self._end_if_lost()
        self._snapshot = self._feed.snapshot(time.monotonic()) or self._snapshot

    def _read(self) -> None:
        try:
            for event, frames in self._file.new_events():
                self._apply(event, frames)
                if self.is_final:
                    # as in the notebook: events after the end are ignored
                    return
        except FileNotFoundError:
            # a remote run's files may not have been fetched yet
            if self.location.bring is None:
                raise _not_here(self.spec.run_id) from None

    def _apply(self, event: Event, frames: Sequence[bytes]) -> None:
        self._seq = event.seq
        if isinstance(event.body, Detached):
            self._note_detached(event.at)
        self._view.apply(event, frames)
        self._phases.apply(event)
        if isinstance(event.body, RanksStarted):
            self._started_at = event.at
        if isinstance(event.body, DisplayPublished | OutputCleared):
            self._displays += 1

    def _note_detached(self, at: float) -> None:
        self._returns = False
        text = f"it continues without its notebook; %sgpu_attach {short(self.spec.run_id)} fetches what it returns"
        self._view.apply(self._event(Noted(text=text), at))

    def _end_if_lost(self) -> None:
        """End the run here, as its notebook would, when no process can be working on it any more."""
        if message := self.location.loss_reason():
            self._read()
        if message and not self.is_final:
            failure = Failure(kind=FailureKind.NODE_LOST, message=message, at=time.time())
            self._apply(self._event(self._view.times.fail(failure), time.time()), ())

    def _event(self, body: EventBody, at: float) -> Event:
        return Event(run_id=self.spec.run_id, seq=self._seq + 1, at=at, body=body)


class Followers:
    """The runs that pages show. Thread-safe.

    Args:
        settings: Settings, for the runs of this machine's pool.
        remote_pools: The runs in remote pools.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self, settings: Settings, remote_pools: RemotePools, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._remote_pools = remote_pools
        self._clock = clock
        self._lock = threading.Lock()
        self._followers: dict[str, Follower] = {}

    def get(self, run_id: str) -> Follower:
        """Return a run's follower; a new one has read only the run's spec.

        Raises:
            RunNotHere: The run is unknown on this machine.
        """
        follower = self._followers.get(run_id)
        # read files without the lock, which the event loop takes too
        made = self._new(run_id) if follower is None else follower
        with self._lock:
            follower = self._followers.setdefault(run_id, made)
            follower.asked_at = self._clock()
            return follower

    def page(self, follower: Follower) -> RunPage:
        """Return what a run's page shows beside its live view."""
        page = follower.page()
        if follower.location.bring is not None:
            # the records of its environment are at its pool
            return page
        return msgspec.structs.replace(page, environment=environment_changes(self._settings, follower.spec))

    def record_view(self, run_id: str) -> None:
        """Note that a page shows the run now."""
        with self._lock:
            if run_id in self._followers:
                self._followers[run_id].asked_at = self._clock()

    def drop_idle(self) -> None:
        """Drop the followers of runs that no page has requested for `IDLE_S`, and idle connections."""
        with self._lock:
            since = self._clock() - IDLE_S
            self._followers = {run_id: each for run_id, each in self._followers.items() if each.asked_at >= since}
        self._remote_pools.rest()

    def _new(self, run_id: str) -> Follower:
        location = run_here(self._settings, run_id) or self._remote_pools.run(run_id)
        if location is None:
            raise _not_here(run_id)
        return Follower(location, self._settings.output_limit)


def _not_here(run_id: str) -> RunNotHere:
    name = short(run_id) if is_valid_id(run_id) else repr(run_id[:40])
    return RunNotHere(
        f"this machine has no directory for run {name}: it is no longer kept, or it belongs to another machine or "
        "user than the Jupyter server's."
    )


# ---------------------------------------------------------------- the outputs of a run's cell


def cell_outputs(view: RunView, directory: Path, *, returns: bool = True) -> list[Output]:
    """Return the outputs of a run's cell in the notebook format, as its kernel would have left them.

    Args:
        view: The run; it has ended, or no process can be working on it any more.
        directory: The run's directory.
        returns: Include the cell's value or error; False for a detached run, whose cell gets neither.
    """
    parts = segments(view)
    end = last_text(parts)
    outputs: list[Output] = []
    for at, part in enumerate(parts):
        if not isinstance(part, TextSegment):
            outputs.append(_rich(view, part))
        elif (bundle := mime_bundle(view, part, at == 0, at == end))["text/html"]:
            outputs.append(_display(bundle, {}))
    # the cell that connected a session ended long ago
    if returns and view.ended is not None and view.session is None:
        outputs += _last_word(view, view.ended, directory)
    return outputs


def _rich(view: RunView, part: Caption | ShownDisplay) -> Output:
    if isinstance(part, Caption):
        return _display(caption_bundle(part), {})
    return _display(view.models.static(part.item.rank, part.item.bundle), part.item.metadata)


def _display(data: dict[str, object], metadata: dict[str, object]) -> Output:
    return {"output_type": "display_data", "data": data, "metadata": metadata}


def _last_word(view: RunView, ended: RunEnded, directory: Path) -> Sequence[Output]:
    """Return the cell's value or its error."""
    if ended.state is RunState.SUCCEEDED:
        if view.spec.kind is not RunKind.CELL:
            # a function's value is used by the cell's own code
            return ()
        # only the values' texts are needed
        result = RunResult(view.spec, ended, [None] * len(ended.results), directory, view_draws=True)
        if result.adds_nothing:
            return ()
        value: Output = {"output_type": "execute_result", "data": {"text/plain": repr(result)}, "metadata": {}}
        return (value | {"execution_count": view.spec.cell.execution_count},)
    failure = ended.failure
    if ended.state is RunState.CANCELLED:
        error = RunCancelled(cancelled_sentence(view.run_id, ended.reason), run_id=view.run_id)
        return (_error(error),)
    if failure is None:
        return ()
    parts = (last_part(failure.type_name), failure.message) if failure.kind is FailureKind.USER_CODE else ()
    return (_error(run_exception(view, ended, failure), *parts),)


def _error(error: BaseException, name: str = "", value: str | None = None) -> Output:
    name, text = name or type(error).__name__, str(error) if value is None else value
    draw: Callable[[], list[str]] | None = getattr(error, "_render_traceback_", None)
    lines = draw() if draw is not None else [f"{name}: {error}"]
    return {"output_type": "error", "ename": name, "evalue": text, "traceback": lines}
