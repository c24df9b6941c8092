"""In which order waiting runs get devices, and what they are told meanwhile. Pure.

- First come, first served within a line (one device type, or the CPU slots). A later run that fits may pass an
  earlier one that does not.
- A run that was first passed over `pass_over_s` ago lets nothing of its line pass any more, so that what becomes free
  is kept for it; unless it could not run here even if nothing else did.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from sgpu_magic.pool import session_rules
from sgpu_magic.pool.cost_rules import CostRules
from sgpu_magic.pool.placement import Line, Room, Want
from sgpu_magic.pool.prices import Tariff
from sgpu_magic.pool.run_table import RunTable
from sgpu_magic.pool.scheduled_run import ScheduledRun, waited_in_vain, waits_for
from sgpu_magic.pool.stimuli import Instruction, LaunchRun, TellQueue
from sgpu_magic.protocol.devices import Inventory


class QueueRules:
    """Decides who gets which devices now.

    Args:
        table: The scheduler's runs.
        costs: Say what may not begin now because of the budget.
        tariff: The pool's prices.
        inventory: What the node has; None while that is not known: nothing is given then.
        pass_over_s: Seconds from the first time a run is passed over until nothing may pass it.

    Attributes:
        inventory: As the node was last seen.
    """

    def __init__(
        self, table: RunTable, costs: CostRules, tariff: Tariff, inventory: Inventory | None, pass_over_s: float
    ) -> None:
        self._table = table
        self._costs = costs
        self._tariff = tariff
        self._pass_over_s = pass_over_s
        self._refused: dict[str, str] = {}
        self._leases_given = 0
        self.inventory = inventory

    @property
    def room(self) -> Room | None:
        """What is free; None while the node is not known."""
        if self.inventory is None:
            return None
        return Room(self.inventory, session_rules.held_leases(self._table.runs.values()), self._refused)

    def seen(self, inventory: Inventory) -> None:
        """The node was looked at: what the engine refused may be had again."""
        self.inventory = inventory
        self._refused.clear()

    def refused(self, uuids: Iterable[str], why: str) -> None:
        """The engine can't have these devices: they are given to nobody until the node was looked at again."""
        self._refused.update(dict.fromkeys(uuids, why))

    def next_deadline(self, now: float) -> float | None:
        """When what becomes free begins to be kept for a run that was passed, None when for none more."""
        kept_from = [
            run.passed_at + self._pass_over_s
            for run in self._table.runs.values()
            if run.lease is None and run.passed_at is not None
        ]
        return min((time for time in kept_from if time > now), default=None)

    def settle(self, now: float) -> list[Instruction]:
        """Give out what is free, end the runs that waited in vain, and tell the others where they stand."""
        out = self._place(now)
        # a run that gives up may have kept devices for itself: those behind it get their turn
        while given_up := self._give_up(now):
            out += given_up
            out += self._place(now)
        return out + self._tell()

    # ------------------------------------------------------------ within

    def _place(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        room = self.room
        if room is None:
            return out
        closed: set[Line] = set()
        skipped: dict[Line, list[str]] = {}
        for run, want in self._waiting():
            if want.line in closed:
                continue
            if unaffordable := self._costs.over_budget(want, now):
                out += self._table.give_up(run, unaffordable)
                continue
            lease = room.grant(want, self._lease_id(run.run_id))
            if lease is None:
                skipped.setdefault(want.line, []).append(run.run_id)
                if self._keeps_devices(run, want, room):
                    closed.add(want.line)
                continue
            room.take(run.run_id, lease)
            self._leases_given += 1
            hourly = self._tariff.hourly(lease)
            self._table.put(replace(run, lease=lease, told=None, accepted=True, hourly=hourly))
            out.append(LaunchRun(run.run_id, lease))
            for passed in (self._table.runs[run_id] for run_id in skipped.pop(want.line, ())):
                if passed.passed_at is None:
                    self._table.put(replace(passed, passed_at=now))
        return out

    def _give_up(self, now: float) -> list[Instruction]:
        """End, or not even accept, the runs whose time in the queue is over."""
        out: list[Instruction] = []
        room = self.room
        if room is None:
            return out
        keepers = self._keepers(room)
        for run, want in self._waiting():
            deadline = self._table.queue_deadline(run)
            if deadline is None or now < deadline:
                continue
            out += self._table.give_up(run, waited_in_vain(run, want, room, keepers))
        return out

    def _tell(self) -> list[Instruction]:
        out: list[Instruction] = []
        positions: Counter[Line | str | None] = Counter()
        room = self.room
        keepers = {} if room is None else self._keepers(room)
        for run in tuple(self._table.runs.values()):
            if run.lease is not None:
                continue
            if run.spec.session:
                line, reason = run.spec.session, session_rules.obstacle(self._table.runs, run)
            elif room is None or run.want is None:
                line, reason = None, "the pool is still looking for its devices"
            else:
                line, reason = run.want.line, waits_for(run, run.want, room, keepers)
            positions[line] += 1
            told = (positions[line], reason)
            if told != run.told:
                out.append(TellQueue(run.run_id, *told))
            if told != run.told or run.accepted != (line is not None):
                self._table.put(replace(run, told=told, accepted=line is not None))
        return out

    def _waiting(self) -> list[tuple[ScheduledRun, Want]]:
        return [(run, run.want) for run in self._table.runs.values() if run.lease is None and run.want is not None]

    def _keeps_devices(self, run: ScheduledRun, want: Want, room: Room) -> bool:
        if run.passed_at is None or self._table.now < run.passed_at + self._pass_over_s:
            return False
        return room.fits_when_empty(want)

    def _keepers(self, room: Room) -> dict[Line, str]:
        """By line, the first run that freed devices are kept for."""
        keepers: dict[Line, str] = {}
        for run, want in self._waiting():
            if want.line not in keepers and self._keeps_devices(run, want, room):
                keepers[want.line] = run.run_id
        return keepers

    def _lease_id(self, run_id: str) -> str:
        """An id for the next lease; the same stimuli give the same ids."""
        return hashlib.blake2b(f"{run_id} {self._leases_given}".encode(), digest_size=4).hexdigest()
