"""Follows runs in the background: for programs that continue meanwhile, and for views whose cell has finished."""

from __future__ import annotations

import contextvars
import threading
import time
import traceback
from collections.abc import Callable

import msgspec

from sgpu_magic.runs.follow import outcome, run_loop
from sgpu_magic.runs.follow.run_loop import Ending, Followed
from sgpu_magic.wire.states import RunState

# interval to check runs that had already ended, whose stored events arrive at once, and silent links
_LOOK_S = 0.25
_JOIN_S = 2.0


class _Entry(msgspec.Struct):
    followed: Followed
    ended: Callable[[Ending | None], None]
    until: float | None


class Follower:
    """Processes the events of runs that no one waits for, in a thread that exists only while there are such runs.

    The end of each run is delivered in a thread of its own.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, followed: Followed, ended: Callable[[Ending | None], None], *, has_ended: bool = False) -> None:
        """Follow a run to its end.

        Args:
            followed: The run.
            ended: Called in a thread of its own with the run's final event, or with None when the follower is closed.
            has_ended: The run has already ended: its stored events arrive at once, or never.
        """
        until = time.monotonic() + run_loop.HISTORY_PATIENCE_S if has_ended else None
        with self._lock:
            closed = self._closed
            if not closed:
                self._entries.append(_Entry(followed, ended, until))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="sgpu-runs", daemon=True)
                    self._thread.start()
        if closed:
            ended(None)
            return
        followed.run.wake(self._woken.set)

    @property
    def following(self) -> list[Followed]:
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
            thread.join(_JOIN_S)
        for entry in entries:
            entry.ended(None)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._entries:
                    self._thread = None
                    return
                entries = list(self._entries)
            # a silent link to a remote pool does not wake this thread
            looks = any(entry.until is not None or entry.followed.run.mirror is not None for entry in entries)
            self._woken.wait(_LOOK_S if looks else None)
            self._woken.clear()
            for entry in entries:
                try:
                    self._look_at(entry)
                except Exception:  # noqa: BLE001  a thread's top; the other runs go on
                    traceback.print_exc()

    def _look_at(self, entry: _Entry) -> None:
        ending = run_loop.advance(entry.followed)
        if ending is None and entry.until is not None and time.monotonic() > entry.until:
            ending = run_loop.without_an_end(entry.followed)
        if ending is not None and self._remove(entry):
            # in a thread, because it unpickles results and may fetch them from a remote pool
            work = threading.Thread(target=entry.ended, args=(ending,), name="sgpu-ended", daemon=True)
            work.start()

    def _remove(self, entry: _Entry) -> bool:
        with self._lock:
            if entry not in self._entries:
                # closed meanwhile, and `close` has called `ended`
                return False
            self._entries.remove(entry)
            return True


class RunWindows:
    """Views of active runs that no cell waits for."""

    def __init__(self) -> None:
        self._open: dict[str, Background] = {}

    def open(self, followed: Followed, state: RunState, live: bool) -> None:
        """Show a run without waiting for its end.

        Args:
            followed: The run, which this process attached to. It is closed here.
            state: The run's state when this process attached to it.
            live: Keep the view up to date while the run is active; otherwise show its events so far once.
        """
        if live and not state.is_final:
            self._open = {run_id: window for run_id, window in self._open.items() if window.is_alive}
            # stop the run's view below an earlier cell, so that there is one thread per run
            earlier = self._open.pop(followed.run.run_id, None)
            if earlier is not None:
                earlier.stop()
            work = Background("sgpu-view", lambda stopped: _follow(followed, state, stopped))
            self._open[followed.run.run_id] = work
        else:
            try:
                outcome.replay(followed, state)
            finally:
                followed.run.close()

    def close(self) -> None:
        """Stop updating all views."""
        windows, self._open = self._open, {}
        for window in windows.values():
            window.stop()


def _follow(followed: Followed, state: RunState, stopped: threading.Event) -> None:
    try:
        outcome.show(followed, state, stopped)
    finally:
        followed.run.close()


class Background:
    """A thread whose outputs appear below the cell that started it.

    Args:
        name: The thread's name.
        work: The function to run; takes an event that is set to stop it.
    """

    def __init__(self, name: str, work: Callable[[threading.Event], None]) -> None:
        self._stopped = threading.Event()
        # with the cell's context, where ipykernel keeps the cell that outputs belong to
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(work, self._stopped), name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop the thread. If it waits for a pool's reply, it ends after the reply and shows nothing more."""
        self._stopped.set()
        self._thread.join(_JOIN_S)
