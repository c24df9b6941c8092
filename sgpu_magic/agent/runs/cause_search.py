"""How long a run waits after a rank has failed, so that the failure that is shown is the root cause.

The report of a victim, whose collective broke, may come before that of the rank that caused it, and a traceback takes
time to format. Once the ranks that can still report have had that time, the others are freed. `find_root_cause` in
`agent.failures` then chooses among the failures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sgpu_magic.agent.failures import RankOutcomes
from sgpu_magic.agent.ranks.group import RunRanks
from sgpu_magic.agent.runs.hang_stacks import HangStacks
from sgpu_magic.wire.rank_events import Failure

# how long a victim's report waits for the root cause's
_VICTIM_WAITS_S = 0.25
# how long an error waits for an earlier one whose traceback takes longer to format
_ERROR_WAITS_S = 0.03
# extra time for tracebacks when all ranks have raised, since releasing them would break a session's process groups, and
# for the report of an exit
_TRACEBACKS_S = 2.0
# extra time for tracebacks of ranks that were released; some also wait for processes, as a DataLoader's iterator does
_TRACEBACKS_AFTER_RELEASE_S = 0.5


class CauseSearch:
    """Waits for the reports that decide which failure is the root cause.

    Args:
        run_ranks: The run's ranks.
        outcomes: What the ranks have reported.
        stacks: The stacks of a hang.
        later: Schedules a call after some seconds, which is dropped when the run is gone.
        is_stopping: Whether the run has ended or its ranks are being stopped already.
        free_others: Stops the ranks that may wait for the failed one.
    """

    def __init__(
        self,
        run_ranks: RunRanks,
        outcomes: RankOutcomes,
        stacks: HangStacks,
        later: Callable[[float, Callable[[], None]], None],
        is_stopping: Callable[[], bool],
        free_others: Callable[[], None],
    ) -> None:
        self._run_ranks = run_ranks
        self._outcomes = outcomes
        self._stacks = stacks
        self._later = later
        self._is_stopping = is_stopping
        self._free_others = free_others
        self._loop = asyncio.get_running_loop()
        self._has_begun = False
        # ranks that have raised and are formatting their tracebacks, and how long to wait for them
        self._formatting: set[int] = set()
        self._awaited_until: float | None = None

    def on_raised(self, rank: int) -> None:
        """Note that a rank has raised an exception; its failure follows when the traceback is formatted."""
        self._formatting.add(rank)

    def on_failure(self, failure: Failure) -> None:
        """Decide soon: a victim's report may come before that of the cause."""
        if not (failure.is_consequence and self._has_begun):
            self._has_begun = True
            self._later(_VICTIM_WAITS_S if failure.is_consequence else _ERROR_WAITS_S, self._decide)

    def on_peer_failure(self) -> None:
        """Free the ranks here: a rank on another node has failed."""
        self._has_begun = True
        self._decide()

    def await_tracebacks(self, proceed: Callable[[], None]) -> None:
        """Call `proceed` when the ranks that format their tracebacks have reported, or after half a second.

        On a busy machine, formatting takes longer than a step of the stop path, and their failures would be missing.
        """
        self._await_tracebacks(proceed, self._loop.time() + _TRACEBACKS_AFTER_RELEASE_S)

    def _await_tracebacks(self, proceed: Callable[[], None], until: float) -> None:
        if self._formatting.intersection(self._outcomes.unreported) and self._loop.time() < until:
            self._later(_ERROR_WAITS_S, lambda: self._await_tracebacks(proceed, until))
        else:
            proceed()

    def _decide(self) -> None:
        """Free the other ranks.

        Waits while all of them have raised too and format their tracebacks, while a dead rank's exit is not reported,
        and for the stacks of a hang.
        """
        if self._is_stopping():
            return
        now = self._loop.time()
        if self._awaited_until is None:
            self._awaited_until = now + _TRACEBACKS_S
        unreported = self._outcomes.unreported
        is_ending = any(self._run_ranks.group.rank(rank).is_ending() for rank in unreported)
        is_incomplete = self._stacks.is_pending or is_ending or self._formatting.issuperset(unreported)
        if is_incomplete and now < self._awaited_until:
            self._later(_ERROR_WAITS_S, self._decide)
        else:
            self._free_others()
