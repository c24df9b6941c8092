"""Finds each waiting run's position, and what it waits for. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.pool.scheduling.capacity import CPU_LINE, QueueKey, ResourceRequest, line_of_lease
from sgpu_magic.pool.scheduling.end_reason import InUse, WaitLimitReached
from sgpu_magic.pool.scheduling.fair_share import FairShare
from sgpu_magic.pool.scheduling.placement import FreeCapacity
from sgpu_magic.pool.scheduling.run import ScheduledRun
from sgpu_magic.pool.scheduling.run_table import RunTable
from sgpu_magic.pool.scheduling.wait_reason import (
    Availability,
    CellActivity,
    DeviceBlocker,
    DevicesReserved,
    DevicesUnknown,
    HeldByRun,
    Holders,
    NodeFree,
    NodeReserved,
    NodeShortage,
    NodesRequested,
    QueueStatus,
    SessionObstacle,
    SessionOccupied,
    SessionQueued,
    SessionRestarting,
    SessionStarting,
    Shortage,
    UnfreedDevices,
    WaitReason,
)
from sgpu_magic.wire.base import RunState

if TYPE_CHECKING:
    from sgpu_magic.pool.scheduling.queue_rules import QueueRules


def by_line(runs: Iterable[ScheduledRun]) -> dict[QueueKey, list[tuple[ScheduledRun, ResourceRequest]]]:
    """Return the runs whose requests are resolved, by the line in which they wait."""
    lines: dict[QueueKey, list[tuple[ScheduledRun, ResourceRequest]]] = {}
    for run in runs:
        if run.request is not None:
            lines.setdefault(run.request.line, []).append((run, run.request))
    return lines


class Blockers(msgspec.Struct, frozen=True):
    """The runs that freed devices are kept for, because others passed them too long ago.

    Args:
        of_users: By line and user, the run that the user's own later runs may not pass.
        of_lines: By line, the runs that no other run may pass, in order.
        nodes: By run, the single node that is kept for it; the whole line is kept for runs that are not in it.
    """

    of_users: Mapping[tuple[QueueKey, str], str] = msgspec.field(default_factory=dict[tuple[QueueKey, str], str])
    of_lines: Mapping[QueueKey, tuple[str, ...]] = msgspec.field(default_factory=dict[QueueKey, tuple[str, ...]])
    nodes: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])

    def before(self, run: ScheduledRun, request: ResourceRequest) -> str:
        """Return the run that free devices are kept for; this run itself if there is no other."""
        others = [one for one in self.of_lines.get(request.line, ()) if one not in self.nodes]
        return next(iter(others), self.of_users.get((request.line, run.spec.owner.user), run.run_id))

    def keeps(self, run: ScheduledRun, request: ResourceRequest) -> bool:
        """Whether devices are kept for this run."""
        own = self.of_users.get((request.line, run.spec.owner.user)) == run.run_id
        return own or run.run_id in self.of_lines.get(request.line, ())


class QueueSnapshot:
    """The queue at one moment. Runs with the same request share a reason.

    Args:
        table: The scheduler's runs.
        queue: Decides which run gets which devices.
        fair: Decides which user is next.
    """

    def __init__(self, table: RunTable, queue: QueueRules, fair: FairShare) -> None:
        self._table = table
        self._fair = fair
        self._room = queue.room
        self._lines = queue.waiting()
        self._keepers = queue.keepers(self._lines)
        self._unfreed = unfreed_devices(table)
        self._sessions = table.sessions_by_owner()
        self._found: dict[tuple[ResourceRequest, str | None], WaitReason] = {}

    def positions(self, most: int | None = None, known: Collection[int] = ()) -> list[tuple[ScheduledRun, int]]:
        """Return the waiting runs with their positions; cells after their sessions.

        Args:
            most: How many runs of a line to return if all its runs are `known`; None for all.
            known: Numbers of runs.
        """
        found: list[tuple[ScheduledRun, int]] = []
        asked = by_line(self._table.awaiting_nodes())
        for line in [*self._lines, *(line for line in asked if line not in self._lines)]:
            first = self._keepers.of_lines.get(line, ())
            waiting = self._lines.get(line, [])
            only = most if all(run.number in known for run, _ in waiting) else None
            order = self._fair.in_order(line, waiting, first, self._table.now, only)
            found += [
                (run, position) for position, run in enumerate([*(run for run, _ in asked.get(line, ())), *order], 1)
            ]
        unresolved = [run for run in self._table.waiting() if run.request is None]
        found += [(run, position) for position, run in enumerate(unresolved, 1)]
        positions: dict[str, int] = {}
        for cell in self._table.waiting_cells():
            session = cell.spec.session
            positions[session] = positions.get(session, 0) + 1
            found.append((cell, positions[session]))
        return found

    def statuses(self) -> dict[str, QueueStatus]:
        """Return the position and reason of each waiting run."""
        return {run.run_id: self.status(run, position) for run, position in self.positions()}

    def status(self, run: ScheduledRun, position: int) -> QueueStatus:
        """Return a waiting run's status; `position` is that of `positions`."""
        return QueueStatus(position, self.reason(run), self._own_sessions(run))

    def _own_sessions(self, run: ScheduledRun) -> tuple[HeldByRun, ...]:
        if run.spec.session or run.request is None:
            return ()
        return self._room.held_by(run.request, self._sessions.get(run.spec.owner.process, ()))

    def reason(self, run: ScheduledRun) -> WaitReason:
        """Return what a waiting run waits for."""
        room, request = self._room, run.request
        if run.spec.session:
            obstacle = session_obstacle(self._table, run)
            if isinstance(obstacle, SessionQueued):
                return SessionQueued(self.reason(self._table.runs[run.spec.session]))
            # without an obstacle it is launched at the next stimulus
            return SessionStarting() if obstacle is None else obstacle
        if request is None:
            return DevicesUnknown()
        if run.asked:
            return NodesRequested(request, _availability(request, room), _coming(room))
        if excess := self._fair.over_quota(run, request):
            return excess
        kept_for = self._keepers.of_users.get((request.line, run.spec.owner.user))
        key = (request, run.run_id if self._keepers.keeps(run, request) else kept_for)
        if key not in self._found:
            self._found[key] = wait_reason(run, request, room, self._keepers, self._unfreed)
        return self._found[key]


# ---------------------------------------------------------------- what a run waits for


def unfreed_devices(table: RunTable) -> list[UnfreedDevices]:
    """Return what runs still hold because ranks of theirs were killed and have not ended."""
    found: list[UnfreedDevices] = []
    for run in table.runs.values():
        if run.remaining and (lease := run.held_lease) is not None:
            count = lease.cpu_slots or len(lease.uuids)
            found.append(UnfreedDevices(run.run_id, count, line_of_lease(lease), run.remaining))
    return found


def wait_reason(
    run: ScheduledRun,
    request: ResourceRequest,
    room: FreeCapacity,
    keepers: Blockers,
    unfreed: Iterable[UnfreedDevices],
) -> WaitReason:
    """Return what a run in the queue waits for.

    Args:
        run: The run.
        request: Its request.
        room: What is free.
        keepers: The runs that devices are kept for.
        unfreed: What runs still hold because of killed ranks.
    """
    if room.stock.many:
        return _wait_for_nodes(run, request, room, keepers, unfreed)
    missing = room.missing(request)
    if missing == 0:
        return DevicesReserved(keepers.before(run, request))
    blockers = _blockers(request, room, unfreed)
    named = {blocker.run_id for blocker in blockers if isinstance(blocker, UnfreedDevices)}
    holders = room.holders(request, most=3, without=named)
    return Shortage(missing, request.line, holders, blockers, keepers.keeps(run, request))


def wait_limit_reached(
    run: ScheduledRun,
    request: ResourceRequest,
    room: FreeCapacity,
    keepers: Blockers,
    unfreed: Iterable[UnfreedDevices],
) -> WaitLimitReached:
    """Return why a run gives up whose waiting time is over; the arguments are those of `wait_reason`."""
    reason: WaitReason | InUse
    if room.stock.many or room.missing(request) == 0:
        reason = wait_reason(run, request, room, keepers, unfreed)
    else:
        reason = InUse(room.holders(request), _blockers(request, room, unfreed))
    return WaitLimitReached(room.need(request), room.free(request), request.line, run.spec.wait_s or 0.0, reason)


def session_obstacle(table: RunTable, cell: ScheduledRun) -> SessionObstacle | None:
    """Return what keeps a cell of an open session from starting; None when it may. Call it in order of submission."""
    session = table.runs[cell.spec.session]
    if session.lease is None:
        return SessionQueued()
    if session.state is not RunState.RUNNING:
        return SessionStarting()
    if session.restarting is not None:
        return SessionRestarting(session.restarting, session.remaining)
    if cell.spec.fresh:
        return None
    others = (other for other in table.cells_of(cell.spec.session) if other.spec.in_session)
    inside = next((other for other in others if other.lease is not None), None)
    if inside is None:
        return None
    return SessionOccupied(inside.run_id, inside.spec.name, _activity(inside), inside.unstopped, inside.remaining)


def _activity(cell: ScheduledRun) -> CellActivity:
    if cell.state is RunState.CANCELLING:
        return CellActivity.STOPPING
    return CellActivity.ENDING if cell.state.is_final else CellActivity.RUNNING


def _blockers(
    request: ResourceRequest, room: FreeCapacity, unfreed: Iterable[UnfreedDevices]
) -> tuple[DeviceBlocker, ...]:
    return (*(held for held in unfreed if held.line == request.line), *room.blockers(request))


# ---------------------------------------------------------------- many nodes


def _wait_for_nodes(
    run: ScheduledRun,
    request: ResourceRequest,
    room: FreeCapacity,
    keepers: Blockers,
    unfreed: Iterable[UnfreedDevices],
) -> WaitReason:
    if room.fits(request):
        node_for = next((one for one in keepers.nodes if one != run.run_id), None)
        before = keepers.before(run, request)
        if before == run.run_id and node_for is not None:
            return NodeReserved(node_for, request)
        return DevicesReserved(before, request)
    is_reserved = keepers.keeps(run, request)
    node = keepers.nodes.get(run.run_id) if is_reserved else None
    host = None if node is None else room.stock.host(node)
    available = _availability(request, room)
    return NodeShortage(request, available, _blockers(request, room, unfreed), is_reserved, host, _coming(room))


def _availability(request: ResourceRequest, room: FreeCapacity) -> Availability:
    free, sizes = room.free_by_node(request), room.stock.sizes(request.line, request.min_memory_bytes)
    count, total = room.free(request), room.stock.total(request.line, request.min_memory_bytes)
    limit = max(total, room.stock.elastic(request.line))
    # the emptiest of the nodes that are large enough: the run waits for what it lacks
    least = request.per_node if request.on_one_node or request.nodes else 1
    node = _emptiest(free, sizes, least) or _emptiest(free, sizes, 1)
    if node is None:
        return Availability(count, total, limit)
    large_enough = sum(count >= request.per_node for count in free.values()) if request.nodes > 1 else None
    shows_holders = request.on_one_node or request.line == CPU_LINE or len(sizes) > 1
    holders = room.holders(request, node, most=2) if shows_holders else Holders()
    largest = NodeFree(max(0, free.get(node, 0)), sizes[node], holders)
    return Availability(count, total, limit, large_enough, largest)


def _emptiest(free: Mapping[str, int], sizes: Mapping[str, int], least: int) -> str | None:
    """Return the node with the most free among those with at least `least` devices; None without any."""
    # called for each waiting run, with up to a thousand nodes: faster than `max` with a key
    best: str | None = None
    most = (-1, 0)
    for node, size in sizes.items():
        if size >= least and (there := (max(0, free.get(node, 0)), size)) > most:
            best, most = node, there
    return best


def _coming(room: FreeCapacity) -> str | None:
    return (room.stock.inventory.coming or "").strip().rstrip(".") or None
