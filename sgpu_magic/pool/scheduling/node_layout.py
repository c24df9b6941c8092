"""What is free on each node for each kind of request, and how the ranks of a lease are laid over nodes. Pure.

What is free is counted once for each kind of request, and kept up as devices are taken and given back.

- `pack` takes as few nodes as can be, and of those that do the fullest: what is left stays in large pieces.
- `strict_pack` takes one node, `--nodes N` takes N with the same number of ranks each.
- `spread` takes as many nodes as can be, as evenly as can be.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from sgpu_magic.pool.scheduling.capacity import CPU_LINE, Line, Stock, line_of, memory_bytes
from sgpu_magic.pool.scheduling.placement_request import SPREAD, Want
from sgpu_magic.wire.devices import CPU, Device

Parts = list[tuple[str, int]]


@dataclass(slots=True)
class Shelf:
    """The devices that requests of one kind may take.

    Args:
        allow_busy: Also those that others use.
        min_memory_bytes: None with less.
        free: How many are free, by node, in the inventory's order; fewer than none where slots were taken away.
        total: How many are free on all nodes together.
    """

    allow_busy: bool
    min_memory_bytes: int
    free: dict[str, int]
    total: int = 0

    def takes(self, device: Device) -> bool:
        """Whether such a request may have the device when nobody holds it."""
        if self.min_memory_bytes and memory_bytes(device) < self.min_memory_bytes:
            return False
        return self.allow_busy or not device.outside_use

    def add(self, node: str, change: int) -> None:
        """So many more are free on a node."""
        before = self.free.get(node, 0)
        self.free[node] = before + change
        self.total += max(0, before + change) - max(0, before)


class Shelves:
    """All of them.

    Args:
        stock: What the pool has.
        holders: Which devices are held; read when a shelf is first asked for, kept by others.
        refused: Devices, and `cpu@` with a node, that the engine can't have; read likewise.
        slots: By run, the CPU slots that it holds on each node; read likewise.
    """

    def __init__(
        self,
        stock: Stock,
        holders: Mapping[str, object],
        refused: Mapping[str, str],
        slots: Mapping[str, Mapping[str, int]],
    ) -> None:
        self._stock = stock
        self._holders = holders
        self._refused = refused
        self._slots = slots
        self._shelves: dict[tuple[Line, bool, int], Shelf] = {}

    def of(self, want: Want) -> Shelf:
        """Return what the request may take."""
        key = (want.line, want.allow_busy, want.min_memory_bytes)
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = Shelf(want.allow_busy, want.min_memory_bytes, {})
            if want.line == CPU_LINE:
                self._fill_slots(shelf)
            else:
                self._fill(shelf, want.line)
            shelf.total = sum(count for count in shelf.free.values() if count > 0)
        return shelf

    def count(self, device: Device, change: int) -> None:
        """A device is taken (-1) or free again (+1)."""
        for shelf in self._of_line(line_of(device)):
            if shelf.takes(device):
                shelf.add(device.node, change)

    def count_slots(self, by_node: Mapping[str, int], sign: int) -> None:
        """CPU slots are taken (-1) or free again (+1)."""
        for shelf in self._of_line(CPU_LINE):
            for node, count in by_node.items():
                if f"{CPU}@{node}" not in self._refused:
                    shelf.add(node, sign * count)

    def forget(self) -> None:
        """Count all anew when it is asked for."""
        self._shelves.clear()

    def _of_line(self, line: Line) -> list[Shelf]:
        return [shelf for (other, _, _), shelf in self._shelves.items() if other == line]

    def _fill(self, shelf: Shelf, line: Line) -> None:
        for device in self._stock.line(line):
            free = shelf.takes(device) and device.uuid not in self._holders and device.uuid not in self._refused
            shelf.free[device.node] = shelf.free.get(device.node, 0) + free

    def _fill_slots(self, shelf: Shelf) -> None:
        shelf.free.update(self._stock.slots_by_node)
        for by_node in self._slots.values():
            for node, count in by_node.items():
                shelf.free[node] = shelf.free.get(node, 0) - count
        for node in [node for node in shelf.free if f"{CPU}@{node}" in self._refused]:
            shelf.free[node] = 0


def laid_out(want: Want, free: Mapping[str, int]) -> Parts | None:
    """Return (node, ranks) for each node that a lease would have, the largest part first; None if it does not fit.

    Args:
        want: The request.
        free: Devices or slots that it could take, by node, in an order that stays.
    """
    if want.on_one_node:
        node = _tightest(free, want.ranks)
        return None if node is None else [(node, want.ranks)]
    if want.nodes:
        return _evenly(free, want.nodes, want.per_node)
    if sum(count for count in free.values() if count > 0) < want.ranks:
        return None
    return _spread(free, want.ranks) if want.strategy == SPREAD else _packed(free, want.ranks)


def _tightest(free: Mapping[str, int], ranks: int) -> str | None:
    """The node with enough room and the least of it, the first of several."""
    best, room = None, 0
    for node, count in free.items():
        if count >= ranks and (best is None or count < room):
            best, room = node, count
            if count == ranks:
                break
    return best


def _evenly(free: Mapping[str, int], nodes: int, each: int) -> Parts | None:
    enough = sorted((count, place, node) for place, (node, count) in enumerate(free.items()) if count >= each)
    return [(node, each) for _, _, node in enough[:nodes]] if len(enough) >= nodes else None


def _packed(free: Mapping[str, int], ranks: int) -> Parts:
    alone = _tightest(free, ranks)
    if alone is not None:
        return [(alone, ranks)]
    parts: Parts = []
    left = dict(free)
    # the largest nodes first need the fewest; the last part goes where it fits best
    for node, count in sorted(free.items(), key=lambda item: -item[1]):
        last = _tightest(left, ranks) if parts else None
        if last is not None:
            parts.append((last, ranks))
            break
        parts.append((node, count))
        del left[node]
        ranks -= count
    return parts


def _spread(free: Mapping[str, int], ranks: int) -> Parts:
    parts = {node: 0 for node, count in free.items() if count > 0}
    # the node with the fewest ranks takes the next, of these the emptiest
    heap = [(0, -free[node], place, node) for place, node in enumerate(parts)]
    heapq.heapify(heap)
    for _ in range(ranks):
        taken, room, place, node = heapq.heappop(heap)
        parts[node] = taken + 1
        if taken + 1 < free[node]:
            heapq.heappush(heap, (taken + 1, room, place, node))
    return sorted(((node, count) for node, count in parts.items() if count), key=lambda part: -part[1])
