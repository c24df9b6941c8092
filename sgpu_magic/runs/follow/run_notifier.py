"""Runs the command of the setting `notify` when a long run ends, in the process that submitted the run and follows it.

For a detached run, which nobody follows, the local pool runs it (`sgpu_magic.pool.detached_run_notifier`).
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable

from sgpu_magic.config import Settings
from sgpu_magic.system.notify_command import LIMIT_S, EndedRun, run_notify_command
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.run_notes import error_line
from sgpu_magic.wire.base import RunKind
from sgpu_magic.wire.events import RunEnded

_REPORTED = (RunKind.CELL, RunKind.CALL)


class RunNotifier:
    """Runs the command for each run of this process in a thread of its own, so that it does not delay the result.

    Args:
        read_settings: Reads the current settings.
    """

    def __init__(self, read_settings: Callable[[], Settings]) -> None:
        self._read_settings = read_settings
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def run_ended(self, view: RunView, ended: RunEnded) -> None:
        """Start the command if it is set and the run has taken long enough. Must be called once for each run."""
        if view.spec.kind not in _REPORTED:
            return
        settings = self._read_settings()
        if not settings.notify or ended.total_s < settings.notify_after_s:
            return
        facts = EndedRun(
            run_id=view.run_id,
            name=view.name,
            state=ended.state,
            seconds=ended.total_s,
            reason=_reason_of(ended),
            pool=view.pool,
            notebook=view.spec.owner.notebook,
        )
        # with the cell's context, so that a note about a failure appears below the cell
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run, args=(_run, settings.notify, facts), name="sgpu-notify", daemon=True
        )
        with self._lock:
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]
            thread.start()

    def close(self) -> None:
        """Wait for the commands in progress, each of which has a time limit."""
        with self._lock:
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(2 * LIMIT_S)


def _run(command: str, facts: EndedRun) -> None:
    if problem := run_notify_command(command, facts):
        sys.stderr.write(f"sgpu: the command of the setting notify failed for {facts.name}: {problem}\n")
        sys.stderr.flush()


def _reason_of(ended: RunEnded) -> str:
    """Return `rank 3: ValueError: bad batch`, or who cancelled the run; "" for a run that has succeeded."""
    failure = ended.failure
    if failure is None:
        return ended.reason
    line = error_line(failure)
    return f"rank {failure.rank}: {line}" if failure.rank is not None else line
