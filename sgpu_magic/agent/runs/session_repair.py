"""Keeps a session's group whole, and tells of it: process groups are connected anew, dead ranks replaced.

After a cell that broke them, and for ranks that are new, every living rank renews its groups in place over a new store,
so that models and groups of the user go on. A new rank joins over the same store.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgpu_magic.agent.ranks import run_processes
from sgpu_magic.agent.ranks.group import Group, GroupStore
from sgpu_magic.agent.ranks.orders import prepare
from sgpu_magic.agent.runs.run_files import RunDirectory
from sgpu_magic.wire.events import GroupRenewed, RanksRestarted, SessionMoved
from sgpu_magic.wire.node import Launch
from sgpu_magic.wire.rank import Renew, Renewed

# gloo's own limit on the ranks is shorter
_PATIENCE_S = 60.0
# why it failed ("" when it did not), and what could not be kept
_Regrouped = Callable[[str, str], None]


@dataclass(eq=False, repr=False)
class SessionRepair:
    """One thing at a time: a renewal, or a replacement, which ends with a renewal of the ranks that stay.

    Args:
        group: The ranks.
        launch: The session's: what new ranks stand on.
        scratch: Directory for files where memory files do not exist.
        news: Hears which ranks are dead or live again.
        say: Takes what was done.
        replaced: Called with the ranks that are new processes as soon as these exist; they have yet to join.
    """

    group: Group
    launch: Launch
    scratch: Path
    news: SessionNews
    say: Callable[[GroupRenewed | RanksRestarted], None]
    replaced: Callable[[Sequence[int]], None]

    def __post_init__(self) -> None:
        # who waits for the renewal under way, the ranks that have yet to answer, and what they said
        self._regrouped: _Regrouped | None = None
        self._waiting: set[int] = set()
        self._problem = self._lost = ""
        self._timer: asyncio.TimerHandle | None = None
        # ranks that are killed to be replaced, and who waits for that
        self._replacing: tuple[int, ...] = ()
        self._done: Callable[[str], None] | None = None

    @property
    def busy(self) -> bool:
        """The ranks can't take a cell now."""
        return self._regrouped is not None or bool(self._replacing)

    def expects(self, rank: int) -> bool:
        """The rank is killed on purpose."""
        return rank in self._replacing

    def renew(self, reason: str, done: Callable[[GroupRenewed], None]) -> None:
        """Connect the process groups anew; `done` is called with what was told. Every rank must be alive and idle."""

        def renewed(problem: str, lost: str) -> None:
            if problem:
                lost = f"they could not be ({problem}): %sgpu_restart starts the ranks again"
            news = GroupRenewed(reason=reason, lost=lost)
            self.say(news)
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
            self.group.rank(rank).signal(signal.SIGKILL, whole_session=True)

    def go_on(self) -> None:
        """Fork the new ranks once all old ones are dead."""
        ranks = self._replacing
        if not ranks or self._regrouped is not None or any(self.group.rank(rank).alive for rank in ranks):
            return
        old = {self.group.rank(rank).pid or 0 for rank in ranks}
        run_processes.kill_leftovers(self.launch.spec.run_id, old, marked=False, reaped=True)
        self._regroup(ranks, self._end_replacement)
        if self._replacing:
            self.replaced(ranks)

    def fail(self, problem: str) -> None:
        """Whatever is under way comes to nothing."""
        if self._regrouped is not None:
            self._end_regrouping(problem)
        elif self._replacing:
            self._end_replacement(problem, "")

    # ------------------------------------------------------------ from the ranks

    def joined(self, rank: int) -> None:
        """A new rank is in the process group."""
        self._waiting.discard(rank)
        if not self._waiting:
            self._end_regrouping(self._problem)

    def renewed(self, rank: int, message: Renewed) -> None:
        """A rank has renewed its groups, or could not."""
        self._problem = self._problem or message.problem
        self._lost = self._lost or message.lost
        self.joined(rank)

    def died(self, rank: int) -> None:
        """A rank is dead: the others can't be whole without it."""
        self._end_regrouping(f"rank {rank} died meanwhile")

    # ------------------------------------------------------------ within

    def _regroup(self, replaced: Sequence[int], regrouped: _Regrouped) -> None:
        """Connect the process groups anew over a new store.

        Args:
            replaced: Ranks to fork anew; they are dead, and all others alive.
            regrouped: Called once.
        """
        self._regrouped = regrouped
        self._problem = self._lost = ""
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

    def _end_regrouping(self, problem: str) -> None:
        regrouped, self._regrouped = self._regrouped, None
        if regrouped is not None and self._timer is not None:
            self._timer.cancel()
            regrouped(problem, self._lost)

    def _end_replacement(self, problem: str, lost: str) -> None:
        ranks, self._replacing = self._replacing, ()
        done, self._done = self._done, None
        if done is None:
            return
        for rank in ranks:
            if not self.group.rank(rank).alive:
                self.news.died(rank)
        if not problem:
            pids = tuple(self.group.rank(rank).pid or 0 for rank in ranks)
            self.say(RanksRestarted(ranks=ranks, pids=pids, lost=lost))
            self.news.replaced(ranks)
        done(problem)


# ---------------------------------------------------------------- what it reports, and its ranks' logs


# cells come every few milliseconds: what they do is told when they last, or when it is quiet
_PAUSE_S = 0.2


class SessionNews:
    """Reports how many cells there were, which one runs, which ranks are dead.

    Args:
        say: Takes what is told.
    """

    def __init__(self, say: Callable[[SessionMoved], None]) -> None:
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._cells = 0
        self._running = ""
        self._dead: set[int] = set()
        self._told = SessionMoved(cells=0)
        self._timer: asyncio.TimerHandle | None = None

    def began(self, name: str) -> None:
        """A cell runs."""
        self._cells += 1
        self._running = name
        self._changed()

    def over(self) -> None:
        """The cell is over."""
        self._running = ""
        self._changed()

    def died(self, rank: int) -> None:
        """A rank is dead."""
        self._dead.add(rank)
        self._tell_now()

    def replaced(self, ranks: Sequence[int]) -> None:
        """These ranks live again."""
        self._dead -= set(ranks)
        self._tell_now()

    def close(self) -> None:
        """Tell what was not told yet; nothing follows."""
        if self._timer is not None:
            self._tell_now()

    def _tell_now(self) -> None:
        """What a user can do depends on it."""
        if self._timer is not None:
            self._timer.cancel()
        self._tell()

    def _changed(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_PAUSE_S, self._tell)

    def _tell(self) -> None:
        self._timer = None
        running = (self._running,) if self._running else ()
        news = SessionMoved(cells=self._cells, running=running, dead=tuple(sorted(self._dead)))
        if news != self._told:
            self._told = news
            self._say(news)


class SessionLogs:
    """Switches the ranks between the session's logs and those of a cell.

    Args:
        group: The ranks.
        directory: The session's.
    """

    def __init__(self, group: Group, directory: RunDirectory) -> None:
        self._group = group
        self._directory = directory
        # lines and bytes of those that are lent to a cell
        self._written: dict[int, tuple[int, int]] = {}

    def begin(self, ranks: Iterable[int]) -> None:
        """Let new processes write to the session's logs; what is there stays."""
        for rank in ranks:
            path = self._directory.log_path(rank)
            self._open(rank, 0, os.path.getsize(path) if os.path.exists(path) else 0)

    def lend(self, ranks: Iterable[int]) -> None:
        """A cell begins; it names its own logs. What they have printed so far is the session's."""
        for rank in ranks:
            output = self._group.rank(rank).output
            output.drain()
            self._written[rank] = (output.lines, output.total_bytes)

    def take_back(self, ranks: Iterable[int]) -> None:
        """The cell is over."""
        for rank in ranks:
            lines, size = self._written.pop(rank, (0, 0))
            if self._group.rank(rank).alive:
                self._open(rank, lines, size)

    def _open(self, rank: int, lines: int, size: int) -> None:
        self._group.rank(rank).output.switch_log(self._directory.log_path(rank), lines, size)
