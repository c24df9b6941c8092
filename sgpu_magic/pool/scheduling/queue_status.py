"""Each waiting run's position and what it waits for, in words; which runs are updated when. Pure.

Up to `AT_ONCE` waiting runs are updated at every change. With more, only new runs and the first of each line are; the
others are updated at a rate of `PER_S` in a second, since a pool with 500 waiting runs would do nothing else. Queries
always return the current state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.pool.scheduling.capacity import CPU_LINE, SPREAD, QueueKey, ResourceRequest, amount, line_of_lease
from sgpu_magic.pool.scheduling.fair_share import FairShare
from sgpu_magic.pool.scheduling.placement import FreeCapacity
from sgpu_magic.pool.scheduling.run import ScheduledRun, span
from sgpu_magic.pool.scheduling.run_table import RunTable
from sgpu_magic.pool.scheduling.stimuli import Instruction, PublishQueueStatus
from sgpu_magic.wire.base import RunState, short
from sgpu_magic.wire.option_text import OptionName, Text, text_of

if TYPE_CHECKING:
    from sgpu_magic.pool.scheduling.queue_rules import QueueRules

AT_ONCE = 64
"""The number of waiting runs above which some are updated with a delay."""
PER_S = 100.0
_FIRST = 4
_RESTART_OR_KILL = "interrupt again within 5 s, or %sgpu_restart --rank {ranks}, kills {it}"
_WAIT_LONGER = text_of("Wait longer with ", OptionName("wait"))
_QUEUE_IT = text_of("Queue it with ", OptionName("wait", "10m"))

Published = tuple[int, str]


def by_line(runs: Iterable[ScheduledRun]) -> dict[QueueKey, list[tuple[ScheduledRun, ResourceRequest]]]:
    """Return the runs whose requests are resolved, by the line in which they wait."""
    lines: dict[QueueKey, list[tuple[ScheduledRun, ResourceRequest]]] = {}
    for run in runs:
        if run.want is not None:
            lines.setdefault(run.want.line, []).append((run, run.want))
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

    def before(self, run: ScheduledRun, want: ResourceRequest) -> str:
        """Return the run that free devices are kept for; this run itself if there is no other."""
        others = [one for one in self.of_lines.get(want.line, ()) if one not in self.nodes]
        return next(iter(others), self.of_users.get((want.line, run.spec.owner.user), run.run_id))

    def keeps(self, run: ScheduledRun, want: ResourceRequest) -> bool:
        """Whether devices are kept for this run."""
        own = self.of_users.get((want.line, run.spec.owner.user)) == run.run_id
        return own or run.run_id in self.of_lines.get(want.line, ())


class QueueStatus:
    """Sends waiting runs their positions and reasons.

    Args:
        table: The scheduler's runs.
        queue: Decides which run gets which devices.
        fair: Decides which user is next.
    """

    def __init__(self, table: RunTable, queue: QueueRules, fair: FairShare) -> None:
        self._table = table
        self._queue = queue
        self._fair = fair
        # for delayed updates: the time of the last full update, and whether a run is out of date since then
        self._published_at = float("-inf")
        self._behind = False

    def publish(self) -> list[Instruction]:
        """Return the updates for runs whose position or reason changed."""
        now = self._table.now
        moment = _Moment(self._table, self._queue, self._fair)
        count = self._table.count_waiting()
        deferred = self._behind = count > AT_ONCE and now < self._published_at + count / PER_S
        self._published_at = self._published_at if deferred else now
        out: dict[int, Instruction] = {}
        for run, line, position in moment.positions(only_first=deferred):
            if deferred and run.last_published is not None and position > _FIRST:
                continue
            status = (position, moment.reason(run))
            if status != run.last_published:
                out[run.number] = PublishQueueStatus(run.run_id, *status)
            if status != run.last_published or run.accepted != (line is not None):
                self._table.change(run, last_published=status, accepted=line is not None)
        return [out[number] for number in sorted(out)]

    def now(self) -> dict[str, Published]:
        """Return the current position and reason of each waiting run."""
        moment = _Moment(self._table, self._queue, self._fair)
        return {run.run_id: (position, moment.reason(run)) for run, _, position in moment.positions()}

    def next_deadline(self) -> float | None:
        """Return when the delayed updates are due; None without any."""
        return self._published_at + self._table.count_waiting() / PER_S if self._behind else None


class UnfreedDevices:
    """What runs still hold because ranks of theirs were killed and have not ended.

    Args:
        table: The scheduler's runs.
    """

    def __init__(self, table: RunTable) -> None:
        self._runs = [run for run in table.runs.values() if run.remaining]

    def of(self, line: QueueKey) -> list[str]:
        """Return a part of a sentence for each of these runs that holds devices of this line."""
        return [
            f"run {short(run.run_id)} still holds {amount(lease.cpu_slots or len(lease.uuids), line)}: "
            f"{remaining_ranks(run)}"
            for run in self._runs
            if (lease := run.held_lease) is not None and line_of_lease(lease) == line
        ]


def remaining_ranks(run: ScheduledRun) -> str:
    """Return which ranks of the run were killed and have not ended."""
    hosts = {each.host for each in run.remaining}
    of_process = [f"process {each.pid}" + (f" on {each.host}" if len(hosts) > 1 else "") for each in run.remaining]
    listed = ", ".join(f"rank {each.rank} ({process})" for each, process in zip(run.remaining, of_process, strict=True))
    return f"{listed} {'was killed and does' if len(run.remaining) == 1 else 'were killed and do'} not end"


class _Moment:
    """The queue at one moment; runs with the same request share a reason."""

    def __init__(self, table: RunTable, queue: QueueRules, fair: FairShare) -> None:
        self._table = table
        self._fair = fair
        self._room = queue.room
        self._lines = queue.waiting()
        self._keepers = queue.keepers(self._lines)
        self._held = UnfreedDevices(table)
        self._found: dict[tuple[ResourceRequest, str], str] = {}

    def positions(self, *, only_first: bool = False) -> list[tuple[ScheduledRun, QueueKey | str | None, int]]:
        """Return the waiting runs, each with its line or session and its position there; cells after their sessions.

        Args:
            only_first: Whether to return only the first runs of lines in which all runs know their positions.
        """
        found: list[tuple[ScheduledRun, QueueKey | str | None, int]] = []
        asked = by_line(self._table.asked())
        for line in [*self._lines, *(line for line in asked if line not in self._lines)]:
            first = self._keepers.of_lines.get(line, ())
            waiting = self._lines.get(line, [])
            most = _FIRST if only_first and all(run.last_published is not None for run, _ in waiting) else None
            order = self._fair.in_order(line, waiting, first, self._table.now, most)
            found += [
                (run, line, position)
                for position, run in enumerate([*(run for run, _ in asked.get(line, ())), *order], 1)
            ]
        lost = [run for run in self._table.waiting() if run.want is None]
        found += [(run, None, number) for number, run in enumerate(lost, 1)]
        positions: dict[str, int] = {}
        for cell in self._table.waiting_cells():
            session = cell.spec.session
            positions[session] = positions.get(session, 0) + 1
            found.append((cell, session, positions[session]))
        return found

    def reason(self, run: ScheduledRun) -> str:
        """Return what a run waits for."""
        room, want = self._room, run.want
        if run.spec.session:
            return obstacle(self._table, run)
        if want is None:
            return "the pool is still looking for its devices"
        if run.asked:
            return asked_for(want, room)
        if over := self._fair.over_quota(run, want):
            return over
        kept_for = self._keepers.of_users.get((want.line, run.spec.owner.user), "")
        key = (want, run.run_id if self._keepers.keeps(run, want) else kept_for)
        if key not in self._found:
            self._found[key] = waits_for(run, want, room, self._keepers, self._held)
        return self._found[key]


# ---------------------------------------------------------------- one run's reason


def waits_for(
    run: ScheduledRun, want: ResourceRequest, room: FreeCapacity, keepers: Blockers, held: UnfreedDevices
) -> str:
    """Return what a run in the queue waits for."""
    if room.stock.many:
        return _on_nodes(run, want, room, keepers, held)
    missing = room.missing(want)
    if missing == 0:
        return kept_for(keepers, run, want)
    what = room.amount(want, missing).replace(" ", " more ", 1)
    kept = ["freed ones are reserved for it"] if keepers.keeps(run, want) else []
    return "; ".join([f"needs {what}", *held.of(want.line), *room.not_the_pools(want), *kept])


def asked_for(want: ResourceRequest, room: FreeCapacity) -> str:
    """Return the reason of a run whose nodes the cluster was asked for."""
    return "; ".join([f"{_need(want)}, {_there(want, room)}", "the cluster was asked for more nodes", *_coming(room)])


def waited_in_vain(
    run: ScheduledRun, want: ResourceRequest, room: FreeCapacity, keepers: Blockers, held: UnfreedDevices
) -> Text:
    """Return the message for a run whose waiting time is over."""
    need, free = room.amount(want), room.free(want)
    if room.stock.many:
        why = waits_for(run, want, room, keepers, held)
    else:
        in_the_way = ", ".join([*room.held_by(want), *held.of(want.line), *room.not_the_pools(want)])
        why = kept_for(keepers, run, want) if room.missing(want) == 0 else in_the_way
    if run.spec.wait_s:
        waited = f"{need} did not become free within {span(run.spec.wait_s)}"
        remedy = _WAIT_LONGER
    else:
        waited = f"the run needs {need}, {free} {'is' if free == 1 else 'are'} free, and it does not wait"
        remedy = _QUEUE_IT
    fewer, other_pool = OptionName("gpus"), OptionName("pool")
    return text_of(
        f"{waited}: {why}. ", remedy, ", ask for fewer with ", fewer, ", or choose another pool with ", other_pool, "."
    )


def kept_for(keepers: Blockers, run: ScheduledRun, want: ResourceRequest) -> str:
    return f"the free ones are reserved for run {short(keepers.before(run, want))}, which has waited longer"


# ---------------------------------------------------------------- cells in sessions


def obstacle(table: RunTable, cell: ScheduledRun) -> str:
    """Return what a cell of an open session waits for; "" when it may start. Call it in order of submission."""
    session = table.runs[cell.spec.session]
    if session.lease is None:
        reason = session.last_published[1] if session.last_published is not None else "it is queued"
        return f"its session waits for devices: {reason}"
    if session.state is not RunState.RUNNING:
        return "its session's ranks are starting"
    if session.paused:
        return f"{session.paused}; {remaining_ranks(session)}" if session.remaining else session.paused
    if cell.spec.fresh:
        return ""
    others = (other for other in table.cells_of(cell.spec.session) if other.spec.in_session)
    inside = next((other for other in others if other.lease is not None), None)
    return "" if inside is None else _busy_with(inside)


def _busy_with(cell: ScheduledRun) -> str:
    run, ranks = short(cell.run_id), cell.unstopped
    if cell.remaining:
        return f"{remaining_ranks(cell)}; it still runs {run}"
    if ranks:
        listed = ", ".join(map(str, ranks))
        one = len(ranks) == 1
        still = f"rank {listed} still runs" if one else f"ranks {listed} still run"
        kills = _RESTART_OR_KILL.format(ranks=",".join(map(str, ranks)), it="it" if one else "them")
        return f"{still} {run}, which was interrupted: {kills}"
    if cell.state is RunState.CANCELLING:
        return f"run {titled(cell)} is being stopped in its session"
    if cell.state.is_final:
        return f"run {titled(cell)} is ending in its session"
    return f"run {titled(cell)} is still running in its session"


def titled(run: ScheduledRun) -> str:
    return f"{short(run.run_id)} ({run.spec.name})" if run.spec.name else short(run.run_id)


def cell_waited_in_vain(cell: ScheduledRun, why: str) -> Text:
    """Return the message for a cell whose waiting time is over."""
    if cell.spec.wait_s:
        return text_of(f"it has waited for {span(cell.spec.wait_s)}: {why}. ", _WAIT_LONGER, ".")
    return text_of(f"{why}, and the run does not wait. ", _QUEUE_IT, ".")


# ---------------------------------------------------------------- many nodes


def _on_nodes(
    run: ScheduledRun, want: ResourceRequest, room: FreeCapacity, keepers: Blockers, held: UnfreedDevices
) -> str:
    if room.fits(want):
        kept = {node: one for one, node in keepers.nodes.items() if one != run.run_id}
        if keepers.before(run, want) == run.run_id and kept:
            one = short(next(iter(kept.values())))
            return f"{_need(want)}: enough are free, but on a node reserved for run {one}, which has waited longer"
        return f"{_need(want)}: {kept_for(keepers, run, want)}"
    node = keepers.nodes.get(run.run_id)
    reserved = "freed ones are" if node is None else f"node {room.stock.host(node)} is"
    kept = [f"{reserved} reserved for it"] if keepers.keeps(run, want) else []
    blocked = [*held.of(want.line), *room.not_the_pools(want)]
    return "; ".join([f"{_need(want)}; {_there(want, room)}", *blocked, *kept, *_coming(room)])


def _need(want: ResourceRequest) -> str:
    """Return a request in words: `needs 8 H100 on one node`."""
    what = amount(want.ranks, want.line)
    if want.min_memory_bytes:
        what += f" with {want.min_memory_bytes / 1e9:g} GB"
    if want.on_one_node:
        return f"needs {what} on one node"
    if want.nodes:
        return f"needs {amount(want.per_node, want.line)} on each of {want.nodes} nodes"
    return f"needs {what}" + (" (spread)" if want.strategy == SPREAD else "")


def _there(want: ResourceRequest, room: FreeCapacity) -> str:
    """Return what is free: `12 are free of 64, the largest node has 4 free of 8 (4 are held by run 7f3a)`."""
    free, sizes = room.free_by_node(want), room.stock.sizes(want.line, want.min_memory_bytes)
    count, total = room.free(want), room.stock.total(want.line, want.min_memory_bytes)
    more = room.stock.elastic(want.line)
    of = f"{total} there now, {more} at most" if more > total else f"{total}"
    text = f"{count} {'is' if count == 1 else 'are'} free of {of}"
    if not sizes:
        return text
    if want.nodes > 1:
        enough = sum(count >= want.per_node for count in free.values())
        text += f", {enough} {'node has' if enough == 1 else 'nodes have'} {want.per_node} or more free"
    # the emptiest of the nodes that are large enough: the run waits for what it lacks
    least = want.per_node if want.on_one_node or want.nodes else 1
    node = _emptiest(free, sizes, least) or _emptiest(free, sizes, 1)
    held = room.held_by(want, node, most=2)
    by = f" ({', '.join(held)})" if held and (want.on_one_node or want.line == CPU_LINE or len(sizes) > 1) else ""
    return f"{text}, the largest node has {max(0, free.get(node, 0))} free of {sizes[node]}{by}"


def _emptiest(free: Mapping[str, int], sizes: Mapping[str, int], least: int) -> str:
    """Return the node with the most free among those with a size of at least `least`; the first of several."""
    # called for each waiting run, with up to a thousand nodes: faster than `max` with a key
    best, most = "", (-1, 0)
    for node, size in sizes.items():
        if size >= least and (there := (max(0, free.get(node, 0)), size)) > most:
            best, most = node, there
    return best


def _coming(room: FreeCapacity) -> list[str]:
    coming = room.stock.inventory.coming.strip().rstrip(".")
    return [coming] if coming else []
