"""The one way in which ranks are stopped: interrupt, release, TERM, grace, KILL.

A rank that waits in a collective hears no interrupt, and one that computes feels no lost connection; so both come,
one shortly after the other. Which comes first says what the user sees: `KeyboardInterrupt` after a cancel, "released
from all_reduce" after a peer's failure.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from sgpu_magic.agent import release
from sgpu_magic.agent.gathering import Gathering
from sgpu_magic.agent.group import Group

# a cell that an interrupt reaches in Python ends as KeyboardInterrupt; only then are the connections shut
_LEAD_S = 0.03
# from one rung to the next, where no grace is given
_RUNG_S = 0.3
# exit handlers of ranks that are done
_EXIT_HANDLERS_S = 5.0


class StopPath:
    """Stops the ranks of one run that have not reported.

    Args:
        group: The ranks.
        gathering: Who has reported.
        later: Calls back after some seconds; what is pending is dropped with the run.
    """

    def __init__(self, group: Group, gathering: Gathering, later: Callable[[float, Callable[[], None]], None]) -> None:
        self._group = group
        self._gathering = gathering
        self._later = later
        self.begun = False

    def begin(self, *, interrupt_first: bool, waited: Callable[[], None]) -> None:
        """Interrupt and release; call `waited` when those that react have had their time."""
        self.begun = True
        first, second = (self._interrupt, self._release) if interrupt_first else (self._release, self._interrupt)
        first()
        self._later(_LEAD_S, second)
        self._later(_RUNG_S, waited)

    def end(self, grace_s: float) -> None:
        """Let those that have reported exit; TERM the others, and KILL what is left after `grace_s` seconds."""
        self._group.leave()
        unreported = [process for process in self._group.ranks if not self._gathering.has_reported(process.rank)]
        for process in unreported:
            process.signal(signal.SIGTERM, whole_session=True)
        self._later(grace_s if unreported else _EXIT_HANDLERS_S, self._kill)

    def _interrupt(self) -> None:
        for process in self._group.ranks:
            if not self._gathering.has_reported(process.rank):
                process.signal(signal.SIGINT)

    def _release(self) -> None:
        if not self._gathering.complete:
            self._group.release(release.connections_between(self._group.pids))

    def _kill(self) -> None:
        for process in self._group.ranks:
            process.signal(signal.SIGKILL, whole_session=True)
