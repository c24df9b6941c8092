"""Keeps a session's group whole: its process groups are connected anew, its dead ranks replaced, and that is told."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from sgpu_magic.agent.ranks import leftovers
from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.agent.runs.regrouping import Regrouping
from sgpu_magic.agent.runs.session_news import SessionNews
from sgpu_magic.wire.events import GroupRenewed, RanksRestarted
from sgpu_magic.wire.node_messages import Launch
from sgpu_magic.wire.rank_messages import Renewed

# why it failed ("" when it did not), and what could not be kept
_Done = Callable[[str, str], None]


class GroupCare:
    """One thing at a time: a renewal, or a replacement, which ends with a renewal of the ranks that stay.

    Args:
        group: The ranks.
        launch: The session's: what new ranks stand on.
        scratch: Directory for files where memory files do not exist.
        news: Hears which ranks are dead or live again.
        say: Takes what was done.
        replaced: Called with the ranks that are new processes as soon as these exist; they have yet to join.
    """

    def __init__(
        self,
        group: Group,
        launch: Launch,
        scratch: Path,
        news: SessionNews,
        say: Callable[[GroupRenewed | RanksRestarted], None],
        replaced: Callable[[Sequence[int]], None],
    ) -> None:
        self._group = group
        self._launch = launch
        self._scratch = scratch
        self._news = news
        self._say = say
        self._replaced = replaced
        self._regrouping: Regrouping | None = None
        # ranks that are killed to be replaced, and who waits for that
        self._replacing: tuple[int, ...] = ()
        self._done: Callable[[str], None] | None = None

    @property
    def busy(self) -> bool:
        """The ranks can't take a cell now."""
        return self._regrouping is not None or bool(self._replacing)

    def expects(self, rank: int) -> bool:
        """The rank is killed on purpose."""
        return rank in self._replacing

    def renew(self, reason: str, done: Callable[[GroupRenewed], None]) -> None:
        """Connect the process groups anew; `done` is called with what was told. Every rank must be alive and idle."""

        def renewed(problem: str, lost: str) -> None:
            if problem:
                lost = f"they could not be ({problem}): %sgpu_restart starts the ranks again"
            news = GroupRenewed(reason=reason, lost=lost)
            self._say(news)
            done(news)

        self._regroup((), renewed)

    def replace(self, ranks: Sequence[int], done: Callable[[str], None]) -> None:
        """Kill these ranks; `go_on` is to be called when one has died, and when no cell counts on them any more.

        Args:
            ranks: Which.
            done: Called with why that failed, "" when new ones have joined.
        """
        self._replacing, self._done = tuple(ranks), done
        for rank in ranks:
            self._group.rank(rank).signal(signal.SIGKILL, whole_session=True)

    def go_on(self) -> None:
        """Fork the new ranks once all old ones are dead."""
        ranks = self._replacing
        if not ranks or self._regrouping is not None or any(self._group.rank(rank).alive for rank in ranks):
            return
        old = {self._group.rank(rank).pid or 0 for rank in ranks}
        leftovers.kill_leftovers(self._launch.spec.run_id, old, marked=False, reaped=True)
        self._regroup(ranks, self._end_replacement)
        if self._replacing:
            self._replaced(ranks)

    def fail(self, problem: str) -> None:
        """Whatever is under way comes to nothing."""
        if self._regrouping is not None:
            self._regrouping.fail(problem)
        elif self._replacing:
            self._end_replacement(problem, "")

    # ------------------------------------------------------------ from the ranks

    def joined(self, rank: int) -> None:
        """A new rank is in the process group."""
        if self._regrouping is not None:
            self._regrouping.joined(rank)

    def renewed(self, rank: int, message: Renewed) -> None:
        """A rank has renewed its groups, or could not."""
        if self._regrouping is not None:
            self._regrouping.renewed(rank, message)

    def died(self, rank: int) -> None:
        """A rank is dead: the others can't be whole without it."""
        if self._regrouping is not None:
            self._regrouping.fail(f"rank {rank} died meanwhile")

    # ------------------------------------------------------------ within

    def _regroup(self, replaced: Sequence[int], done: _Done) -> None:
        def regrouped(problem: str, lost: str) -> None:
            self._regrouping = None
            done(problem, lost)

        self._regrouping = regrouping = Regrouping(self._group, self._launch, self._scratch, regrouped)
        try:
            regrouping.begin(replaced)
        except OSError as error:
            regrouping.fail(str(error))

    def _end_replacement(self, problem: str, lost: str) -> None:
        ranks, self._replacing = self._replacing, ()
        done, self._done = self._done, None
        if done is None:
            return
        for rank in ranks:
            if not self._group.rank(rank).alive:
                self._news.died(rank)
        if not problem:
            pids = tuple(self._group.rank(rank).pid or 0 for rank in ranks)
            self._say(RanksRestarted(ranks=ranks, pids=pids, lost=lost))
            self._news.replaced(ranks)
        done(problem)
