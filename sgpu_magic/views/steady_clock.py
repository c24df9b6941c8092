"""The time of day as views count with it: it goes on with the monotonic clock, whatever the wall clock is set to.

What a run has cost so far, how long it has run and what is left of its time are differences between now and an event's
time. Both are told by this clock, so a step of the wall clock is in none of them. An event from before a step that is
heard after it, as by `%sgpu_attach`, still counts by the wall clock.
"""

from __future__ import annotations

import time

# what two readings of clocks differ by that were not set
_STEP_S = 0.01

_began = time.time() - time.monotonic()


def steady_time() -> float:
    """Return the seconds since the epoch, as the wall clock had them when this process began to count."""
    return _began + time.monotonic()


def heard_at(at: float) -> float:
    """Return an event's wall-clock time by the steady clock. To be asked when the event is heard."""
    set_by = time.time() - steady_time()
    return at if abs(set_by) < _STEP_S else at - set_by
