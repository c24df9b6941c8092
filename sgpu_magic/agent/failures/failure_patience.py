"""When it is known who is to blame, so that the ranks that may wait for one that has failed can be freed.

An earlier failure may still be on its way, and ranks that have raised themselves wait for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sgpu_magic.agent.runs.gathering import Gathering
from sgpu_magic.wire.records import Failure

# seconds for which a victim's report waits for the culprit's
_PATIENCE_WITH_VICTIM_S = 0.25
# seconds for which an error waits for an earlier one whose traceback takes longer to draw
_PATIENCE_WITH_CAUSE_S = 0.03
# seconds more for the tracebacks of ranks that have all raised: to free them would cost a session's whole group
_PATIENCE_WITH_DRAWING_S = 2.0


class Blame:
    """Of one run.

    Args:
        gathering: Who has reported.
        later: Calls back after some seconds; what is pending is dropped with the run.
        stopping: Whether the run ends anyway, and nobody is to be freed.
        free_others: Called when the culprit is known. It may be called again until `stopping`.

    Attributes:
        drawing: Ranks that have raised, and draw their tracebacks or have drawn them.
    """

    def __init__(
        self,
        gathering: Gathering,
        later: Callable[[float, Callable[[], None]], None],
        stopping: Callable[[], bool],
        free_others: Callable[[], None],
    ) -> None:
        self._gathering = gathering
        self._later = later
        self._stopping = stopping
        self._free_others = free_others
        self._loop = asyncio.get_running_loop()
        self._deciding = False
        self.drawing: set[int] = set()
        self._drawn_by: float | None = None

    def raised(self, rank: int) -> None:
        """A rank has raised and will report it."""
        self.drawing.add(rank)

    def failed(self, failure: Failure) -> None:
        """A rank has reported its failure, or is dead."""
        if failure.is_consequence and self._deciding:
            return
        self._deciding = True
        self._later(_PATIENCE_WITH_VICTIM_S if failure.is_consequence else _PATIENCE_WITH_CAUSE_S, self._decide)

    def peer_failed(self) -> None:
        """A rank on another node has failed: it is to blame, and those here only wait for it."""
        self._deciding = True
        self._decide()

    def _decide(self) -> None:
        if self._stopping():
            return
        now = self._loop.time()
        self._drawn_by = self._drawn_by or now + _PATIENCE_WITH_DRAWING_S
        if self.drawing.issuperset(self._gathering.unreported) and now < self._drawn_by:
            self._later(_PATIENCE_WITH_CAUSE_S, self._decide)
        else:
            self._free_others()
