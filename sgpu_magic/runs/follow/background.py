"""Runs followed in the background: by a program that goes on, and by views whose cell is over."""

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

# a run that has ended has its kept events sent at once; looked at so often
_LOOK_S = 0.25
_JOIN_S = 2.0


class _Entry(msgspec.Struct):
    followed: Followed
    ended: Callable[[Ending | None], None]
    until: float | None


class Follower:
    """Folds the events of runs that nobody waits for. Its thread is there only while there are such runs.

    What has ended is handed over by a thread for each run.
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
            ended: Called in a thread of its own with the run's last word; with None when it is followed no further.
            has_ended: The run is over already: its kept events come at once, or never.
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
        """The runs that are followed now."""
        with self._lock:
            return [entry.followed for entry in self._entries]

    def close(self) -> None:
        """Follow none of them any further."""
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
            # nothing wakes this thread when a link to another machine has fallen silent
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
            # it unpickles what came back, and may fetch it from another machine: the other runs do not wait for that
            work = threading.Thread(target=entry.ended, args=(ending,), name="sgpu-ended", daemon=True)
            work.start()

    def _remove(self, entry: _Entry) -> bool:
        with self._lock:
            if entry not in self._entries:
                # closed meanwhile, which has told it
                return False
            self._entries.remove(entry)
            return True


class RunWindows:
    """Views of runs that go on, which no cell waits for."""

    def __init__(self) -> None:
        self._open: dict[str, Background] = {}

    def open(self, followed: Followed, state: RunState, live: bool) -> None:
        """Show a run; the cell does not wait for its end.

        Args:
            followed: The run, attached to. It is closed here.
            state: Its state when it was attached to.
            live: Follow it while it goes on; else what it has done so far is shown once.
        """
        if live and not state.is_final:
            self._open = {run_id: window for run_id, window in self._open.items() if window.is_alive}
            # one that stands below an earlier cell shows no more: each asked again would be a thread more
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
        """Show none of them any further."""
        windows, self._open = self._open, {}
        for window in windows.values():
            window.stop()


def _follow(followed: Followed, state: RunState, stopped: threading.Event) -> None:
    try:
        outcome.show(followed, state, stopped)
    finally:
        followed.run.close()


class Background:
    """A thread whose outputs belong to the cell that has started it.

    Args:
        name: The thread's.
        work: Is given the event that ends it.
    """

    def __init__(self, name: str, work: Callable[[threading.Event], None]) -> None:
        self._stopped = threading.Event()
        # with the cell's context: ipykernel keeps there which cell an output belongs to
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(work, self._stopped), name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """End it; one that waits for a pool's answer ends when that has come, and shows nothing more."""
        self._stopped.set()
        self._thread.join(_JOIN_S)
