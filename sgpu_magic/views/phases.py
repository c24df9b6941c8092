"""How long a run was in each of its phases, folded from its events. Pure."""

from __future__ import annotations

import msgspec

from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.events import Event, RunEnded, StateChanged
from sgpu_magic.wire.rank_events import RanksFinishing

FINISHING = "finishing"
"""The phase after the cell has ended on every rank, while ranks finish what it has started."""


class Phase(msgspec.Struct, frozen=True):
    """One phase of a run.

    Args:
        name: The value of its `RunState`, or `FINISHING`.
        seconds: How long the run was in it, over all attempts.
        current: The run is in it.
    """

    name: str
    seconds: float
    current: bool


class RunPhases:
    """The phases of one run.

    Args:
        submitted_at: When it was submitted, in seconds since the epoch, like the events' times.
    """

    def __init__(self, submitted_at: float) -> None:
        self._seconds: dict[str, float] = {RunState.QUEUED.value: 0.0}
        self._current: str | None = RunState.QUEUED.value
        self._since = submitted_at

    def apply(self, event: Event) -> None:
        """Fold in one event."""
        match event.body:
            case StateChanged(state=state) if not state.is_final:
                self._enter(state.value, event.at)
            case RanksFinishing(ranks=ranks) if ranks:
                self._enter(FINISHING, event.at)
            case RunEnded():
                self._enter(None, event.at)
            case _:
                pass

    def in_order(self, now: float) -> list[Phase]:
        """Return the phases in the order in which the run entered them; `now` in seconds since the epoch."""
        since_s = max(now - self._since, 0.0)
        found: list[Phase] = []
        for name, seconds in self._seconds.items():
            is_current = name == self._current
            found.append(Phase(name, seconds + since_s if is_current else seconds, is_current))
        return found

    def _enter(self, name: str | None, at: float) -> None:
        if self._current is not None:
            self._seconds[self._current] += max(at - self._since, 0.0)
        self._current, self._since = name, at
        if name is not None:
            self._seconds.setdefault(name, 0.0)
