"""What a pool has, what a request takes of it, and how its ranks are laid out over nodes. Pure.

Devices are counted once, by type and by node. Nodes that an autoscaler may add have no devices until they exist.

- `pack` takes as few nodes as possible, and among those the fullest, so that large pieces stay free.
- `strict_pack` takes one node, `--nodes N` takes N with the same number of ranks each.
- `spread` takes as many nodes as possible, as evenly as possible.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from sgpu_magic.wire.devices import CPU, Device, Inventory, Lease, Node, memory_bytes

PACK, STRICT_PACK, SPREAD = STRATEGIES = ("pack", "strict_pack", "spread")

Parts = list[tuple[str, int]]
"""A node and how many ranks it gets, for each node of a lease; "" is the machine of a one-machine pool."""


class QueueKey(msgspec.Struct, frozen=True):
    """A line of the queue: the kind of device that its runs wait for.

    Args:
        device_type: Canonical type, `cpu` for slots.
        simulated: Whether the devices are simulated; a lease never mixes them with real ones of the same type.
    """

    device_type: str
    simulated: bool = False


CPU_LINE = QueueKey(CPU)


def line_of(device: Device) -> QueueKey:
    return QueueKey(device.type, device.simulated)


def line_of_lease(lease: Lease) -> QueueKey:
    return CPU_LINE if lease.cpu_slots else QueueKey(lease.device_type, lease.simulated)


class ResourceRequest(msgspec.Struct, frozen=True):
    """A request as this pool interprets it.

    Args:
        line: The line in which it waits, and whose devices it takes.
        ranks: Number of ranks.
        device_type: The type in its lease: the requested one, even where CPU stands in for it.
        simulated: Whether the devices are simulated, or CPU stands in for the type.
        allow_busy: Whether to also take devices in use outside the pool.
        nodes: Nodes that get the same number of ranks each; 0 leaves it to the strategy.
        strategy: One of `STRATEGIES`.
        min_memory_bytes: The least memory of a device.
    """

    line: QueueKey
    ranks: int
    device_type: str
    simulated: bool = False
    allow_busy: bool = False
    nodes: int = 0
    strategy: str = PACK
    min_memory_bytes: int = 0

    @property
    def on_one_node(self) -> bool:
        return self.strategy == STRICT_PACK or self.nodes == 1

    @property
    def per_node(self) -> int:
        """Ranks on each node if the number of nodes was requested, else the most ranks that a node may get."""
        return self.ranks // self.nodes if self.nodes else self.ranks


class LineCount(msgspec.Struct, frozen=True):
    """How many devices of a kind a pool has.

    Args:
        line: The kind.
        count: How many it has now.
        limit: The most that it can have, with an autoscaler; at least `count`.
    """

    line: QueueKey
    count: int
    limit: int


class PoolContents(msgspec.Struct, frozen=True):
    """What a pool has.

    Args:
        lines: Its devices, including those that only an autoscaler provides.
        cpu_slots: Its CPU slots.
    """

    lines: tuple[LineCount, ...]
    cpu_slots: int


class Stock:
    """What a pool has, used or not.

    Args:
        inventory: The newest inventory of the pool's nodes.

    Attributes:
        inventory: As given.
        many: Whether the pool has nodes, or may get some: its leases then name the ranks of each node.
        counts: Number of devices by line, without CPU slots.
        devices: Devices by UUID.
        nodes: Nodes by ID; a pool of one machine has the node "".
        used_outside: By line, the devices that the driver reports as in use; the pool's own runs may be the users.
        unavailable: By line, the devices that no run can have.
    """

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.many = bool(inventory.nodes or inventory.elastic)
        self.devices = {device.uuid: device for device in inventory.devices}
        slots = inventory.cpu_slots
        alone = Node(node="", host=inventory.host, cpu_slots=slots, cpu_slots_free=slots)
        self.nodes = {node.node: node for node in (inventory.nodes if self.many else [alone])}
        self._elastic = dict(inventory.elastic)
        by_type: dict[tuple[str, bool], dict[str, list[Device]]] = {}
        for device in inventory.devices:
            by_type.setdefault((device.type, device.simulated), {}).setdefault(device.node, []).append(device)
        self._by_node = {QueueKey(*key): nodes for key, nodes in by_type.items()}
        self.counts = Counter({line: sum(map(len, nodes.values())) for line, nodes in self._by_node.items()})
        self.used_outside = {
            line: [device for device in self.line(line) if device.outside_use] for line in self._by_node
        }
        self.unavailable = {
            line: [device for device in self.line(line) if device.unavailable] for line in self._by_node
        }
        self._sizes: dict[tuple[QueueKey, int], dict[str, int]] = {}

    @property
    def slots_by_node(self) -> dict[str, int]:
        """The CPU slots of each node that the pool may grant."""
        return {name: node.cpu_slots_free for name, node in self.nodes.items() if node.cpu_slots}

    def line(self, line: QueueKey) -> Iterable[Device]:
        """Return all devices of the line, in the inventory's order on each node."""
        return (device for devices in self.by_node(line).values() for device in devices)

    def by_node(self, line: QueueKey) -> Mapping[str, Sequence[Device]]:
        """Return the line's devices on each node that has some."""
        return self._by_node.get(line, {})

    def sizes(self, line: QueueKey, min_memory_bytes: int = 0) -> dict[str, int]:
        """Return how many devices or CPU slots of the line each node has; only nodes with any."""
        key = (line, min_memory_bytes)
        if key not in self._sizes:
            if line == CPU_LINE:
                found = {name: node.cpu_slots for name, node in self.nodes.items()}
            else:
                found = {
                    node: sum(memory_bytes(device) >= min_memory_bytes for device in devices)
                    for node, devices in self.by_node(line).items()
                }
            self._sizes[key] = {node: count for node, count in found.items() if count}
        return self._sizes[key]

    def total(self, line: QueueKey, min_memory_bytes: int = 0) -> int:
        """Return how many devices or CPU slots all nodes have together."""
        if line == CPU_LINE:
            return self.inventory.cpu_slots
        return sum(self.sizes(line, min_memory_bytes).values()) if min_memory_bytes else self.counts[line]

    def elastic(self, line: QueueKey) -> int:
        """Return the most that the pool can have with an autoscaler, including what it has now; 0 without one."""
        return 0 if line.simulated else self._elastic.get(line.device_type, 0)

    def limit(self, line: QueueKey, min_memory_bytes: int = 0) -> int:
        """Return the most that the pool can ever have."""
        return max(self.total(line, min_memory_bytes), self.elastic(line))

    def lines_of(self, device_type: str) -> list[QueueKey]:
        """Return the lines of a type, real devices first, including those that only an autoscaler provides."""
        alike = [line for line in self.all_lines() if line.device_type == device_type]
        return sorted(alike, key=lambda line: line.simulated)

    def all_lines(self) -> list[QueueKey]:
        """Return all lines of devices, including those that only an autoscaler provides; not the CPU line."""
        more = [QueueKey(kind) for kind, count in self.inventory.elastic if count and kind != CPU]
        return list(dict.fromkeys([*self.counts, *more]))

    def host(self, node: str) -> str:
        """Return the node's display name."""
        return self.nodes[node].host if node in self.nodes else self.inventory.host

    def contents(self) -> PoolContents:
        """Return what the pool has, used or not."""
        lines = (LineCount(line, self.counts[line], self.limit(line)) for line in self.all_lines())
        return PoolContents(tuple(lines), self.inventory.cpu_slots)


class Free(msgspec.Struct):
    """Counts the free devices that requests of one kind may take.

    Args:
        allow_busy: Whether devices in use outside the pool count.
        min_memory_bytes: The least memory of a device.
        by_node: Free devices by node, in the inventory's order; negative if a node lost slots that are in use.
        total: Free devices on all nodes together.
    """

    allow_busy: bool
    min_memory_bytes: int
    by_node: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    total: int = 0

    def takes(self, device: Device) -> bool:
        """Whether such a request may take the device when no run holds it."""
        if self.min_memory_bytes and memory_bytes(device) < self.min_memory_bytes:
            return False
        return not device.unavailable and (self.allow_busy or not device.outside_use)

    def add(self, node: str, change: int) -> None:
        """Change the number of free devices on a node."""
        before = self.by_node.get(node, 0)
        self.by_node[node] = before + change
        self.total += max(0, before + change) - max(0, before)


def laid_out(request: ResourceRequest, free: Mapping[str, int]) -> Parts | None:
    """Return (node, ranks) for each node of a lease, the largest part first; None if the request does not fit.

    Args:
        request: The request.
        free: Devices or slots that it could take, by node, in a stable order.
    """
    if request.on_one_node:
        node = _tightest(free, request.ranks)
        return None if node is None else [(node, request.ranks)]
    if request.nodes:
        return _evenly(free, request.nodes, request.per_node)
    if sum(count for count in free.values() if count > 0) < request.ranks:
        return None
    return _spread(free, request.ranks) if request.strategy == SPREAD else _packed(free, request.ranks)


def _tightest(free: Mapping[str, int], ranks: int) -> str | None:
    """Return the node with the least free capacity that is enough; the first of several."""
    return min((node for node, count in free.items() if count >= ranks), key=free.__getitem__, default=None)


def _evenly(free: Mapping[str, int], nodes: int, each: int) -> Parts | None:
    enough = sorted((count, index, node) for index, (node, count) in enumerate(free.items()) if count >= each)
    return [(node, each) for _, _, node in enough[:nodes]] if len(enough) >= nodes else None


def _packed(free: Mapping[str, int], ranks: int) -> Parts:
    if (alone := _tightest(free, ranks)) is not None:
        return [(alone, ranks)]
    parts: Parts = []
    left = dict(free)
    # starting with the largest nodes takes the fewest; the last part goes where it fits best
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
    # the next rank goes to the node with the fewest ranks, among these to the emptiest
    heap = [(0, -free[node], index, node) for index, node in enumerate(parts)]
    heapq.heapify(heap)
    for _ in range(ranks):
        taken, room, position, node = heapq.heappop(heap)
        parts[node] = taken + 1
        if taken + 1 < free[node]:
            heapq.heappush(heap, (taken + 1, room, position, node))
    return sorted(((node, count) for node, count in parts.items() if count), key=lambda part: -part[1])
