"""How many devices and CPU slots are free on each node, for each kind of request. Pure.

Counted once for each kind of request that comes, and kept up as devices are taken and given back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sgpu_magic.pool.stock import CPU_LINE, Line, Stock, line_of, memory_bytes
from sgpu_magic.pool.wants import Want
from sgpu_magic.wire.device_types import CPU
from sgpu_magic.wire.devices import Device


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
