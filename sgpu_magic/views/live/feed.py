"""Updates for a front end, at most 10 a second, and replies to its requests; no message exceeds 64 kB."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from sgpu_magic.views.fold import RunView
from sgpu_magic.views.live.log_index import Piece, RecentLines
from sgpu_magic.views.live.messages import (
    HelloAnswer,
    NewLines,
)
from sgpu_magic.views.live.schema import HoldingSession, Snapshot
from sgpu_magic.views.live.snapshot import snapshot_of
from sgpu_magic.views.units import steady_time

_WINDOW_S = 1.0
_MAX_MESSAGES = 10
# lines leave room in each second for a snapshot and a change of state
_LINES_EVERY_S = 0.125
_SNAPSHOT_EVERY_S = 1.0


class Feed:
    """The updates for a run's front end.

    One thread owns the view: it applies events and calls `updates` and `snapshot`. Any thread may call the others,
    which read only data protected by the log's lock, never the view.

    Args:
        view: The run, before any event was applied.
        clock: Returns the time by the views' clock.
    """

    def __init__(self, view: RunView, clock: Callable[[], float] = steady_time) -> None:
        self._view = view
        self._clock = clock
        self._recent = view.log = RecentLines(view.ranks)
        self._order, self._lock = self._recent.order, self._recent.lock
        self._seq = 0
        self._sent_total = 0
        self._sent_ranks: tuple[int, ...] = (0,) * view.ranks
        self._lines_at = float("-inf")
        self._sent: deque[float] = deque()
        self._snapshot_at = float("-inf")
        self._state_sent: tuple[int, object] = (-1, None)
        self._made_at = clock()
        self._latest = snapshot_of(view, 1, self._sent_ranks, self._made_at)

    # ------------------------------------------------------------ the thread that owns the view

    def updates(self, now: float) -> list[NewLines]:
        """Return the updates to send now: one message of new lines, or nothing.

        Args:
            now: Monotonic time in seconds.
        """
        if now < self._lines_at + _LINES_EVERY_S or not self._may_send(now):
            return []
        with self._lock:
            if self._order.total == self._sent_total:
                return []
            self._seq += 1
            message = self._new_lines(self._sent_total)
            self._sent_total, self._sent_ranks = self._order.total, message.ranks
        self._lines_at = now
        self._sent.append(now)
        return [message]

    def snapshot(self, now: float) -> Snapshot | None:
        """Return the snapshot to send now; None when nothing has changed or it is too early.

        Args:
            now: Monotonic time in seconds.
        """
        state = (self._view.version, _stage(self._view))
        is_early = state[1] == self._state_sent[1] and now < self._snapshot_at + _SNAPSHOT_EVERY_S
        if state == self._state_sent or is_early or not self._may_send(now):
            return None
        self._state_sent, self._snapshot_at = state, now
        self._sent.append(now)
        made_at = self._clock()
        made = snapshot_of(self._view, 0, self._sent_ranks, made_at)
        with self._lock:
            self._made_at = made_at
            self._latest = msgspec.structs.replace(made, seq=self._latest.seq + 1, lines=self._lines_sent())
            return self._latest

    # ------------------------------------------------------------ any thread

    def hello(self, n: int) -> HelloAnswer:
        """Return the run's current state, for a view that opens."""
        with self._lock:
            made = self._latest
            passed = max(self._clock() - self._made_at, 0.0) if made.ticking else 0.0
            self._latest = msgspec.structs.replace(made, seq=made.seq + 1, lines=self._lines_sent())
            clock = "elapsed_s" if made.elapsed_s else "starting_s"
            later = {clock: round(getattr(made, clock) + passed, 3)}
            return HelloAnswer(n=n, snapshot=msgspec.structs.replace(self._latest, **later), seq=self._seq)

    def since(self, total: int) -> NewLines | None:
        """Return the lines after the first `total` of all ranks, for a page that polls; None when there are none."""
        with self._lock:
            return self._new_lines(total) if total < self._order.total else None

    def locate(self, first: int, count: int) -> list[Piece]:
        """Return which lines of which ranks are the `count` lines from number `first` among all lines."""
        with self._lock:
            return self._order.locate(first, count)

    def is_stderr(self, rank: int, line: int) -> bool:
        """Return whether a rank has written a line of its log to stderr."""
        with self._lock:
            return self._order.streams.is_stderr(rank, line)

    def numbers_of(self, rank: int, lines: Sequence[int]) -> list[int]:
        """Return the numbers among all lines of a rank's lines, which are given in ascending order."""
        with self._lock:
            return self._order.numbers_of(rank, lines)

    @property
    def totals(self) -> tuple[int, ...]:
        """Number of lines in each rank's log."""
        with self._lock:
            return tuple(self._order.totals)

    @property
    def own_sessions(self) -> tuple[HoldingSession, ...]:
        """As in the last snapshot."""
        with self._lock:
            return self._latest.own_sessions

    # ------------------------------------------------------------ internals

    def _new_lines(self, total: int) -> NewLines:
        first, rows = self._recent.rows_since(total)
        return NewLines(seq=self._seq, first=first, rows=tuple(rows), ranks=tuple(self._order.totals))

    def _lines_sent(self) -> tuple[int, ...]:
        """Return the numbers of lines for a snapshot: those sent so far; all lines if none were sent yet."""
        if not self._seq:
            self._sent_total, self._sent_ranks = self._order.total, tuple(self._order.totals)
        return self._sent_ranks

    def _may_send(self, now: float) -> bool:
        while self._sent and self._sent[0] <= now - _WINDOW_S:
            self._sent.popleft()
        return len(self._sent) < _MAX_MESSAGES


def _stage(view: RunView) -> object:
    """Return the values whose change triggers a snapshot at once."""
    return (
        view.state, view.is_final, view.left, view.attempt, view.lease is not None, view.stalled is not None,
        view.warm, view.position, view.waiting_for, view.reason, len(view.rank_failures),
        view.session and (view.session.running, view.session.dead),
    )  # fmt: skip
