"""The output of `%sgpu_status`, updated below its cell."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import secrets
import threading
import time
from collections.abc import Sequence

from sgpu_magic.client.pools import Asked, Pools
from sgpu_magic.errors import SgpuError
from sgpu_magic.runs import pools_status
from sgpu_magic.runs.follow.background import Background

INTERVAL_S = 1.0
# a pool with a slow driver is asked less often, so that it spends at most a quarter of its time on this
_REST = 3.0
_POOL_ENDED = "the pool has ended; the next run starts it again"


class StatusBoard:
    """The last output of `%sgpu_status`, updated while runs are active or queued, and for `idle_s` after.

    Args:
        pools: The pools to show.
        idle_s: Seconds after the last active run at which the updates end.
    """

    def __init__(self, pools: Pools, idle_s: float) -> None:
        self._pools = pools
        self._idle_s = idle_s
        self._background: Background | None = None

    def show(self, live: bool, name: str = "") -> None:
        """Show the pools below the current cell and stop updating the previous output.

        Args:
            live: Keep the output up to date.
            name: Show only this pool; "" means all listed pools.

        Raises:
            SgpuError: The only pool can't be reached, or there is no pool of that name.
        """
        self.close()
        answers = self._asked(name)
        if not answers:
            return
        display_id = f"sgpu-status-{secrets.token_hex(4)}"
        shown = self._drawn(answers)
        _publish(shown, display_id, update=False)
        if live:
            watch = functools.partial(self._watch, name, display_id, answers, shown)
            self._background = Background("sgpu-status", watch)

    def text(self, name: str = "") -> str:
        """Return the pools as text, "" if none has anything to show; arguments and errors as in `show`."""
        answers = self._asked(name)
        return self._drawn(answers)["text/plain"] if answers else ""

    def close(self) -> None:
        """Stop the updates; the output stays as it is."""
        background, self._background = self._background, None
        if background is not None:
            background.stop()

    def _asked(self, name: str) -> list[Asked]:
        """Ask the pools; empty if none of them has anything to show."""
        answers = pools_status.ask(self._pools, name, start=True)
        return answers if any(answer.status is not None or answer.problem for answer in answers) else []

    def _watch(
        self, name: str, display_id: str, last: list[Asked], shown: dict[str, str], stopped: threading.Event
    ) -> None:
        """Ask the pools once a second and publish changes."""

        def update(drawn: dict[str, str]) -> None:
            nonlocal shown
            if drawn != shown:
                shown = drawn
                _publish(drawn, display_id, update=True)

        busy_at = time.monotonic()
        pause_s = INTERVAL_S
        while not stopped.wait(pause_s):
            asked_at = time.monotonic()
            try:
                answers = pools_status.ask(self._pools, name, start=False)
            except SgpuError:
                # the pool was replaced by another version, or died
                answers = [Asked(last[0].name, last[0].entry)]
            if stopped.is_set():
                return
            if len(answers) == 1 and answers[0].status is None:
                gone = _POOL_ENDED if answers[0].entry is None else "it can't be reached now"
                update(pools_status.drawn(last, {answers[0].name: gone}))
                return
            last = answers
            update(self._drawn(answers))
            now = time.monotonic()
            pause_s = max(INTERVAL_S, _REST * (now - asked_at))
            rows = [run for answer in answers if answer.status is not None for run in answer.status.runs]
            if any(not run.state.is_final for run in rows):
                busy_at = now
            elif now - busy_at >= self._idle_s:
                return

    def _drawn(self, answers: Sequence[Asked]) -> dict[str, str]:
        told = {answer.name: self._pools.of(answer.name).notice for answer in answers if answer.status is not None}
        return pools_status.drawn(answers, told)


def _publish(data: dict[str, str], display_id: str, update: bool) -> None:
    from IPython.display import publish_display_data

    publish_display_data(data, transient={"display_id": display_id}, update=update)
