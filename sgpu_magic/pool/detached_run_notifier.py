"""Runs the command of the setting `notify` when a detached run ends, because no client follows it.

Clients run the command for other runs (`sgpu_magic.runs.follow.run_notifier`). A pool that serves other machines runs
no command, because its settings are not those of the run's user.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from sgpu_magic.config import Settings
from sgpu_magic.errors import UsageError
from sgpu_magic.pool.ledger import in_one_line
from sgpu_magic.system.notify_command import EndedRun, run_notify_command
from sgpu_magic.system.processes import write_log
from sgpu_magic.wire.base import short
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.run import RunSpec


class DetachedRunNotifier:
    """Runs the command for each detached run in a thread of its own. Failures are written to the service's log.

    Args:
        read_settings: Reads the current settings, which may have changed since the pool started.
    """

    def __init__(self, read_settings: Callable[[], Settings]) -> None:
        self._read_settings = read_settings

    def run_ended(self, spec: RunSpec, ended: RunEnded) -> None:
        """Start the command if it is set and the run has taken long enough."""
        if not spec.detach:
            return
        try:
            settings = self._read_settings()
        except UsageError as error:
            write_log(f"the command of the setting notify is not run for run {spec.run_id}: {error.message}\n")
            return
        if not settings.notify or ended.total_s < settings.notify_after_s:
            return
        facts = EndedRun(
            run_id=spec.run_id,
            name=spec.name or short(spec.run_id),
            state=ended.state,
            seconds=ended.total_s,
            reason=in_one_line(ended),
            pool="local",
            notebook=spec.owner.notebook,
        )
        threading.Thread(target=_run, args=(settings.notify, facts), name="sgpu-notify", daemon=True).start()


def _run(command: str, facts: EndedRun) -> None:
    if problem := run_notify_command(command, facts):
        write_log(f"the command of the setting notify failed for run {facts.run_id}: {problem}\n")
