"""Runs as the server sees them: each folded once from its events, for all pages that look at it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.server.outputs import Output, cell_outputs, rich_outputs
from sgpu_magic.server.run_places import Elsewhere, RunPlace, run_here
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.live.feed import Answers, Feed
from sgpu_magic.views.live.log_reader import LogReader
from sgpu_magic.views.live.messages import Answer, NewLines, Question
from sgpu_magic.views.live.schema import Snapshot
from sgpu_magic.wire.events import Detached, Event, EventBody, Noted, RunEnded
from sgpu_magic.wire.failures import Failure
from sgpu_magic.wire.rank_events import DisplayPublished, OutputCleared
from sgpu_magic.wire.record import is_valid_id, short
from sgpu_magic.wire.states import FailureKind, RunState

IDLE_S = 60.0
"""A run that nobody has asked about for so long is forgotten; its directory still has it."""


class RunNotHere(Exception):
    """This machine knows no such run; the text says so to a person."""


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What a page knows of a run.

    Args:
        after: The number of the last `NewLines` it was told.
        lines: Lines of all ranks it was told.
        drawn: The number of the last snapshot it was told.
        displays: As in `News`.
    """

    after: int = 0
    lines: int = 0
    drawn: int = 0
    displays: int = 0


class News(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of a run to a page.

    Args:
        snapshot: The newest, None when the page has it.
        told: New lines.
        seq: The number of the last `NewLines`.
        lines: Lines of all ranks so far.
        displays: Grows when a rank displays something or takes it away.
        final: Nothing changes any more.
    """

    snapshot: Snapshot | None
    told: tuple[NewLines, ...]
    seq: int
    lines: int
    displays: int
    final: bool

    def is_new(self, known: Known) -> bool:
        """Whether there is something that a page does not know."""
        return bool(self.snapshot or self.told or self.final or self.displays != known.displays)


class Follower:
    """One run, folded from its events. Methods may be called by any thread, and may block.

    Args:
        place: Where it is.
        output_limit: As in the settings.

    Attributes:
        turn: What the requests for its news take turns by; for the server's loop alone.
        asked_at: When somebody asked about it last, by the clock of `Followers`.
    """

    def __init__(self, place: RunPlace, output_limit: int) -> None:
        self.spec = spec = place.spec
        self.turn = asyncio.Lock()
        self.asked_at = 0.0
        self._place = place
        self._view = RunView(spec, output_limit, place.pool, error_follows=True)
        self._view.directory = str(place.directory) if place.bring is None else ""
        self._feed = Feed(self._view)
        logs = LogReader(place.directory, place.bring)
        self._answers = Answers(self._view, self._feed, logs, place.cancel, place.stacks)
        self._file = EventFile(place.directory)
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._seq = 0
        self._displays = 0
        self._returns = True
        if spec.detach:
            self._note_detached(spec.submitted_at)

    @property
    def is_final(self) -> bool:
        return self._view.is_final

    def news(self, known: Known) -> News:
        """Return what a page does not know yet.

        Raises:
            RunNotHere: The run's directory has gone.
        """
        with self._lock:
            self._catch_up()
            snapshot = self._snapshot if self._snapshot and self._snapshot.seq > known.drawn else None
            lines = self._feed.since(known.lines)
            told = (msgspec.structs.replace(lines, seq=known.after + 1),) if lines is not None else ()
            # the picture of the end comes with the end
            final = self.is_final and self._snapshot is not None and self._snapshot.final
            total = sum(lines.ranks) if lines is not None else known.lines
            return News(
                snapshot=snapshot,
                told=told,
                seq=known.after + len(told),
                lines=total,
                displays=self._displays,
                final=final,
            )

    def answer(self, question: Question) -> Answer:
        """Answer a view's question.

        Raises:
            RunNotHere: The run's directory has gone.
        """
        with self._lock:
            self._catch_up()
        return self._answers.answer(question)

    def outputs(self) -> list[Output] | None:
        """Return what the run's cell shows at the end, None while it goes on.

        Raises:
            RunNotHere: The run's directory has gone.
        """
        with self._lock:
            self._catch_up()
            return cell_outputs(self._view, self._place.directory, returns=self._returns) if self.is_final else None

    def displays(self) -> list[Output]:
        """Return what the ranks have displayed so far.

        Raises:
            RunNotHere: The run's directory has gone.
        """
        with self._lock:
            self._catch_up()
            return rich_outputs(self._view)

    # ------------------------------------------------------------ within, under the lock

    def _catch_up(self) -> None:
        if not self.is_final:
            self._read()
        if not self.is_final and self._place.bring is not None:
            self._place.bring_events(self._file.taken_bytes)
            self._view.not_heard(self._place.silence)
            self._read()
        if not self.is_final:
            self._end_if_lost()
        self._snapshot = self._feed.snapshot(time.monotonic()) or self._snapshot

    def _read(self) -> None:
        try:
            for event, frames in self._file.new_events():
                self._apply(event, frames)
                if self.is_final:
                    # as in the notebook: what comes after its end is not drawn
                    return
        except FileNotFoundError:
            # of a run elsewhere nothing was brought yet
            if self._place.bring is None:
                raise _not_here(self.spec.run_id) from None

    def _apply(self, event: Event, frames: Sequence[bytes]) -> None:
        self._seq = event.seq
        if isinstance(event.body, Detached):
            self._note_detached(event.at)
        self._view.apply(event, frames)
        if isinstance(event.body, DisplayPublished | OutputCleared):
            self._displays += 1

    def _note_detached(self, at: float) -> None:
        self._returns = False
        text = f"it goes on without its notebook; %sgpu_attach {short(self.spec.run_id)} brings what it returns"
        self._view.apply(self._event(Noted(text=text), at))

    def _end_if_lost(self) -> None:
        """A run that nobody is at any more says nothing: end it here as its notebook would."""
        message = self._place.lost()
        if not message:
            return
        self._read()
        if not self.is_final:
            failure = Failure(kind=FailureKind.NODE_LOST, message=message, at=time.time())
            elapsed = self._view.elapsed_s()
            ended = RunEnded(state=RunState.FAILED, failure=failure, running_s=elapsed, total_s=elapsed)
            self._apply(self._event(ended, time.time()), ())

    def _event(self, body: EventBody, at: float) -> Event:
        return Event(run_id=self.spec.run_id, seq=self._seq + 1, at=at, body=body)


class Followers:
    """The runs that somebody looks at. Methods may be called by any thread.

    Args:
        settings: Where the runs of this machine's own pool lie.
        elsewhere: Those in the pools of others.
        clock: Monotonic time in seconds.
    """

    def __init__(self, settings: Settings, elsewhere: Elsewhere, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._elsewhere = elsewhere
        self._clock = clock
        self._lock = threading.Lock()
        self._followers: dict[str, Follower] = {}

    def get(self, run_id: str) -> Follower:
        """Return the follower of a run; it reads nothing but what was submitted yet.

        Raises:
            RunNotHere: This machine knows no such run.
        """
        follower = self._followers.get(run_id)
        # files are read without the lock, which the server's loop takes too
        made = self._new(run_id) if follower is None else follower
        with self._lock:
            follower = self._followers.setdefault(run_id, made)
            follower.asked_at = self._clock()
            return follower

    def asked(self, run_id: str) -> None:
        """Somebody looks at it now."""
        with self._lock:
            if run_id in self._followers:
                self._followers[run_id].asked_at = self._clock()

    def drop_idle(self) -> None:
        """Forget the runs that nobody looks at any more."""
        with self._lock:
            since = self._clock() - IDLE_S
            self._followers = {run_id: each for run_id, each in self._followers.items() if each.asked_at >= since}
        self._elsewhere.rest()

    def _new(self, run_id: str) -> Follower:
        place = run_here(self._settings, run_id) or self._elsewhere.run(run_id)
        if place is None:
            raise _not_here(run_id)
        return Follower(place, self._settings.output_limit)


def _not_here(run_id: str) -> RunNotHere:
    shown = short(run_id) if is_valid_id(run_id) else repr(run_id[:40])
    return RunNotHere(
        f"this machine has no directory of a run {shown}: it is not kept any more, or it belongs to another machine or "
        "user than the Jupyter server."
    )
