"""The loop that processes and shows events until a run ends, also across restarts of its pool: for one run or many."""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence

import msgspec

from sgpu_magic.client.pool import Pool
from sgpu_magic.client.run import ClientRun
from sgpu_magic.errors import CapacityError, KeyRefused, PoolError, PoolVersionError, RunUnknown, SgpuError
from sgpu_magic.runs.notices import JOIN_S
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.publisher import Publisher
from sgpu_magic.wire.base import FailureKind, short
from sgpu_magic.wire.events import Detached, Event, RunEnded
from sgpu_magic.wire.option_text import Text, TextWithOptions, text_of
from sgpu_magic.wire.rank_events import Failure, Sampled

Ending = tuple[RunEnded, Sequence[bytes]]
"""A run's final event, with its raw frames."""

OnEnd = Callable[[RunView], None]
"""Called when this process is done with a run."""

_TICK_S = 0.05
# with no events but samples, the view changes slowly, and every wake-up takes CPU time from the ranks
_IDLE_TICK_S = 0.25
_LIVELY_S = 0.5
# how long to look for, or start, the successor of a dead pool service
_FIND_PATIENCE_S = 20.0
_FIND_PAUSE_S = 0.1
# the stored events of an ended run arrive at once
HISTORY_PATIENCE_S = 5.0
_BATCH = 64
# interval to check runs that had already ended, whose stored events arrive at once, and silent links
_POLL_S = 0.25


class Subscription(msgspec.Struct, frozen=True):
    """A run with its view, publisher and pool.

    Args:
        run: The run.
        view: The state built from its events.
        publisher: Shows the view.
        pool: The run's pool, which finds its next service if one dies.
        on_event: Called after each event.
        on_end: Called once with the final event, unless the run was detached before.
    """

    run: ClientRun
    view: RunView
    publisher: Publisher
    pool: Pool
    on_event: Callable[[], None] | None = None
    on_end: Callable[[RunView, RunEnded], None] | None = None

    def on_link_change(self) -> None:
        """Show or clear the note that a remote pool is silent."""
        silent_s = self.run.link.transport.silent_s
        if silent_s and not self.view.silence:
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent_s))
            self.view.set_silence(
                f"reconnecting: {self.run.link.title} has been silent since {since}; the run continues there, and the "
                "view catches up when the link is back"
            )
        elif not silent_s:
            self.view.set_silence("")

    def next_event(self, patience_s: float = 0.0) -> tuple[Event, Sequence[bytes]] | None:
        """Wait for the next event and apply it to the view; None on timeout."""
        if (item := self.run.next_event(patience_s)) is not None:
            self.apply(*item)
        return item

    def apply(self, event: Event, frames: Sequence[bytes]) -> None:
        """Apply an event to the view."""
        self.view.apply(event, frames)
        if isinstance(event.body, RunEnded):
            self.pool.on_run_ended(event.run_id, event.body.state, event.at)
            if self.on_end is not None and not self.view.is_detached:
                self.on_end(self.view, event.body)
        if self.on_event is not None:
            self.on_event()


def follow(
    followed: Subscription,
    *,
    until_detached: bool = False,
    has_ended: bool = False,
    until: float = math.inf,
    stopped: threading.Event | None = None,
    lost: Callable[[Subscription], Ending | None] | None = None,
) -> Ending | None:
    """Process a run's events and show them until it ends.

    Args:
        followed: The run.
        until_detached: Also return when the run is detached.
        has_ended: The run has already ended: its stored events arrive at once, or never.
        until: Latest time to return, by the monotonic clock.
        stopped: Return when it is set.
        lost: Called while the run's pool service is gone. Default: `find_again`.

    Returns:
        The run's final event; None if it returned for another reason.
    """
    run = followed.run
    received_at = noted_at = time.monotonic()
    while (now := time.monotonic()) < until and (stopped is None or not stopped.is_set()):
        patience_s = min(_TICK_S if now - noted_at < _LIVELY_S else _IDLE_TICK_S, until - now)
        for turn in range(_BATCH):
            if (item := followed.next_event(0 if turn else patience_s)) is None:
                break
            received_at = time.monotonic()
            body = item[0].body
            if not isinstance(body, Sampled):
                noted_at = received_at
            if isinstance(body, RunEnded):
                return body, item[1]
            if until_detached and isinstance(body, Detached):
                return None
        if run.is_lost:
            if (ending := find_end(followed) or (lost or find_again)(followed)) is not None:
                return ending
            received_at = time.monotonic()
        followed.on_link_change()
        if has_ended and time.monotonic() - received_at > HISTORY_PATIENCE_S:
            return without_an_end(followed)
        followed.publisher.tick(time.monotonic())
    return None


def find_end(followed: Subscription) -> Ending | None:
    """Process the queued events, including those of a lost pool service; return the final event if it is among them."""
    while (item := followed.next_event()) is not None:
        if isinstance(item[0].body, RunEnded):
            return item[0].body, item[1]
    return None


def without_an_end(followed: Subscription) -> Ending:
    """Return a substitute for the final event of an ended run whose last events were not kept."""
    run = followed.run
    where = f"is in {run.directory}" if run.mirror is None else f"is shown by `sgpu logs {short(run.run_id)}`"
    return _end_as_lost(followed, f"its last events were not kept; its ranks' output {where}")


def find_again(followed: Subscription) -> Ending | None:
    """Attach to the run through its next pool service; return a final event if that is not possible."""
    run = followed.run
    died = f"{run.source} ended while the run was active"
    deadline = time.monotonic() + _FIND_PATIENCE_S
    while True:
        try:
            followed.pool.find_again(run)
            return None
        except (RunUnknown, PoolVersionError) as error:
            message = f"{died}, and the run with it: {error.message.rstrip('.')}. Run the cell again"
            return _end_as_lost(followed, message)
        except KeyRefused as error:
            return _end_as_lost(followed, f"this notebook can no longer follow the run: {error.message}")
        except PoolError as error:
            if time.monotonic() > deadline:
                return _end_as_lost(followed, f"{died}, and no other could be reached: {error.message.rstrip('.')}")
        except SgpuError as error:
            # the run was still queued, and the next service rejects it
            kind = FailureKind.CAPACITY if isinstance(error, CapacityError) else FailureKind.NODE_LOST
            return _end_as_lost(followed, text_of(f"{died}; submitted again, it was refused: ", error.text), kind)
        followed.publisher.tick(time.monotonic())
        time.sleep(_FIND_PAUSE_S)


def _end_as_lost(followed: Subscription, message: Text, kind: FailureKind = FailureKind.NODE_LOST) -> Ending:
    run = followed.run
    followed.pool.give_payload_up(run.run_id)
    text = message if isinstance(message, TextWithOptions) else None
    ended = followed.view.times.fail(Failure(kind=kind, message=str(message), text=text, at=time.time()))
    followed.apply(Event(run_id=run.run_id, seq=run.last_seq + 1, at=time.time(), body=ended), ())
    return ended, ()


# ---------------------------------------------------------------- many runs in one thread


class _Entry(msgspec.Struct):
    followed: Subscription
    ended: Callable[[Ending | None], None]
    until: float | None


class EventPump:
    """Processes the events of runs that no one waits for, in a thread that exists only while there are such runs.

    The end of each run is delivered in a thread of its own.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, followed: Subscription, ended: Callable[[Ending | None], None], *, has_ended: bool = False) -> None:
        """Follow a run to its end.

        Args:
            followed: The run.
            ended: Called in a thread of its own with the run's final event, or with None when the follower is closed.
            has_ended: The run has already ended: its stored events arrive at once, or never.
        """
        until = time.monotonic() + HISTORY_PATIENCE_S if has_ended else None
        with self._lock:
            if not self._closed:
                self._entries.append(_Entry(followed, ended, until))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="sgpu-runs", daemon=True)
                    self._thread.start()
                followed.run.wake(self._woken.set)
                return
        ended(None)

    @property
    def following(self) -> list[Subscription]:
        """The runs that are being followed."""
        with self._lock:
            return [entry.followed for entry in self._entries]

    def close(self) -> None:
        """Stop following all runs."""
        with self._lock:
            self._closed = True
            thread, entries, self._entries = self._thread, self._entries, []
        self._woken.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_S)
        for entry in entries:
            entry.ended(None)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._entries:
                    self._thread = None
                    return
                # a silent link to a remote pool does not wake this thread
                polls = any(entry.until is not None or entry.followed.run.mirror is not None for entry in self._entries)
            self._woken.wait(_POLL_S if polls else None)
            self._woken.clear()
            with self._lock:
                # copied after the wait: the wake-up may come from a run that was added meanwhile
                entries = list(self._entries)
            for entry in entries:
                try:
                    self._check(entry)
                except Exception:  # noqa: BLE001  a thread's top; the other runs go on
                    traceback.print_exc()

    def _check(self, entry: _Entry) -> None:
        """Process a run's queued events; blocks only while its pool service has died and the next one is looked for."""
        followed = entry.followed
        if (ending := find_end(followed)) is None:
            followed.on_link_change()
            if followed.run.is_lost:
                ending = find_end(followed) or find_again(followed)
        if ending is None and entry.until is not None and time.monotonic() > entry.until:
            ending = without_an_end(followed)
        with self._lock:
            # if closed meanwhile, `close` has called `ended`
            if ending is None or entry not in self._entries:
                return
            self._entries.remove(entry)
        # in a thread, because it unpickles results and may fetch them from a remote pool
        threading.Thread(target=entry.ended, args=(ending,), name="sgpu-ended", daemon=True).start()
