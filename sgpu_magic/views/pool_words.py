"""What every view of a pool says of its devices, nodes, budget and runs, from the pool's own status. Pure."""

from __future__ import annotations

from collections import Counter

import msgspec

from sgpu_magic.views import ansi
from sgpu_magic.views.units import Row, count_of, format_seconds
from sgpu_magic.wire.costs import format_money
from sgpu_magic.wire.devices import Device
from sgpu_magic.wire.pool_status import PoolStatus, RunSummary
from sgpu_magic.wire.record import short
from sgpu_magic.wire.states import RunState

HOLDING = (RunState.PREPARING, RunState.STARTING, RunState.RUNNING, RunState.CANCELLING)
"""States in which a run has devices."""

# only then is it worth a line
_SOON_S = 900.0
_MAX_FAILURE = 100
# of a budget: then it is loud
_LITTLE_LEFT = 0.8


def device_holders(status: PoolStatus) -> dict[str, tuple[RunSummary, int]]:
    """Return by a device's uuid the run that holds it and the rank that it belongs to."""
    # a session's devices are its own, whatever runs on them
    holding = sorted((run for run in status.runs if run.state in HOLDING), key=lambda run: not run.session)
    return {uuid: (run, rank) for run in holding for rank, uuid in enumerate(run.uuids)}


def device_name(device: Device) -> str:
    """Return `A10 · 0`."""
    return f"{device.type.upper()} · {device.index}"


def outside_words(device: Device) -> str:
    """Return why nobody in the pool gets it, "" when it may be given away."""
    return f"in use outside the pool: {device.outside_use}" if device.outside_use else ""


def problem_words(status: PoolStatus) -> list[str]:
    """Return what is wrong with the node's driver and the pool's ledger."""
    return [problem for problem in (status.inventory.problem, status.problem) if problem]


def budget_words(status: PoolStatus, *, nearly_used: bool) -> list[str]:
    """Return `budget: $12.40 of $50.00 in 30 d`, among what is loud when little is left of it."""
    budget = status.budget
    if budget is None or nearly_used != (budget.spent >= _LITTLE_LEFT * budget.limit):
        return []
    spent, limit = (format_money(amount, budget.currency) for amount in (budget.spent, budget.limit))
    return [f"budget: {spent} of {limit} in {budget.days:g} d"]


def idle_words(status: PoolStatus, now: float) -> list[str]:
    """Return when the idle pool gives its processes back, if that is soon; `now` in seconds since the epoch."""
    if status.idle_ends_at is None or status.idle_ends_at - now > _SOON_S:
        return []
    return [f"idle: gives its processes back in {_rough(status.idle_ends_at - now)}"]


def failure_line(run: RunSummary) -> str:
    """Return the first line of why a run ended, not too long, "" for nothing."""
    failure = ansi.plain(run.failure.strip().split("\n", 1)[0])
    return failure if len(failure) <= _MAX_FAILURE else failure[:_MAX_FAILURE] + " ..."


def _rough(seconds: float) -> str:
    """Return whole minutes where there are some: nobody waits for the second."""
    return f"{round(seconds / 60)} min" if seconds >= 90 else format_seconds(max(seconds, 0.0))


NODE_HEADS: Row = ("node", "devices", "free", "use", "runs")
NODE_RIGHT = (2, 3)

# nobody reads more; those with something free stand first
_MAX_NODES = 16
_MAX_RUNS = 3


class _Node(msgspec.Struct):
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
    kinds: Counter[str] = msgspec.field(default_factory=Counter[str])
    free: int = 0
    outside: int = 0
    used_pct: list[float] = msgspec.field(default_factory=list[float])
    runs: Counter[str] = msgspec.field(default_factory=Counter[str])


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
    runs = [f"{short(run_id)} has {count}" for run_id, count in node.runs.most_common(_MAX_RUNS)]
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
