"""What a run that waits is told of: what it needs, what there is of it, and who is in the way. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sgpu_magic.pool.scheduling.capacity import CPU_LINE, Line
from sgpu_magic.pool.scheduling.placement import Room
from sgpu_magic.pool.scheduling.placement_request import SPREAD, Want, amount
from sgpu_magic.pool.scheduling.run import Run, span
from sgpu_magic.wire.ids import short


@dataclass(frozen=True, slots=True)
class Keepers:
    """The runs that what becomes free is kept for, because others had passed them for long.

    Args:
        of_users: By line and user, the first that keeps it from the user's own later runs.
        of_lines: By line, those that keep it from everybody, the first one first.
        nodes: By run, the one node that is kept; all of the line where none is named.
    """

    of_users: Mapping[tuple[Line, str], str] = field(default_factory=dict[tuple[Line, str], str])
    of_lines: Mapping[Line, tuple[str, ...]] = field(default_factory=dict[Line, tuple[str, ...]])
    nodes: Mapping[str, str] = field(default_factory=dict[str, str])

    def before(self, run: Run, want: Want) -> str:
        """The run that what is free is kept for; this one itself where no other is."""
        others = [one for one in self.of_lines.get(want.line, ()) if one not in self.nodes]
        return next(iter(others), self.of_users.get((want.line, run.spec.owner.user), run.run_id))

    def keeps(self, run: Run, want: Want) -> bool:
        """Whether something is kept for this run."""
        own = self.of_users.get((want.line, run.spec.owner.user)) == run.run_id
        return own or run.run_id in self.of_lines.get(want.line, ())


def waits_for(run: Run, want: Want, room: Room, keepers: Keepers) -> str:
    """Return what a run in the queue lacks."""
    if room.stock.many:
        return _on_nodes(run, want, room, keepers)
    missing = room.missing(want)
    if missing == 0:
        return kept_for(keepers, run, want)
    what = room.amount(want, missing).replace(" ", " more ", 1)
    kept = ["freed ones are kept for it"] if keepers.keeps(run, want) else []
    return "; ".join([f"needs {what}", *room.not_the_pools(want), *kept])


def asked_for(want: Want, room: Room) -> str:
    """Return what a run is told while the engine waits for nodes that the cluster is to bring."""
    return "; ".join([f"{_need(want)}, {_there(want, room)}", "the cluster was asked for more nodes", *_coming(room)])


def waited_in_vain(run: Run, want: Want, room: Room, keepers: Keepers) -> str:
    """What to tell of a run whose time in the queue is over."""
    need, free = room.amount(want), room.free(want)
    if room.stock.many:
        why = waits_for(run, want, room, keepers)
    else:
        why = kept_for(keepers, run, want) if room.missing(want) == 0 else room.obstacles(want)
    if run.spec.wait_s:
        waited = f"{need} did not become free within {span(run.spec.wait_s)}"
        remedy = "Wait longer with --wait"
    else:
        waited = f"the run needs {need}, {free} {'is' if free == 1 else 'are'} free, and it was not to wait"
        remedy = "Let it queue with --wait 10m"
    return f"{waited}: {why}. {remedy}, ask for fewer with --gpus, or choose another pool with --pool."


def kept_for(keepers: Keepers, run: Run, want: Want) -> str:
    return f"what is free is kept for run {short(keepers.before(run, want))}, which has waited longer"


# ---------------------------------------------------------------- many nodes


def _on_nodes(run: Run, want: Want, room: Room, keepers: Keepers) -> str:
    if room.fits(want):
        kept = {node: one for one, node in keepers.nodes.items() if one != run.run_id}
        if keepers.before(run, want) == run.run_id and kept:
            one = short(next(iter(kept.values())))
            return f"{_need(want)}: what would do is on a node kept for run {one}, which has waited longer"
        return f"{_need(want)}: {kept_for(keepers, run, want)}"
    node = keepers.nodes.get(run.run_id)
    kept = [f"node {room.stock.host(node)} is kept for it" if node is not None else "freed ones are kept for it"]
    parts = [f"{_need(want)}; {_there(want, room)}", *room.not_the_pools(want)]
    return "; ".join([*parts, *(kept if keepers.keeps(run, want) else []), *_coming(room)])


def _need(want: Want) -> str:
    """`needs 8 H100 on one node`."""
    what = amount(want.ranks, want.line)
    if want.min_memory_bytes:
        what += f" with {want.min_memory_bytes / 1e9:g} GB"
    if want.on_one_node:
        return f"needs {what} on one node"
    if want.nodes:
        return f"needs {amount(want.per_node, want.line)} on each of {want.nodes} nodes"
    return f"needs {what}" + (" (spread)" if want.strategy == SPREAD else "")


def _there(want: Want, room: Room) -> str:
    """`12 are free of 64, the largest node has 4 free of 8 (4 are held by run 7f3a)`."""
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
    # the fullest of those that are large enough at all: what it lacks is what the run waits for
    least = want.per_node if want.on_one_node or want.nodes else 1
    node = _emptiest(free, sizes, least) or _emptiest(free, sizes, 1)
    held = room.held_by(want, node, most=2)
    by = f" ({', '.join(held)})" if held and (want.on_one_node or want.line == CPU_LINE or len(sizes) > 1) else ""
    return f"{text}, the largest node has {max(0, free.get(node, 0))} free of {sizes[node]}{by}"


def _emptiest(free: Mapping[str, int], sizes: Mapping[str, int], least: int) -> str:
    """The node with the most free, of those that have `least` when nothing runs; the first of several."""
    best, most = "", (-1, 0)
    for node, size in sizes.items():
        if size >= least and (there := (max(0, free.get(node, 0)), size)) > most:
            best, most = node, there
    return best


def _coming(room: Room) -> list[str]:
    coming = room.stock.inventory.coming.strip().rstrip(".")
    return [coming] if coming else []
