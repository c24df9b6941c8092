"""Repair of a session's group of ranks.

After a cell that broke the process groups, and when dead ranks are replaced, every living rank renews its groups in
place over a new store, so that the user's models and groups keep working. New ranks join over the same store.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.agent.ranks.orders import prepare
from sgpu_magic.agent.ranks.rank_process import GroupStore
from sgpu_magic.agent.runs.session_events import SessionEvents
from sgpu_magic.wire.events import GroupRenewed, RanksRestarted
from sgpu_magic.wire.node import Launch
from sgpu_magic.wire.rank import Renew, Renewed

# gloo's own limit on the ranks is shorter
_PATIENCE_S = 60.0
# receives why it failed, None if it has not, and what was lost, None if nothing was
_Regrouped = Callable[[str | None, str | None], None]


@dataclass(eq=False, repr=False)
class SessionRepair:
    """Renews process groups or replaces ranks, one operation at a time. A replacement ends with a renewal.

    Args:
        group: The ranks.
        launch: The session's launch, with which new ranks start.
        scratch: Directory for files on systems without memory files.
        events: Reports dead and replaced ranks.
        say: Reports the result.
        replaced: Called with the replaced ranks as soon as their new processes exist; they have yet to join.
    """

    group: Group
    launch: Launch
    scratch: Path
    events: SessionEvents
    say: Callable[[GroupRenewed | RanksRestarted], None]
    replaced: Callable[[Sequence[int]], None]

    def __post_init__(self) -> None:
        # the current renewal: its callback, ranks that have yet to answer, and their answers
        self._regrouped: _Regrouped | None = None
        self._waiting: set[int] = set()
        self._problem: str | None = None
        self._lost: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        # the current replacement: the killed ranks and its callback
        self._replacing: tuple[int, ...] = ()
        self._done: Callable[[str | None], None] | None = None

    @property
    def busy(self) -> bool:
        """Whether the ranks can't take a cell now."""
        return self._regrouped is not None or bool(self._replacing)

    def expects(self, rank: int) -> bool:
        """Whether the rank is being killed on purpose."""
        return rank in self._replacing

    def renew(self, reason: str, done: Callable[[GroupRenewed], None]) -> None:
        """Renew the process groups, report the result and call `done` with it. Every rank must be alive and idle."""

        def renewed(problem: str | None, lost: str | None) -> None:
            group_renewed = GroupRenewed(reason=reason, lost=lost, problem=problem)
            self.say(group_renewed)
            done(group_renewed)

        self._regroup((), renewed)

    def replace(self, ranks: Sequence[int], done: Callable[[str | None], None]) -> None:
        """Kill these ranks. Call `go_on` when one has died, and when no cell uses them any more.

        Args:
            ranks: The ranks to replace.
            done: Called with why the replacement failed, None when the new ranks have joined.
        """
        self._replacing, self._done = tuple(ranks), done
        for rank in ranks:
            self.group.rank(rank).signal(signal.SIGKILL, whole_session=True)

    def proceed(self) -> None:
        """Fork the new ranks once all old ones and their descendants have ended."""
        ranks = self._replacing
        if not ranks or self._regrouped is not None or not all(self.group.rank(rank).has_exited for rank in ranks):
            return
        self._regroup(ranks, self._end_replacement)
        if self._replacing:
            self.replaced(ranks)

    def fail(self, problem: str) -> None:
        """Fail the current renewal or replacement, if any."""
        if self._regrouped is not None:
            self._end_regrouping(problem)
        elif self._replacing:
            self._end_replacement(problem, None)

    # ------------------------------------------------------------ from the ranks

    def record_joined(self, rank: int) -> None:
        """Record that a rank has joined the process group."""
        self._waiting.discard(rank)
        if not self._waiting:
            self._end_regrouping(self._problem)

    def renewed(self, rank: int, message: Renewed) -> None:
        """Handle a rank's report that it has renewed its groups, or has failed to."""
        self._problem = self._problem or message.problem
        self._lost = self._lost or message.lost
        self.record_joined(rank)

    def died(self, rank: int) -> None:
        """Fail the current renewal, which needs the dead rank."""
        self._end_regrouping(f"rank {rank} died in the meantime")

    # ------------------------------------------------------------ internals

    def _regroup(self, replaced: Sequence[int], regrouped: _Regrouped) -> None:
        """Renew the process groups over a new store.

        Args:
            replaced: Ranks to fork again; they are dead, and all others are alive.
            regrouped: Called once with the result.
        """
        self._regrouped = regrouped
        self._problem = self._lost = None
        self._waiting = {process.rank for process in self.group.ranks}
        self._timer = asyncio.get_running_loop().call_later(
            _PATIENCE_S, self._end_regrouping, f"it took longer than {_PATIENCE_S:.0f} s"
        )
        try:
            store = GroupStore(self.scratch)
            staying = sorted(self._waiting.difference(replaced))
            for rank in staying:
                order = Renew(replaced=tuple(replaced), store_path=store.path)
                self.group.order(rank, order, descriptors=store.descriptors)
            if replaced:
                self.group.replace(replaced, store)
                prepare(self.launch, self.group, replaced, stays=True, renewal=bool(staying))
            else:
                store.close()
        except OSError as error:
            self._end_regrouping(str(error))

    def _end_regrouping(self, problem: str | None) -> None:
        regrouped, self._regrouped = self._regrouped, None
        if regrouped is not None and self._timer is not None:
            self._timer.cancel()
            regrouped(problem, self._lost)

    def _end_replacement(self, problem: str | None, lost: str | None) -> None:
        ranks, self._replacing = self._replacing, ()
        done, self._done = self._done, None
        if done is None:
            return
        for rank in ranks:
            if not self.group.rank(rank).alive:
                self.events.died(rank)
        if problem is None:
            pids = tuple(self.group.rank(rank).pid or 0 for rank in ranks)
            self.say(RanksRestarted(ranks=ranks, pids=pids, lost=lost))
            self.events.replaced(ranks)
        done(problem)
