"""Where each waiting run stands and what it waits for: who is told when. Pure.

Up to `AT_ONCE` waiting runs are told of every change at once. Of more, the new ones and the first of each line are, and
the others so seldom that `PER_S` are told in a second: a pool where 500 wait would do nothing else. Who asks gets all
as it is at that moment.
"""

from __future__ import annotations

from sgpu_magic.pool.scheduling import session_rules
from sgpu_magic.pool.scheduling.capacity import Line
from sgpu_magic.pool.scheduling.fair_share import FairShare
from sgpu_magic.pool.scheduling.placement_request import Want
from sgpu_magic.pool.scheduling.queue_rules import QueueRules
from sgpu_magic.pool.scheduling.run import Run
from sgpu_magic.pool.scheduling.run_table import RunTable
from sgpu_magic.pool.scheduling.stimuli import Instruction, TellQueue
from sgpu_magic.pool.scheduling.waiting_words import Keepers, asked_for, waits_for

AT_ONCE = 64
"""So many runs may wait before some are told later."""
PER_S = 100.0
_FIRST = 4

Told = tuple[int, str]


class QueueWords:
    """Tells those that wait.

    Args:
        table: The scheduler's runs.
        queue: Who gets what.
        fair: Whose turn it is.
    """

    def __init__(self, table: RunTable, queue: QueueRules, fair: FairShare) -> None:
        self._table = table
        self._queue = queue
        self._fair = fair
        # of many: when all were told last, and whether somebody has not been since
        self._told_at = float("-inf")
        self._behind = False

    def tell(self, now: float) -> list[Instruction]:
        """Tell those whose place or reason changed."""
        moment = _Moment(self._table, self._queue, self._fair, now)
        count = self._table.count_waiting()
        told_later = count > AT_ONCE and now < self._told_at + count / PER_S
        if told_later:
            self._behind = True
        else:
            self._told_at = now
            self._behind = False
        out: dict[int, Instruction] = {}
        for run, line, position in moment.places(only_first=told_later):
            if told_later and run.told is not None and position > _FIRST:
                continue
            told = (position, moment.reason(run))
            if told != run.told:
                out[self._table.number(run.run_id)] = TellQueue(run.run_id, *told)
            if told != run.told or run.accepted != (line is not None):
                self._table.change(run, told=told, accepted=line is not None)
        return [out[number] for number in sorted(out)]

    def now(self) -> dict[str, Told]:
        """Return the place and the reason of each run that waits, as it is now."""
        moment = _Moment(self._table, self._queue, self._fair, self._table.now)
        return {run.run_id: (position, moment.reason(run)) for run, _, position in moment.places()}

    def next_deadline(self) -> float | None:
        """When those who were not told of a change are told."""
        return self._told_at + self._table.count_waiting() / PER_S if self._behind else None


class _Moment:
    """The queue at one moment; runs that want the same are told the same."""

    def __init__(self, table: RunTable, queue: QueueRules, fair: FairShare, now: float) -> None:
        self._table = table
        self._fair = fair
        self._now = now
        self._room = queue.room
        self._lines = {} if self._room is None else queue.waiting()
        self._keepers = Keepers() if self._room is None else queue.keepers(self._room, self._lines)
        self._found: dict[tuple[Want, str], str] = {}

    def places(self, *, only_first: bool = False) -> list[tuple[Run, Line | str | None, int]]:
        """Return the runs that wait, each with its line or session and its place there; cells after their sessions.

        Args:
            only_first: Only the first of the lines in which all know their places are asked for.
        """
        found: list[tuple[Run, Line | str | None, int]] = []
        asked = self._table.asked()
        for line in [*self._lines, *(line for line in asked if line not in self._lines)]:
            first = self._keepers.of_lines.get(line, ())
            waiting = self._lines.get(line, [])
            most = _FIRST if only_first and all(run.told is not None for run, _ in waiting) else None
            order = self._fair.in_order(line, waiting, first, self._now, most)
            found += [(run, line, place) for place, run in enumerate([*asked.get(line, ()), *order], 1)]
        lost = [run for run in self._table.waiting() if self._room is None or run.want is None]
        found += [(run, None, place) for place, run in enumerate(lost, 1)]
        places: dict[str, int] = {}
        for cell in self._table.waiting_cells():
            session = cell.spec.session
            places[session] = places.get(session, 0) + 1
            found.append((cell, session, places[session]))
        return found

    def reason(self, run: Run) -> str:
        """Return what a run waits for."""
        room, want = self._room, run.want
        if run.spec.session:
            return session_rules.obstacle(self._table, run, self._table.runs[run.spec.session])
        if room is None or want is None:
            return "the pool is still looking for its devices"
        if run.asked:
            return asked_for(want, room)
        if over := self._fair.over_quota(run, want):
            return over
        if self._keepers.keeps(run, want):
            return waits_for(run, want, room, self._keepers)
        key = (want, self._keepers.of_users.get((want.line, run.spec.owner.user), ""))
        if key not in self._found:
            self._found[key] = waits_for(run, want, room, self._keepers)
        return self._found[key]
