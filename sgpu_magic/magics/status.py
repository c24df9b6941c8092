"""`%sgpu_status`: the pools, kept up to date below its cell."""

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
# a pool whose driver answers slowly is asked less often: it spends a quarter of its time on us at most
_REST = 3.0
_POOL_ENDED = "the pool has ended; the next run starts it again"


class StatusBoard:
    """What `%sgpu_status` has shown last, brought up to date while runs go on or wait, and for a while after.

    Args:
        pools: What it shows.
        idle_s: Seconds for which it goes on to look when no run is there.
    """

    def __init__(self, pools: Pools, idle_s: float) -> None:
        self._pools = pools
        self._idle_s = idle_s
        self._background: Background | None = None

    def show(self, live: bool, name: str = "") -> None:
        """Show the pools as an output of the cell that runs, and nowhere else any more.

        Args:
            live: Bring it up to date afterwards.
            name: Of this pool only; "" is all that are listed.

        Raises:
            SgpuError: The only pool can't be reached, or there is none of that name.
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
        """Return the pools as text, "" when none says anything; arguments and errors as of `show`."""
        answers = self._asked(name)
        return self._drawn(answers)["text/plain"] if answers else ""

    def close(self) -> None:
        """What is shown stays as it is."""
        background, self._background = self._background, None
        if background is not None:
            background.stop()

    def _asked(self, name: str) -> list[Asked]:
        """Ask the pools; nothing when none of them says anything."""
        answers = pools_status.ask(self._pools, name, start=True)
        return answers if any(answer.status is not None or answer.problem for answer in answers) else []

    def _watch(
        self, name: str, display_id: str, last: list[Asked], shown: dict[str, str], stopped: threading.Event
    ) -> None:
        """Ask once a second and publish what differs."""

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
                # of another version by now, or it died while it was asked
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
