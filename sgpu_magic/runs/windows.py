"""Runs shown while nobody waits for them: each by a thread whose outputs belong to the cell that opened it."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable

from sgpu_magic.runs import follow
from sgpu_magic.wire.states import RunState

_JOIN_S = 2.0


class RunWindows:
    """Views of runs that go on, which no cell waits for."""

    def __init__(self) -> None:
        self._open: dict[str, Background] = {}

    def open(self, followed: follow.Followed, state: RunState, live: bool) -> None:
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
                follow.replay(followed, state)
            finally:
                followed.run.close()

    def close(self) -> None:
        """Show none of them any further."""
        windows, self._open = self._open, {}
        for window in windows.values():
            window.stop()


def _follow(followed: follow.Followed, state: RunState, stopped: threading.Event) -> None:
    try:
        follow.show(followed, state, stopped)
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
