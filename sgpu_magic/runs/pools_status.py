"""The status of several pools in one view: of `sgpu status`, and kept current below the cell of `%sgpu_status`."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.client.pools import Pools, PoolStatusReply
from sgpu_magic.client.pools_file import LOCAL
from sgpu_magic.errors import SgpuError
from sgpu_magic.views.history_table import MOST_CURVES
from sgpu_magic.views.html_style import SANS, SOFT, safe
from sgpu_magic.views.pool_tables import away_html, status_html, status_text

if TYPE_CHECKING:
    from sgpu_magic.runs.notices import Background

RECENT = 20
NOT_RUNNING = "not running; the first run in it starts it"
INTERVAL_S = 1.0
# the output is at most this old, unless an answer takes longer than half of it
_OLDEST_S = 2.0
# pause for this many times the request's duration, so that a pool with a slow driver is polled less often
_REST = 3.0
_POOL_ENDED = "the pool has ended; the next run starts it again"
_SILENT = "it can't be reached now and is asked again"


def ask(pools: Pools, name: str = "", *, start: bool, recent: int = RECENT) -> list[PoolStatusReply]:
    """Ask one pool, or all listed pools, for their status.

    Args:
        pools: The process's pools.
        name: The pool; "" means all.
        start: Start the local pool if it is not running and is the only one asked.
        recent: Number of newest runs to include.

    Raises:
        SgpuError: The only pool asked can't be reached, or there is no pool of that name.
    """
    entries = pools.entries() if name != LOCAL else ()
    if name and name != LOCAL:
        pools.get(name)
        entries = tuple(entry for entry in entries if entry.name == name)
    if entries:
        answers = pools.ask_status(entries, local=not name, recent=recent, again=bool(name), history=MOST_CURVES)
        if name and answers[0].problem:
            # raise the error, since only this pool was requested
            pools.get(name).status(1, start=False, timeout_s=0.1)
        return answers
    return [PoolStatusReply(LOCAL, None, pools.local.status(recent, start=start, history=MOST_CURVES))]


def render(
    answers: Sequence[PoolStatusReply], notices: Mapping[str, str], remark: str = "", width: int | None = None
) -> dict[str, str]:
    """Render the pools as text and as HTML tables with inline styles.

    Args:
        answers: The pools' answers.
        notices: The pools' notices by name; for a pool without a status, why it has none, if that is known.
        remark: A sentence below all pools, "" for none.
        width: As for `status_text`.
    """
    texts: list[str] = []
    tables: list[str] = []
    for answer in answers:
        title = answer.name if answer.entry is None else f"{answer.name} ({answer.entry.kind})"
        notice = notices.get(answer.name, "")
        if answer.status is None:
            why = answer.problem or notice or NOT_RUNNING
            texts.append(f"{title} · {why}")
            tables.append(away_html(title, why, is_problem=bool(answer.problem)))
        else:
            status = answer.status if answer.entry is None else msgspec.structs.replace(answer.status, pool=title)
            texts.append(status_text(status, notice=notice, width=width))
            tables.append(status_html(status, notice=notice))
    html = "".join(f'<div style="margin-bottom:8px">{each}</div>' for each in tables) if len(tables) > 1 else tables[0]
    if remark:
        texts.append(remark)
        html += f'<div style="{SANS};font-size:12px;{SOFT};padding:3px 0">{safe(remark)}</div>'
    return {"text/plain": "\n\n".join(texts), "text/html": html}


# ---------------------------------------------------------------- below a cell


class StatusBoard:
    """The last output of `%sgpu_status`, updated while runs are active or queued, and for `idle_s` after.

    Args:
        pools: The pools to show.
        idle_s: Seconds after the last active run at which the updates end.
    """

    def __init__(self, pools: Pools, idle_s: float) -> None:
        self._pools = pools
        self._idle_s = idle_s
        self._live: _LiveStatus | None = None

    def show(self, live: bool, name: str = "") -> None:
        """Show the pools below the current cell and stop updating the previous output.

        Args:
            live: Keep the output up to date.
            name: Show only this pool; "" means all listed pools.

        Raises:
            SgpuError: The only pool can't be reached, or there is no pool of that name.
        """
        previous, self._live = self._live, None
        if previous is not None:
            previous.stop()
            previous.say_stopped()
        if not (answers := self._ask(name)):
            return
        output = _LiveStatus(self._pools, self._idle_s, name, answers)
        if live:
            output.start()
            self._live = output

    def text(self, name: str = "") -> str:
        """Return the pools as text, "" if none has anything to show; arguments and errors as in `show`."""
        answers = self._ask(name)
        return render(answers, _notices(self._pools, answers))["text/plain"] if answers else ""

    def close(self) -> None:
        """Stop the updates; the output stays as it is."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _ask(self, name: str) -> list[PoolStatusReply]:
        """Ask the pools; empty if none of them has anything to show."""
        answers = ask(self._pools, name, start=True)
        return answers if any(answer.status is not None or answer.problem for answer in answers) else []


class _LiveStatus:
    """One output of `%sgpu_status`, published when it is made.

    Args:
        pools: The process's pools.
        idle_s: As in `StatusBoard`.
        name: The pool to show; "" means all listed pools.
        answers: What they have answered.
    """

    def __init__(self, pools: Pools, idle_s: float, name: str, answers: list[PoolStatusReply]) -> None:
        self._pools = pools
        self._idle_s = idle_s
        self._name = name
        self._answers = answers
        self._asked_at = time.time()
        # pools that had a status, which later have none because they have ended
        self._known = {answer.name for answer in answers if answer.status is not None}
        self._has_stopped = False
        self._display_id = f"sgpu-status-{secrets.token_hex(4)}"
        self._background: Background | None = None
        self._shown: dict[str, str] = {}
        self._update()

    def start(self) -> None:
        """Keep the output up to date in a thread."""
        # imported here, as below: `sgpu status` does not need it
        from sgpu_magic.runs.notices import Background

        self._background = Background("sgpu-status", self._watch)

    def stop(self) -> None:
        """Stop the updates."""
        if self._background is not None:
            self._background.stop()

    def say_stopped(self) -> None:
        """Add a note that the output is no longer updated; a no-op if it has one already."""
        if not self._has_stopped:
            self._has_stopped = True
            at = time.strftime("%H:%M:%S", time.localtime(self._asked_at))
            self._update(f"updated until {at}; %sgpu_status shows the present state")

    def _watch(self, stopped: threading.Event) -> None:
        """Ask the pools without starting any, and publish changes, also across the end of a pool and its next start."""
        busy_at = time.monotonic()
        pause_s = INTERVAL_S
        while not stopped.wait(pause_s):
            asked_at = time.monotonic()
            try:
                answers = ask(self._pools, self._name, start=False)
            except SgpuError:
                # the only pool was replaced by another version, has just died, or can't be reached
                answers = [PoolStatusReply(self._answers[0].name, self._answers[0].entry)]
            if stopped.is_set():
                return
            self._answers, self._asked_at = answers, time.time()
            self._known |= {answer.name for answer in answers if answer.status is not None}
            now = time.monotonic()
            pause_s = max(INTERVAL_S, min(_REST * (now - asked_at), _OLDEST_S - (now - asked_at)))
            rows = [run for answer in answers if answer.status is not None for run in answer.status.runs]
            if any(not run.state.is_final for run in rows):
                busy_at = now
            elif now - busy_at >= self._idle_s:
                self.say_stopped()
                return
            self._update()

    def _update(self, remark: str = "") -> None:
        """Publish the output if it has changed, with a remark below all pools."""
        from sgpu_magic.runs.notebook import publish

        reasons = {
            answer.name: _POOL_ENDED if answer.entry is None else _SILENT
            for answer in self._answers
            if answer.status is None and answer.name in self._known
        }
        output = render(self._answers, {**_notices(self._pools, self._answers), **reasons}, remark)
        if output != self._shown:
            publish(output, self._display_id, update=bool(self._shown))
            self._shown = output


def _notices(pools: Pools, answers: Sequence[PoolStatusReply]) -> dict[str, str]:
    return {answer.name: pools.used_pool(answer.name).notice for answer in answers if answer.status is not None}
