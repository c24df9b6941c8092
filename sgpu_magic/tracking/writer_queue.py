"""Schedules the runs of one store: about once a second each, with back-off after errors, immediately when urgent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from sgpu_magic.config import Settings
from sgpu_magic.tracking.client import StoreTroubled, TrackingStore
from sgpu_magic.tracking.writer import Busy, RunWriter
from sgpu_magic.wire.base import short
from sgpu_magic.wire.tracking import (
    FromTracker,
    Track,
    TrackerRests,
    Tracking,
    TrackingDone,
    TrackingStarted,
    TrackingTroubled,
)

INTERVAL_S = 1.0
IDLE_S = 60.0
# with a session connected; longer, because a cell that uses MLflow then waits for a new process to import it
QUIET_S = 300.0
_FIRST_RETRY_S = 2.0
_LAST_RETRY_S = 60.0
_MAX_REST_S = 0.2
# due time of a run that a rank waits for
_AT_ONCE = 0.0


class WriterQueue:
    """Runs the writers' steps in turn.

    Args:
        settings: The pool's settings.
        tracking: The store's URI and variables.
        send: Sends a message to the pool.
    """

    def __init__(self, settings: Settings, tracking: Tracking, send: Callable[[FromTracker], None]) -> None:
        self._settings = settings
        self._store = TrackingStore(settings, tracking)
        self._send = send
        self._runs: dict[str, RunWriter] = {}
        self._failures = 0
        self._down_until = 0.0
        self._why_down = ""
        self._used_at = time.monotonic()
        self._rest_until = 0.0

    @property
    def idle(self) -> bool:
        """Whether there was nothing to write for a minute, or only samples of idle sessions for five minutes."""
        quiet_s = time.monotonic() - self._used_at
        return quiet_s > (QUIET_S if self._runs else IDLE_S) and all(run.rests for run in self._runs.values())

    def track(self, order: Track) -> None:
        self._used_at = time.monotonic()
        if order.run_id not in self._runs:
            self._runs[order.run_id] = RunWriter(
                self._settings, self._store, Path(order.run_dir), order.tracking, order.parent_run
            )
        if order.urgent:
            self.hurry(order.run_id)

    def hurry(self, run_id: str) -> None:
        """Make a run due immediately, because a rank waits for its MLflow id."""
        run = self._runs.get(run_id)
        if run is not None and not run.announced:
            run.due = _AT_ONCE

    def finish_run(self, run_id: str) -> None:
        run = self._runs.get(run_id)
        if run is not None:
            run.log_complete = True

    def wait_s(self) -> float:
        """Return the seconds until a step is due."""
        now = time.monotonic()
        if not self._runs:
            return max(0.0, IDLE_S - (now - self._used_at)) + 0.1
        due = min(run.due for run in self._runs.values())
        return max(0.0, due - now) if due == _AT_ONCE else max(0.0, max(due, self._rest_until) - now)

    def step(self) -> None:
        """Run the step that is due first, if any."""
        run = min(self._runs.values(), key=lambda run: run.due, default=None)
        now = time.monotonic()
        if run is None or run.due > now:
            return
        if not run.rests:
            self._used_at = now
        if now < self._down_until:
            self._trouble(run, self._why_down)
            run.due = self._down_until
            return
        self._take_step(run)
        # with many short cells in a row, use at most half a core
        ended = time.monotonic()
        self._rest_until = ended + min(ended - now, _MAX_REST_S)

    def rest(self) -> None:
        """Tell the pool if sessions are left, and delete removed runs from the default store. Call it when idle."""
        if self._runs:
            self._send(TrackerRests(run_ids=tuple(self._runs)))
        if self._store.is_default and not self._settings.keep_tracked:
            # the next process tries again
            with contextlib.suppress(StoreTroubled):
                self._store.prune()

    def close(self) -> None:
        """Write what is left, once. The inbox kills the process if this takes too long."""
        for run in list(self._runs.values()):
            if time.monotonic() < self._down_until:
                return
            self._take_step(run)

    def _take_step(self, run: RunWriter) -> None:
        try:
            more = run.step()
        except Busy:
            run.due = time.monotonic() + INTERVAL_S
            if not run.directory.is_dir():
                self._on_run_done(run)
        except StoreTroubled as trouble:
            self._failed(run, str(trouble), unreachable=trouble.unreachable)
        except OSError as error:
            self._failed(run, f"{error.strerror or error} ({run.directory})", unreachable=False)
        else:
            self._failures = run.failures = 0
            self._announce(run)
            run.due = time.monotonic() + (0.0 if more else INTERVAL_S)
            if run.progress.complete:
                if run.progress.problem:
                    self._report(run, run.progress.problem)
                self._on_run_done(run)

    def _announce(self, run: RunWriter) -> None:
        tracked = run.progress.tracked
        if tracked is not None and not run.announced:
            run.announced = True
            self._send(TrackingStarted(run_id=run.run_id, tracked=tracked))

    def _on_run_done(self, run: RunWriter) -> None:
        del self._runs[run.run_id]
        complete = run.progress.complete and not run.progress.problem
        self._send(TrackingDone(run_id=run.run_id, complete=complete))

    def _failed(self, run: RunWriter, text: str, *, unreachable: bool) -> None:
        now = time.monotonic()
        self._announce(run)
        run.failures += 1
        run.due = now + _pause_s(run.failures)
        if unreachable:
            self._failures += 1
            self._why_down = text
            self._down_until = run.due = now + _pause_s(self._failures)
        self._trouble(run, text)

    def _trouble(self, run: RunWriter, text: str) -> None:
        try:
            run.trouble(text)
        except OSError as error:
            text = f"{text} ({error.strerror})"
        self._report(run, text)

    def _report(self, run: RunWriter, text: str) -> None:
        if run.trouble_reported:
            return
        run.trouble_reported = True
        where = self._store.uri or "the default store"
        if run.progress.complete:
            warning = f"the run is no longer tracked: {where} says {text}"
        else:
            warning = (
                f"tracking at {where} does not work: {text}. The run continues; what is not written is kept and sent "
                f"when tracking works again, or by `sgpu sync {short(run.run_id)}`"
            )
        self._send(TrackingTroubled(run_id=run.run_id, text=warning))


def _pause_s(failures: int) -> float:
    return min(_LAST_RETRY_S, _FIRST_RETRY_S * 2 ** min(failures - 1, 10))
