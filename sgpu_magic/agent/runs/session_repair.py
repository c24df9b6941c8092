"""What a session has besides its cells: repair of its group, reports, logs, and questions to idle ranks.

After a cell that broke the process groups, and when dead ranks are replaced, every living rank renews its groups in
place over a new store, so that the user's models and groups keep working. New ranks join over the same store.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.agent.ranks.orders import prepare
from sgpu_magic.agent.ranks.rank_process import GroupStore
from sgpu_magic.agent.runs.run_files import RunFiles
from sgpu_magic.system.message_stream import Pending
from sgpu_magic.wire.events import GroupRenewed, RanksRestarted, SessionMoved
from sgpu_magic.wire.node import Launch
from sgpu_magic.wire.rank import AnswerQuestion, Renew, Renewed
from sgpu_magic.wire.rank_events import OutputWritten
from sgpu_magic.wire.run import RankAnswer, RankQuestion

# gloo's own limit on the ranks is shorter
_PATIENCE_S = 60.0
# receives why it failed, "" for success, and what was lost
_Regrouped = Callable[[str, str], None]
# cells may come every few milliseconds, so changes are reported only this often
_PAUSE_S = 0.2


@dataclass(eq=False, repr=False)
class SessionRepair:
    """Renews process groups or replaces ranks, one operation at a time. A replacement ends with a renewal.

    Args:
        group: The ranks.
        launch: The session's launch, with which new ranks start.
        scratch: Directory for files on systems without memory files.
        news: Reports dead and replaced ranks.
        say: Reports the result.
        replaced: Called with the replaced ranks as soon as their new processes exist; they have yet to join.
    """

    group: Group
    launch: Launch
    scratch: Path
    news: SessionEvents
    say: Callable[[GroupRenewed | RanksRestarted], None]
    replaced: Callable[[Sequence[int]], None]

    def __post_init__(self) -> None:
        # the current renewal: its callback, ranks that have yet to answer, and their answers
        self._regrouped: _Regrouped | None = None
        self._waiting: set[int] = set()
        self._problem = self._lost = ""
        self._timer: asyncio.TimerHandle | None = None
        # the current replacement: the killed ranks and its callback
        self._replacing: tuple[int, ...] = ()
        self._done: Callable[[str], None] | None = None

    @property
    def busy(self) -> bool:
        """Whether the ranks can't take a cell now."""
        return self._regrouped is not None or bool(self._replacing)

    def expects(self, rank: int) -> bool:
        """Whether the rank is being killed on purpose."""
        return rank in self._replacing

    def renew(self, reason: str, done: Callable[[GroupRenewed], None]) -> None:
        """Renew the process groups, report the result and call `done` with it. Every rank must be alive and idle."""

        def renewed(problem: str, lost: str) -> None:
            news = GroupRenewed(reason=reason, lost=lost, problem=problem)
            self.say(news)
            done(news)

        self._regroup((), renewed)

    def replace(self, ranks: Sequence[int], done: Callable[[str], None]) -> None:
        """Kill these ranks. Call `go_on` when one has died, and when no cell uses them any more.

        Args:
            ranks: The ranks to replace.
            done: Called with why the replacement failed, "" when the new ranks have joined.
        """
        self._replacing, self._done = tuple(ranks), done
        for rank in ranks:
            self.group.rank(rank).signal(signal.SIGKILL, whole_session=True)

    def go_on(self) -> None:
        """Fork the new ranks once all old ones have ended, with everything that they had started."""
        ranks = self._replacing
        if not ranks or self._regrouped is not None or not all(self.group.rank(rank).gone for rank in ranks):
            return
        self._regroup(ranks, self._end_replacement)
        if self._replacing:
            self.replaced(ranks)

    def fail(self, problem: str) -> None:
        """Fail the current renewal or replacement, if any."""
        if self._regrouped is not None:
            self._end_regrouping(problem)
        elif self._replacing:
            self._end_replacement(problem, "")

    # ------------------------------------------------------------ from the ranks

    def joined(self, rank: int) -> None:
        """Handle that a rank has joined the process group."""
        self._waiting.discard(rank)
        if not self._waiting:
            self._end_regrouping(self._problem)

    def renewed(self, rank: int, message: Renewed) -> None:
        """Handle that a rank has renewed its groups, or has failed to."""
        self._problem = self._problem or message.problem
        self._lost = self._lost or message.lost
        self.joined(rank)

    def died(self, rank: int) -> None:
        """Fail the current renewal, which needs the dead rank."""
        self._end_regrouping(f"rank {rank} died in the meantime")

    # ------------------------------------------------------------ within

    def _regroup(self, replaced: Sequence[int], regrouped: _Regrouped) -> None:
        """Renew the process groups over a new store.

        Args:
            replaced: Ranks to fork again; they are dead, and all others are alive.
            regrouped: Called once with the result.
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


# ---------------------------------------------------------------- reports and the ranks' logs


class SessionEvents:
    """Reports the number of cells, the running cell and the dead ranks.

    Args:
        say: Reports an event.
    """

    def __init__(self, say: Callable[[SessionMoved], None]) -> None:
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._cells = 0
        self._running = ""
        self._dead: set[int] = set()
        self._last_reported = SessionMoved(cells=0)
        self._timer: asyncio.TimerHandle | None = None

    def began(self, name: str) -> None:
        """Note that a cell has started."""
        self._cells += 1
        self._running = name
        self._changed()

    def over(self) -> None:
        """Note that the cell is over."""
        self._running = ""
        self._changed()

    def died(self, rank: int) -> None:
        """Report that a rank is dead."""
        self._dead.add(rank)
        self._tell_now()

    def replaced(self, ranks: Sequence[int]) -> None:
        """Report that ranks were replaced."""
        self._dead -= set(ranks)
        self._tell_now()

    def close(self) -> None:
        """Report the pending change, if any."""
        if self._timer is not None:
            self._tell_now()

    def _tell_now(self) -> None:
        """Report without delay, since it affects what the user can do."""
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
        if news != self._last_reported:
            self._last_reported = news
            self._say(news)


class SessionLogs:
    """Switches the ranks between the session's logs and those of a cell.

    Args:
        group: The ranks.
        files: The session's files.
    """

    def __init__(self, group: Group, files: RunFiles) -> None:
        self._group = group
        self._files = files
        # lines and bytes in the session's logs of ranks that are lent to a cell
        self._written: dict[int, tuple[int, int]] = {}
        # the files of the last cell of each rank
        self._last: dict[int, RunFiles] = {}

    def begin(self, ranks: Iterable[int]) -> None:
        """Let new processes append to the session's logs."""
        for rank in ranks:
            path = self._files.log_path(rank)
            self._open(rank, 0, os.path.getsize(path) if os.path.exists(path) else 0)

    def lend(self, ranks: Iterable[int], files: RunFiles) -> None:
        """Write pending output to the session's logs before a cell sets its own.

        Args:
            ranks: The ranks that run the cell.
            files: The cell's files.
        """
        for rank in ranks:
            self._last[rank] = files
            output = self._group.rank(rank).output
            output.drain()
            self._written[rank] = (output.lines, output.total_bytes)

    def add_late(self, batch: OutputWritten) -> None:
        """Add what a rank prints between cells to the log of its last cell, whose threads have most likely printed it.

        The session's own log and view have it too.
        """
        if (files := self._last.get(batch.rank)) is not None and batch.text:
            # the directory may be removed by now
            with contextlib.suppress(OSError), open(files.log_path(batch.rank), "a", encoding="utf-8") as log:
                log.write(batch.text)

    def take_back(self, ranks: Iterable[int]) -> None:
        """Switch the ranks back to the session's logs after a cell."""
        for rank in ranks:
            lines, size = self._written.pop(rank, (0, 0))
            if self._group.rank(rank).alive:
                self._open(rank, lines, size)

    def _open(self, rank: int, lines: int, size: int) -> None:
        self._group.rank(rank).output.switch_log(self._files.log_path(rank), lines, size)


# ---------------------------------------------------------------- questions to idle ranks


Answered = Callable[[RankAnswer], None]


class Questions:
    """Sends questions to idle ranks of a session and delivers the answers.

    Args:
        group: The session's ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._asked = Pending[int, tuple[int, Answered]]()

    def ask(self, request: int, question: RankQuestion, done: Answered, *, busy: bool) -> None:
        """Ask a rank; `done` is called with its answer, or with the reason why there is none.

        Args:
            request: The question's number.
            question: The question and its rank.
            done: Receives the answer.
            busy: Whether the ranks can't answer now.
        """
        rank = question.rank
        if not 0 <= rank < len(self._group.ranks) or not self._group.rank(rank).alive:
            done(RankAnswer(problem=f"there is no rank {rank}"))
        elif busy:
            done(RankAnswer(problem=f"rank {rank} is busy"))
        else:
            self._asked[request] = rank, done
            self._group.order(rank, AnswerQuestion(request=request, question=question))

    def answered(self, request: int, answer: RankAnswer) -> None:
        """Deliver a rank's answer."""
        if (asked := self._asked.pop(request, None)) is not None:
            asked[1](answer)

    def died(self, rank: int) -> None:
        """Answer the dead rank's pending questions with a problem."""
        for _, done in self._asked.take_all(lambda asked: asked[0] == rank):
            done(RankAnswer(problem=f"rank {rank} has died"))
