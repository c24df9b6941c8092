"""A pool of many machines in few lines: by type, and by node. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sgpu_magic.views.pool_words import device_holders
from sgpu_magic.views.tables import Row
from sgpu_magic.views.units import count_of
from sgpu_magic.wire import ids
from sgpu_magic.wire.devices import Device
from sgpu_magic.wire.pool_status import PoolStatus, RunSummary

HEADS: Row = ("node", "devices", "free", "use", "runs")
RIGHT = (2, 3)

# nobody reads more; those with something free stand first
_MAX_NODES = 16
_MAX_RUNS = 3


@dataclass(slots=True)
class _Node:
    """One node's devices.

    Args:
        host: Its name, for people.
        kinds: Devices by their labels.
        free: Devices that somebody could have now.
        outside: Devices that are in use outside the pool.
        used_pct: What the driver says of each that it says anything of.
        runs: How many devices each run has.
    """

    host: str
    kinds: Counter[str] = field(default_factory=Counter[str])
    free: int = 0
    outside: int = 0
    used_pct: list[float] = field(default_factory=list[float])
    runs: Counter[str] = field(default_factory=Counter[str])


def type_words(status: PoolStatus) -> list[str]:
    """Return a line for each type: `h100: 12 of 64 free on 8 nodes, largest free node 4`."""
    holders = device_holders(status)
    total: Counter[str] = Counter()
    nodes: dict[str, Counter[str]] = {}
    most = dict(status.inventory.elastic)
    for device in status.inventory.devices:
        kind = _kind(device)
        total[kind] += 1
        nodes.setdefault(kind, Counter())[device.node] += _is_free(device, holders)
    lines: list[str] = []
    for kind, free in nodes.items():
        text = f"{kind}: {sum(free.values()):,} of {total[kind]:,} free on {count_of(len(free), 'node')}"
        if len(free) > 1:
            text += f", largest free node {max(free.values())}"
        lines.append(text + _up_to(most.pop(kind, 0), total[kind]))
    lines += [f"{kind}: none there now{_up_to(count, 0)}" for kind, count in most.items() if count and kind != "cpu"]
    coming = status.inventory.coming.strip()
    return [*lines, coming] if coming else lines


def node_rows(status: PoolStatus) -> list[Row]:
    """Return a row for each node, those with most free first, and one that counts those left out."""
    holders = device_holders(status)
    nodes = {node.node: _Node(node.host) for node in status.inventory.nodes}
    for device in status.inventory.devices:
        node = nodes.setdefault(device.node, _Node(device.node))
        node.kinds[device.type.upper() + (" (simulated on cpu)" if device.simulated else "")] += 1
        if device.utilization_pct is not None:
            node.used_pct.append(device.utilization_pct)
        if device.uuid in holders:
            node.runs[holders[device.uuid][0].run_id] += 1
        elif device.outside_use:
            node.outside += 1
        else:
            node.free += 1
    slots = {node.node: node.cpu_slots for node in status.inventory.nodes}
    # in a large pool what can be had is looked for; in a small one, where a node is
    order = list(nodes) if len(nodes) <= _MAX_NODES else sorted(nodes, key=lambda name: -nodes[name].free)
    rows = [_row(nodes[name], slots.get(name, 0)) for name in order[:_MAX_NODES]]
    if left := [nodes[name] for name in order[_MAX_NODES:]]:
        free = sum(node.free for node in left)
        rows.append((f"and {count_of(len(left), 'more node')}", "", f"{free:,}", "", ""))
    return rows


def _row(node: _Node, slots: int) -> Row:
    devices = ", ".join(f"{count} {kind}" for kind, count in node.kinds.items()) or count_of(slots, "cpu slot")
    use = f"{sum(node.used_pct) / len(node.used_pct):.0f} %" if node.used_pct else "-"
    runs = [f"{ids.short(run_id)} has {count}" for run_id, count in node.runs.most_common(_MAX_RUNS)]
    if (more := len(node.runs) - len(runs)) > 0:
        runs.append(f"{more} more")
    if node.outside:
        runs.append(f"{node.outside} in use outside the pool")
    return node.host, devices, str(node.free) if node.kinds else "-", use, ", ".join(runs)


def _kind(device: Device) -> str:
    return device.type + (" (simulated on cpu)" if device.simulated else "")


def _is_free(device: Device, holders: dict[str, tuple[RunSummary, int]]) -> bool:
    return device.uuid not in holders and not device.outside_use


def _up_to(most: int, there: int) -> str:
    return f", up to {most:,} with those that the cluster may bring" if most > there else ""
