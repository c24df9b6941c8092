"""`%sgpu_status`: the pool, kept up to date below its cell, and a run's view brought back without waiting for it."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextvars
import secrets
import threading
import time
from collections.abc import Callable

from sgpu_magic.client.pool import Pool
from sgpu_magic.errors import PoolError
from sgpu_magic.magics import follow
from sgpu_magic.protocol.messages import PoolStatus
from sgpu_magic.protocol.states import RunState
from sgpu_magic.render.status import status_html, status_text

INTERVAL_S = 1.0
# a pool whose driver answers slowly is asked less often: it spends a quarter of its time on us at most
_REST = 3.0
_JOIN_S = 2.0
Drawer = Callable[[PoolStatus, str], dict[str, str]]
"""Makes the output of what the pool said and a sentence about what is wrong, "" when nothing is."""

_POOL_ENDED = "the pool has ended; the next run starts it again"


class StatusBoard:
    """What `%sgpu_status` has shown last, brought up to date while runs go on or wait, and for a while after.

    Args:
        pool: What it shows.
        idle_s: Seconds for which it goes on to look when no run is there.
    """

    def __init__(self, pool: Pool, idle_s: float) -> None:
        self._pool = pool
        self._idle_s = idle_s
        self._background: _Background | None = None

    def show(self, live: bool) -> None:
        """Show the pool as an output of the cell that runs, and nowhere else any more.

        Args:
            live: Bring it up to date afterwards.
        """
        self.close()
        status = self._pool.status()
        if status is None:
            return
        display_id = f"sgpu-status-{secrets.token_hex(4)}"
        shown = self._drawn(status, "")
        _publish(shown, display_id, update=False)
        if live:
            watch = _StatusWatch(self._pool, self._drawn, display_id, status, self._idle_s)
            self._background = _Background("sgpu-status", watch.work)

    def text(self) -> str:
        """Return the pool as text, "" when it does not say."""
        status = self._pool.status()
        return "" if status is None else status_text(status, notice=self._pool.notice)

    def close(self) -> None:
        """What is shown stays as it is."""
        background, self._background = self._background, None
        if background is not None:
            background.stop()

    def _drawn(self, status: PoolStatus, problem: str) -> dict[str, str]:
        notice = problem or self._pool.notice
        return {"text/plain": status_text(status, notice=notice), "text/html": status_html(status, notice=notice)}


class _StatusWatch:
    """Asks once a second and publishes what differs."""

    def __init__(self, pool: Pool, drawn: Drawer, display_id: str, status: PoolStatus, idle_s: float) -> None:
        self._pool = pool
        self._drawn = drawn
        self._display_id = display_id
        self._last = status
        self._shown = drawn(status, "")
        self._idle_s = idle_s

    def work(self, stopped: threading.Event) -> None:
        busy_at = time.monotonic()
        pause_s = INTERVAL_S
        while not stopped.wait(pause_s):
            asked_at = time.monotonic()
            try:
                status = self._pool.status(start=False)
            except PoolError:
                # of another version by now, or it died while it was asked
                status = None
            if stopped.is_set():
                return
            if status is None:
                self._update(self._drawn(self._last, _POOL_ENDED))
                return
            self._last = status
            self._update(self._drawn(status, ""))
            now = time.monotonic()
            pause_s = max(INTERVAL_S, _REST * (now - asked_at))
            if any(not run.state.is_final for run in status.runs):
                busy_at = now
            elif now - busy_at >= self._idle_s:
                return

    def _update(self, drawn: dict[str, str]) -> None:
        if drawn != self._shown:
            self._shown = drawn
            _publish(drawn, self._display_id, update=True)


class RunWindows:
    """Views of runs that go on, which no cell waits for."""

    def __init__(self) -> None:
        self._open: list[_Background] = []

    def open(self, followed: follow.Followed, state: RunState, live: bool) -> None:
        """Show a run; the cell does not wait for its end.

        Args:
            followed: The run, attached to. It is closed here.
            state: Its state when it was attached to.
            live: Follow it while it goes on; else what it has done so far is shown once.
        """
        if live and not state.is_final:
            self._open = [window for window in self._open if window.is_alive]
            self._open.append(_Background("sgpu-view", lambda stopped: _follow(followed, state, stopped)))
        else:
            try:
                follow.replay(followed, state)
            finally:
                followed.run.close()

    def close(self) -> None:
        """Show none of them any further."""
        windows, self._open = self._open, []
        for window in windows:
            window.stop()


def _follow(followed: follow.Followed, state: RunState, stopped: threading.Event) -> None:
    try:
        follow.show(followed, state, stopped)
    finally:
        followed.run.close()


class _Background:
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


def _publish(data: dict[str, str], display_id: str, update: bool) -> None:
    from IPython.display import publish_display_data

    publish_display_data(data, transient={"display_id": display_id}, update=update)
