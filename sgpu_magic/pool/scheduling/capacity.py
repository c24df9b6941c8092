"""What an inventory comes to, counted once: devices by type and by node, and what an autoscaler may add. Pure.

A lease that was asked of a cluster has no devices before the cluster has brought them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sgpu_magic.wire.devices import CPU, Device, Inventory, Lease, memory_of

ASKED = "asked of the cluster, which has to bring more nodes for it"


@dataclass(frozen=True, slots=True)
class Line:
    """What one line of the queue is for.

    Args:
        device_type: Canonical type, `cpu` for slots.
        simulated: Simulated devices; a lease never mixes them with real ones of the same type.
    """

    device_type: str
    simulated: bool = False

    def __str__(self) -> str:
        return self.device_type.upper() + (" (simulated)" if self.simulated else "")


CPU_LINE = Line(CPU)


def line_of(device: Device) -> Line:
    return Line(device.type, device.simulated)


def memory_bytes(device: Device) -> int:
    """Return the device's memory, that of its type where the driver does not tell; 0 when nobody knows."""
    return device.memory_bytes or memory_of(device.type)


class Stock:
    """What a pool has, whoever uses it now.

    Args:
        inventory: As the pool's nodes were last seen.

    Attributes:
        inventory: The same.
        many: The pool has nodes, or may get some: its leases say which node has which part.
        counts: Devices by line; none of the CPU slots.
        devices: By their UUIDs.
        nodes: By their ids; empty in a pool of one machine.
    """

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.many = bool(inventory.nodes or inventory.elastic)
        self.devices = {device.uuid: device for device in inventory.devices}
        self.nodes = {node.node: node for node in inventory.nodes}
        self._elastic = dict(inventory.elastic)
        self._on_node: dict[Line, dict[str, list[Device]]] = {}
        lines: dict[tuple[str, bool], Line] = {}
        for device in inventory.devices:
            key = (device.type, device.simulated)
            line = lines.get(key)
            if line is None:
                line = lines[key] = line_of(device)
            by_node = self._on_node.setdefault(line, {})
            if device.node in by_node:
                by_node[device.node].append(device)
            else:
                by_node[device.node] = [device]
        self.counts = Counter({line: sum(map(len, nodes.values())) for line, nodes in self._on_node.items()})
        self._used_outside: dict[Line, list[Device]] = {}
        for device in inventory.devices:
            if device.outside_use:
                self._used_outside.setdefault(lines[device.type, device.simulated], []).append(device)
        self._sizes: dict[tuple[Line, int], dict[str, int]] = {}

    @property
    def slots_by_node(self) -> dict[str, int]:
        """CPU slots that the pool may give; in a pool of one machine the node is ""."""
        if not self.many:
            return {"": self.inventory.cpu_slots}
        return {node.node: node.cpu_slots_free for node in self.inventory.nodes if node.cpu_slots}

    def line(self, line: Line) -> Iterable[Device]:
        """Every device of the line, in the inventory's order on each node."""
        return (device for devices in self._on_node.get(line, {}).values() for device in devices)

    def on_node(self, line: Line, node: str) -> list[Device]:
        """The node's devices of the line."""
        return self._on_node.get(line, {}).get(node, [])

    def used_outside(self, line: Line) -> list[Device]:
        """Those of the line that somebody uses outside the pool, or the pool's own runs for the driver."""
        return self._used_outside.get(line, [])

    def sizes(self, line: Line, min_memory_bytes: int = 0) -> dict[str, int]:
        """Return how many devices, or CPU slots, each node has of the line; of nodes with any."""
        key = (line, min_memory_bytes)
        if key not in self._sizes:
            self._sizes[key] = self._count(line, min_memory_bytes)
        return self._sizes[key]

    def _count(self, line: Line, min_memory_bytes: int) -> dict[str, int]:
        if line == CPU_LINE:
            return {node: slots for node, slots in self._slots_in_all().items() if slots}
        found = {
            node: sum(memory_bytes(device) >= min_memory_bytes for device in devices)
            if min_memory_bytes
            else len(devices)
            for node, devices in self._on_node.get(line, {}).items()
        }
        return {node: count for node, count in found.items() if count}

    def total(self, line: Line, min_memory_bytes: int = 0) -> int:
        """Return how many there are on all nodes together."""
        if line == CPU_LINE:
            return self.inventory.cpu_slots
        return sum(self.sizes(line, min_memory_bytes).values()) if min_memory_bytes else self.counts[line]

    def elastic(self, line: Line) -> int:
        """Return how many an autoscaler may bring at most, with those that are there; 0 without one."""
        return 0 if line.simulated else self._elastic.get(line.device_type, 0)

    def limit(self, line: Line, min_memory_bytes: int = 0) -> int:
        """Return how many there may ever be."""
        return max(self.total(line, min_memory_bytes), self.elastic(line))

    def lines_of(self, device_type: str) -> list[Line]:
        """Return the lines of a type, real devices first; one that only an autoscaler has too."""
        lines = sorted(
            (line for line in self.counts if line.device_type == device_type), key=lambda line: line.simulated
        )
        if not any(not line.simulated for line in lines) and self._elastic.get(device_type):
            lines.insert(0, Line(device_type))
        return lines

    def all_lines(self) -> list[Line]:
        """Return the lines of devices, those that only an autoscaler has too; none of the CPU slots."""
        more = [Line(kind) for kind, count in self.inventory.elastic if count and kind != CPU]
        return list(dict.fromkeys([*self.counts, *more]))

    def host(self, node: str) -> str:
        """Return the node's name for people."""
        found = self.nodes.get(node)
        return self.inventory.host if found is None else found.host

    def describe(self) -> str:
        """What the pool has, for a person: `4 a10, 8 h100 (simulated), up to 64 l4, cpu (16 slots)`."""
        parts: list[str] = []
        for line in self.all_lines():
            count, most = self.counts[line], self.elastic(line)
            words = str(count) if most <= count else f"{count} of up to {most}" if count else f"up to {most}"
            parts.append(f"{words} {line.device_type}{' (simulated)' if line.simulated else ''}")
        if self.inventory.cpu_slots > 0:
            parts.append(f"cpu ({self.inventory.cpu_slots} slots)")
        return ", ".join(parts) or "nothing"

    def _slots_in_all(self) -> dict[str, int]:
        if not self.many:
            return {"": self.inventory.cpu_slots}
        return {node.node: node.cpu_slots for node in self.inventory.nodes}


def is_asked(lease: Lease, stock: Stock) -> bool:
    """Whether the lease has no devices yet: the engine asked for nodes, and says when it has them."""
    return stock.many and not lease.shares and not lease.uuids


def elastic_key(line: Line) -> str:
    """Under which key a type is barred that the cluster does not bring."""
    return f"elastic {line.device_type}"


def refused_keys(lease: Lease, uuids: Collection[str], stock: Stock | None) -> set[str]:
    """What counts as in use outside after the engine refused a lease: at least something of the lease's own.

    Else the same lease would come again and again.
    """
    barred = set(uuids) & set(lease.uuids) or set(lease.uuids)
    if barred or stock is None:
        return barred or {CPU}
    if is_asked(lease, stock):
        return {elastic_key(CPU_LINE if lease.cpu_slots else Line(lease.device_type))}
    return {f"{CPU}@{share.node}" for share in lease.shares} or {CPU}
