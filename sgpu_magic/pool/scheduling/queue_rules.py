"""The order in which waiting runs get devices. Pure.

- Within a line (one device type, or the CPU slots) and a user: first come, first served. A later run that fits may pass
  an earlier one that does not.
- Between users: `fair_share`.
- `pass_over_s` after a run was first passed, no later run of its user may pass it any more: freed devices are kept for
  it, unless it could not run here even if nothing else did. Likewise, `pass_over_s` after a later run of another user
  first got devices before a user's first run, freed devices are kept for that run; only one node if it needs one.
- Devices that only an autoscaler can provide are requested with a lease that has no devices yet.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable

import msgspec

from sgpu_magic.pool.scheduling.capacity import STRICT_PACK, QueueKey, ResourceRequest
from sgpu_magic.pool.scheduling.costs import CostRules
from sgpu_magic.pool.scheduling.end_reason import BudgetExhausted, WaitsForOwnSessions
from sgpu_magic.pool.scheduling.fair_share import FairShare
from sgpu_magic.pool.scheduling.placement import FreeCapacity
from sgpu_magic.pool.scheduling.placement_refusal import PlacementRefusal
from sgpu_magic.pool.scheduling.placement_request import on_nodes, resolve, too_large
from sgpu_magic.pool.scheduling.queue_status import Blockers, by_line, unfreed_devices, wait_limit_reached
from sgpu_magic.pool.scheduling.run import ScheduledRun
from sgpu_magic.pool.scheduling.run_table import RunTable
from sgpu_magic.pool.scheduling.stimuli import Instruction, LaunchRun
from sgpu_magic.wire.base import ErrorKind, RunKind
from sgpu_magic.wire.devices import ANY, Inventory, Lease, Placement, memory_of

Waiting = list[tuple[ScheduledRun, ResourceRequest]]


class _Round(msgspec.Struct):
    """The state of one line while its devices are granted.

    Args:
        line: The line.
        waiting: By user, the waiting runs that were not considered yet, the last one first.
        skipped: By user, the runs that got nothing.
        given: By user, the number of the newest run that got something.
        unfit: Requests that did not fit, and will not in this round, since free capacity only shrinks.
        kept: Nodes that are kept for a run.
        unaffordable: By type, why the budget keeps runs from starting; None when it does not.
        out: The resulting instructions, by the runs' numbers.
    """

    line: QueueKey
    waiting: dict[str, Waiting] = msgspec.field(default_factory=dict[str, Waiting])
    skipped: dict[str, Waiting] = msgspec.field(default_factory=dict[str, Waiting])
    given: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    unfit: set[ResourceRequest] = msgspec.field(default_factory=set[ResourceRequest])
    kept: set[str] = msgspec.field(default_factory=set[str])
    unaffordable: dict[str, BudgetExhausted | None] = msgspec.field(default_factory=dict[str, "BudgetExhausted | None"])
    out: dict[int, list[Instruction]] = msgspec.field(default_factory=dict[int, "list[Instruction]"])


class QueueRules:
    """Decides which waiting runs get which devices now.

    Args:
        table: The scheduler's runs.
        costs: Has the prices, and decides which requests can't start now because of the budget.
        fair: Decides which user is next.
        inventory: What the pool has; None while unknown.
        pass_over_s: Seconds from the first time a run is passed over until no run may pass it.

    Attributes:
        room: What is free; nothing while the pool's devices are unknown.
        knows_devices: Whether the pool's devices are known.
    """

    def __init__(
        self, table: RunTable, costs: CostRules, fair: FairShare, inventory: Inventory | None, pass_over_s: float
    ) -> None:
        self._table = table
        self._costs = costs
        self._fair = fair
        self._pass_over_s = pass_over_s
        self._leases_given = 0
        self.room = FreeCapacity(inventory or Inventory(host="", cpu_slots=0))
        self.knows_devices = inventory is not None
        # requests resolved against the current inventory; sessions have separate entries
        self._meant: dict[tuple[Placement, bool], ResourceRequest | PlacementRefusal] = {}

    def leased(self, run: ScheduledRun, had: Lease | None, has: Lease | None) -> None:
        """Update the accounts after a run's lease changed from `had` to `has`."""
        if had is not None:
            self._fair.gave_back(run, had, self._table.now)
            self.room.release(run.run_id, had)
        if has is not None:
            self._fair.took(run, has, self._table.now)
            self._assign(run, has)

    def take_inventory(self, inventory: Inventory) -> bool:
        """Take a new inventory, which clears the engine's refusals. Returns False when nothing has changed."""
        if self.knows_devices and not self.room.refused and inventory == self.room.stock.inventory:
            return False
        self.room, self.knows_devices = FreeCapacity(inventory), True
        self._meant.clear()
        for run in self._table.runs.values():
            if run.held_lease is not None:
                self._assign(run, run.held_lease)
        return True

    def resolve(self, run: ScheduledRun) -> ResourceRequest | PlacementRefusal:
        """Return what a run takes in this pool, or why it can't be placed. Call it once the devices are known."""
        room, placement = self.room, run.spec.placement
        is_session = room.stock.many and run.is_session
        if is_session and (refusal := on_nodes(run.spec)):
            return PlacementRefusal(ErrorKind.SESSION, refusal)
        key = (placement, is_session)
        if key in self._meant:
            return self._meant[key]
        if is_session:
            placement = msgspec.structs.replace(placement, strategy=STRICT_PACK)

        def choose(requests: list[ResourceRequest]) -> ResourceRequest:
            """Return the type that the run already waits for; else the cheapest that is free, as clients choose it.

            Without prices, the type with the least memory counts as the cheapest.
            """
            before = [request for request in requests if run.request is not None and request.line == run.request.line]
            return min(before or requests, key=rank_of)

        def rank_of(request: ResourceRequest) -> tuple[bool, bool, float, bool, int, int]:
            price, free = self._costs.tariff.price_of(request.device_type), room.free(request)
            size = memory_of(request.device_type)
            return free < request.ranks, price is None, price or 0.0, request.simulated, size, -free

        found = resolve(placement, room.stock, choose)
        meant = found if isinstance(found, ResourceRequest) else PlacementRefusal(ErrorKind.USAGE, found)
        if is_session and not isinstance(found, ResourceRequest):
            anywhere = resolve(run.spec.placement, room.stock, choose)
            if isinstance(anywhere, ResourceRequest):
                meant = PlacementRefusal(ErrorKind.SESSION, too_large(anywhere, room.stock))
        # `any` is not cached: which type is free changes with every run
        if placement.device_type != ANY and not placement.min_memory_bytes:
            self._meant[key] = meant
        return meant

    def next_deadline(self) -> float | None:
        """Return when freed devices are next kept for another passed run; None if no run is waiting for that."""
        times = [at for run in self._table.waiting() for at in (run.passed_at, run.overtaken_at) if at is not None]
        return min((at + self._pass_over_s for at in times if not self._aged(at)), default=None)

    def advance(self) -> list[Instruction]:
        """Grant what is free, and end the runs whose waiting time is over."""
        out = self._start_waiting()
        # a run that gives up may release devices that were kept for it: place the runs behind it
        while given_up := self._give_up():
            out += given_up
            out += self._start_waiting()
        return out

    def waiting(self) -> dict[QueueKey, Waiting]:
        """Return, by line, the runs that wait for its devices, in order of submission."""
        return by_line(self._table.waiting())

    def keepers(self, lines: dict[QueueKey, Waiting]) -> Blockers:
        """Return the runs that freed devices are kept for."""
        of_users: dict[tuple[QueueKey, str], str] = {}
        of_lines: dict[QueueKey, tuple[str, ...]] = {}
        nodes: dict[str, str] = {}
        for line, waiting in lines.items():
            users: dict[str, Waiting] = {}
            for run, request in waiting:
                user = run.spec.owner.user
                users.setdefault(user, []).append((run, request))
                if (line, user) not in of_users and self._aged(run.passed_at) and self.room.fits_when_empty(request):
                    of_users[line, user] = run.run_id
            first = self._long_overtaken(users.values())
            of_lines[line] = tuple(run.run_id for run, _ in first)
            for run, request in first:
                if (node := self.room.kept_node(request, nodes.values())) is not None:
                    nodes[run.run_id] = node
        return Blockers(of_users, of_lines, nodes)

    # ------------------------------------------------------------ internals

    def _assign(self, run: ScheduledRun, lease: Lease) -> None:
        session = run.spec.name if run.spec.kind is RunKind.SESSION else None
        self.room.add(run.run_id, lease, run.number, shared=run.orphaned, session=session)

    def _start_waiting(self) -> list[Instruction]:
        out: dict[int, list[Instruction]] = {}
        for line, waiting in self.waiting().items():
            out |= self._start_line(_Round(line), waiting)
        return [instruction for number in sorted(out) for instruction in out[number]]

    def _start_line(self, line: _Round, waiting: Waiting) -> dict[int, list[Instruction]]:
        for run, request in reversed(waiting):
            line.waiting.setdefault(run.spec.owner.user, []).append((run, request))
        several = len(line.waiting) > 1
        if several and not self._keepers_first(line):
            return line.out

        def turn(user: str) -> tuple[tuple[float, float], int, str]:
            # the user's new leases already count
            return self._fair.rank(line.line, user, self._table.now), line.waiting[user][-1][0].number, user

        turns = [turn(user) for user, runs in line.waiting.items() if runs]
        heapq.heapify(turns)
        while turns:
            user = heapq.heappop(turns)[2]
            if self._serve(line, user) and line.waiting[user]:
                heapq.heappush(turns, turn(user))
        if several:
            self._note_overtaken(line)
        return line.out

    def _keepers_first(self, line: _Round) -> bool:
        """Serve users' first runs that were overtaken too long ago. Returns False if all devices are kept for one."""
        for run, request in self._long_overtaken(map(reversed, line.waiting.values())):
            if self._costs.exhausted_budget(request):
                continue
            user = run.spec.owner.user
            line.waiting[user].remove((run, request))
            if self._give(line, run, request):
                continue
            line.skipped.setdefault(user, []).append((run, request))
            if (node := self.room.kept_node(request, line.kept)) is None:
                return False
            line.kept.add(node)
        return True

    def _head(
        self, runs: Iterable[tuple[ScheduledRun, ResourceRequest]]
    ) -> tuple[ScheduledRun, ResourceRequest] | None:
        """Return the first of a user's runs that is within the user's quota."""
        return next(((run, request) for run, request in runs if not self._fair.over_quota(run, request)), None)

    def _long_overtaken(self, users: Iterable[Iterable[tuple[ScheduledRun, ResourceRequest]]]) -> Waiting:
        """Return the users' first runs that other users overtook more than `pass_over_s` ago, longest ago first.

        Args:
            users: Each user's runs, in order of submission.
        """
        heads = [head for runs in users if (head := self._head(runs)) is not None]
        aged = [
            (run, request)
            for run, request in heads
            if self._aged(run.overtaken_at) and self.room.fits_when_empty(request)
        ]
        return sorted(aged, key=lambda head: (head[0].overtaken_at or 0.0, head[0].number))

    def _serve(self, line: _Round, user: str) -> bool:
        """Grant devices to the user's next run that fits. Returns False when no run is left that may get any."""
        runs = line.waiting[user]
        while runs:
            run, request = runs.pop()
            if request.device_type not in line.unaffordable:
                line.unaffordable[request.device_type] = self._costs.exhausted_budget(request)
            if unaffordable := line.unaffordable[request.device_type]:
                line.out[run.number] = self._table.give_up(run, unaffordable)
                continue
            if not self._fair.over_quota(run, request) and self._give(line, run, request):
                return True
            line.skipped.setdefault(user, []).append((run, request))
            if self._aged(run.passed_at) and self.room.fits_when_empty(request):
                runs.clear()
        return False

    def _give(self, line: _Round, run: ScheduledRun, request: ResourceRequest) -> bool:
        if request in line.unfit:
            return False
        # deterministic: the same stimuli yield the same IDs
        lease_id = hashlib.blake2b(f"{run.run_id} {self._leases_given}".encode(), digest_size=4).hexdigest()
        granted = self.room.grant(request, lease_id, without=line.kept)
        lease = granted or self.room.ask(request, lease_id)
        if lease is None:
            line.unfit.add(request)
            return False
        self._leases_given += 1
        asked, user = granted is None, run.spec.owner.user
        meter = self._costs.tariff.metered(run.meter, lease)
        self._table.change(run, lease=lease, accepted=True, meter=meter, asked=asked)
        line.out[run.number] = [LaunchRun(run.run_id, lease)]
        line.given[user] = max(line.given.get(user, 0), run.number)
        for passed, _ in line.skipped.get(user, ()):
            if passed.passed_at is None and passed.number < run.number:
                self._table.change(passed, passed_at=self._table.now)
        return True

    def _note_overtaken(self, line: _Round) -> None:
        """Mark each user's first waiting run as overtaken if a later run of another user got devices."""
        if not line.given:
            return
        for user in line.waiting:
            newest = max((number for other, number in line.given.items() if other != user), default=0)
            left = [*line.skipped.get(user, ()), *line.waiting[user]]
            head = self._head(sorted(left, key=lambda item: item[0].number))
            if head is not None and head[0].overtaken_at is None and head[0].number < newest:
                self._table.change(head[0], overtaken_at=self._table.now)

    def _give_up(self) -> list[Instruction]:
        """End or refuse the runs whose waiting time is over, or that nothing but their owner's sessions can free."""
        waiting = [(run, run.request) for run in self._table.waiting() if run.request is not None]
        if blocked := self._blocked_by_own_sessions(waiting):
            return blocked
        due = [(run, request) for run, request in waiting if self._table.waited_in_vain(run)]
        keepers = self.keepers(self.waiting()) if due else Blockers()
        unfreed = unfreed_devices(self._table)
        given_up = [
            self._table.give_up(run, wait_limit_reached(run, request, self.room, keepers, unfreed))
            for run, request in due
        ]
        return [instruction for instructions in given_up for instruction in instructions]

    def _blocked_by_own_sessions(self, waiting: Waiting) -> list[Instruction]:
        """End or refuse the runs that could start only if sessions ended of the process that waits for them."""
        sessions = self._table.sessions_by_owner()
        out: list[Instruction] = []
        for run, request in waiting if sessions else ():
            if not run.spec.blocks_owner or run.spec.wait_s is not None:
                continue
            held = self.room.held_by(request, sessions.get(run.spec.owner.process, ()))
            if held and self.room.fits_when_empty(request) and not self.room.fits_beside(request, held):
                reason = WaitsForOwnSessions(self.room.need(request), self.room.free(request), request.line, held)
                out += self._table.give_up(run, reason)
        return out

    def _aged(self, since: float | None) -> bool:
        return since is not None and self._table.now >= since + self._pass_over_s
