"""When waiting runs' followers get their runs' positions and reasons.

Up to `AT_ONCE` waiting runs are updated at every change. With more, only new runs and the first of each line are; the
others are updated at a rate of `PER_S` in a second, since a pool with 500 waiting runs would do nothing else. Queries
always return the current state.
"""

from __future__ import annotations

from sgpu_magic.pool.scheduling.scheduler import Scheduler
from sgpu_magic.pool.scheduling.wait_reason import QueueStatus

AT_ONCE = 64
"""The number of waiting runs above which some are updated with a delay."""
PER_S = 100.0
_FIRST = 4


class QueueUpdates:
    """Remembers which status was last sent to each waiting run's followers.

    Args:
        scheduler: Knows the queue.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        # by the run's number
        self._sent: dict[int, QueueStatus] = {}
        # for delayed updates: the time of the last full update, and whether a run is out of date since then
        self._updated_at = float("-inf")
        self._behind = False

    def due(self, now: float) -> dict[str, QueueStatus]:
        """Return the statuses to send now, by run in order of submission. Call it after each stimulus.

        Args:
            now: The time of the stimulus, on the scheduler's clock.
        """
        waiting = {run.number for run in self._scheduler.waiting}
        for number in self._sent.keys() - waiting:
            del self._sent[number]
        deferred = self._behind = len(waiting) > AT_ONCE and now < self._updated_at + len(waiting) / PER_S
        if not deferred:
            self._updated_at = now
        queue = self._scheduler.queue()
        due: dict[int, tuple[str, QueueStatus]] = {}
        for run, position in queue.positions(_FIRST if deferred else None, self._sent):
            if deferred and run.number in self._sent and position > _FIRST:
                continue
            status = queue.status(run, position)
            if status != self._sent.get(run.number):
                self._sent[run.number] = status
                due[run.number] = run.run_id, status
        return dict(due[number] for number in sorted(due))

    def next_deadline(self) -> float | None:
        """Return when the delayed updates are due; None without any."""
        return self._updated_at + self._scheduler.count_waiting() / PER_S if self._behind else None
