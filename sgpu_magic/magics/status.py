"""`%sgpu_status`: the pool, kept up to date below its cell."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

from sgpu_magic.client.pool import Pool
from sgpu_magic.errors import PoolError
from sgpu_magic.protocol.messages import PoolStatus
from sgpu_magic.render.status import status_html, status_text
from sgpu_magic.runs.windows import Background

INTERVAL_S = 1.0
# a pool whose driver answers slowly is asked less often: it spends a quarter of its time on us at most
_REST = 3.0
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
        self._background: Background | None = None

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
            self._background = Background("sgpu-status", watch.work)

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


def _publish(data: dict[str, str], display_id: str, update: bool) -> None:
    from IPython.display import publish_display_data

    publish_display_data(data, transient={"display_id": display_id}, update=update)
