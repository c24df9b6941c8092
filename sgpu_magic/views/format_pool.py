"""A pool's devices, nodes, budget and runs in words, from the pool's status; shared by all views of a pool. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from sgpu_magic.formatting import clipped, count_of, format_money, format_seconds, numbers_text
from sgpu_magic.views import ansi
from sgpu_magic.views.run_notes import run_name
from sgpu_magic.views.units import Row
from sgpu_magic.wire.base import RunState, short
from sgpu_magic.wire.devices import (
    Device,
    Inventory,
    memory_bytes,
    memory_text,
    type_label,
    used_bytes_of,
    vendor_bytes,
)
from sgpu_magic.wire.pool_status import PoolStatus, RunSummary

HOLDING = (RunState.PREPARING, RunState.STARTING, RunState.RUNNING, RunState.CANCELLING)
"""States in which a run holds devices."""

# show when an idle pool ends only this long before it does
_SOON_S = 900.0
_MAX_FAILURE = 100
# share of a budget from which on it is shown as a warning
_LITTLE_LEFT = 0.8


Holders = Mapping[str, tuple[RunSummary, int]]
"""Maps a device's UUID to the run that holds it and the rank that uses it."""

TYPE_HEADS: Row = ("type", "total", "free", "busy", "memory", "memory in use", "utilization", "held by")
TYPE_RIGHT = (1, 2, 3, 4, 5, 6)

# the most runs and foreign users that are named in a row
_MAX_HOLDERS = 4
_GB = 1e9
NODE_HEADS: Row = ("node", "devices", "free", "use", "runs")
NODE_RIGHT = (2, 3)

# the most nodes that are listed
_MAX_NODES = 16
_MAX_RUNS = 3


def format_cpu(inventory: Inventory) -> str:
    """Return `2 cores for 16 CPU ranks`: the cores, and how many ranks on CPU run at once if that is another number."""
    cores = sum(node.cores for node in inventory.nodes) or inventory.cores
    ranks = "" if inventory.cpu_slots == cores else f" for {count_of(inventory.cpu_slots, 'CPU rank')}"
    return f"{count_of(cores, 'core')}{ranks}"


def device_holders(status: PoolStatus) -> Holders:
    """Return who holds the pool's devices."""
    # sessions come last and win: a session holds its devices even while a cell runs on them
    holding = sorted((run for run in status.runs if run.state in HOLDING), key=lambda run: not run.session)
    return {uuid: (run, rank) for run in holding for rank, uuid in enumerate(run.uuids)}


def is_free(device: Device, holders: Holders) -> bool:
    """Whether the pool can grant the device to a run."""
    return device.uuid not in holders and not format_outside(device)


def device_name(device: Device) -> str:
    """Return `A10 · 0`."""
    return f"{type_label(device.type)} · {device.index}"


def format_outside(device: Device) -> str:
    """Return why the pool can't grant the device, "" when it can."""
    if device.unavailable:
        return f"unavailable: {device.unavailable}"
    return f"in use outside the pool: {device.outside_use}" if device.outside_use else ""


def simulates_all(status: PoolStatus) -> bool:
    """Whether all devices of the pool are simulated; the headline then says so once for all rows."""
    devices = status.inventory.devices
    return bool(devices) and all(device.simulated for device in devices)


def format_simulated(status: PoolStatus, simulated: bool) -> str:
    """Return ` (simulated)` for a simulated device, type or run, unless the headline already says so."""
    return " (simulated)" if simulated and not simulates_all(status) else ""


def format_problem(status: PoolStatus) -> list[str]:
    """Return problems of the node's driver and of the pool's ledger."""
    return [problem for problem in (status.inventory.problem, status.problem) if problem]


def format_budget(status: PoolStatus, *, nearly_used: bool) -> list[str]:
    """Return `budget: $12.40 of $50.00 in 30 d` if at least 80 % is used; with `nearly_used=False` if less is used."""
    budget = status.budget
    if budget is None or nearly_used != (budget.spent >= _LITTLE_LEFT * budget.limit):
        return []
    spent, limit = (format_money(amount, budget.currency) for amount in (budget.spent, budget.limit))
    return [f"budget: {spent} of {limit} in {budget.days:g} d"]


def format_idle(status: PoolStatus, now: float) -> list[str]:
    """Return when the idle pool stops, if that is within 15 min; `now` in seconds since the epoch."""
    left_s = _SOON_S + 1 if status.idle_ends_at is None else max(status.idle_ends_at - now, 0.0)
    # whole minutes from 90 s on
    rough = f"{round(left_s / 60)} min" if left_s >= 90 else format_seconds(left_s)
    return [f"idle: ends its processes in {rough}"] if left_s <= _SOON_S else []


def failure_line(run: RunSummary) -> str:
    """Return the first line of a run's failure, at most 100 characters, "" for none."""
    return clipped(ansi.plain(run.failure.strip().split("\n", 1)[0]), _MAX_FAILURE)


def type_rows(status: PoolStatus) -> list[Row]:
    """Return a row for each type of device, the most numerous first."""
    holders = device_holders(status)
    types: dict[tuple[str, bool], list[Device]] = {}
    for device in status.inventory.devices:
        types.setdefault((device.type, device.simulated), []).append(device)
    rows: list[Row] = []
    for (kind, simulated), devices in sorted(types.items(), key=lambda item: -len(item[1])):
        free = sum(is_free(device, holders) for device in devices)
        name = type_label(kind) + format_simulated(status, simulated)
        counted = (f"{len(devices):,}", f"{free:,}", f"{len(devices) - free:,}")
        rows.append(
            (
                name,
                *counted,
                _sizes(devices),
                _in_use(devices),
                _utilization(devices),
                _format_holders(devices, holders),
            )
        )
    return rows


def _sizes(devices: Iterable[Device]) -> str:
    """Return the memory of one device: `24 GB`, where they differ `40 or 80 GB`."""
    sizes = sorted({vendor_bytes(memory_bytes(device)) for device in devices} - {0})
    return " or ".join(memory_text(size).removesuffix("" if size == sizes[-1] else " GB") for size in sizes)


def _in_use(devices: Iterable[Device]) -> str:
    """Return the memory in use of all devices together: `18.2 of 96 GB`; "" if the driver reports none."""
    known = [device for device in devices if device.used_bytes is not None]
    used = sum(used_bytes_of(device.used_bytes or 0, device.memory_bytes) for device in known)
    total = sum(vendor_bytes(device.memory_bytes) for device in known)
    return f"{used / _GB:.1f} of {total / _GB:,.0f} GB" if total else ""


def _utilization(devices: Iterable[Device]) -> str:
    """Return `94 %`, where they differ the least and the most: `0-94 %`; "" if the driver reports none."""
    known = [round(device.utilization_pct) for device in devices if device.utilization_pct is not None]
    return "-".join(f"{each}" for each in sorted({min(known), max(known)})) + " %" if known else ""


def _format_holders(devices: Iterable[Device], holders: Holders) -> str:
    """Return who holds which devices: `7f3a train on 0-3; device 5 in use outside the pool: process 77 uses it`."""
    runs: dict[str, list[int]] = {}
    words: list[str] = []
    for device in devices:
        if device.uuid in holders:
            run, _ = holders[device.uuid]
            runs.setdefault(f"{short(run.run_id)} {run_name(run)}", []).append(device.index)
        elif format_outside(device):
            words.append(f"device {device.index} {format_outside(device)}")
    words = [*(f"{run} on {numbers_text(indices)}" for run, indices in runs.items()), *words]
    more = [f"{len(words) - _MAX_HOLDERS} more"] if len(words) > _MAX_HOLDERS else []
    return "; ".join([*words[:_MAX_HOLDERS], *more])


def format_type(status: PoolStatus) -> list[str]:
    """Return a line for each type: `h100: 12 of 64 free on 8 nodes, largest free node 4`."""
    holders = device_holders(status)
    total: Counter[str] = Counter()
    nodes: dict[str, Counter[str]] = {}
    most = dict(status.inventory.elastic)
    for device in status.inventory.devices:
        kind = device.type + format_simulated(status, device.simulated)
        total[kind] += 1
        nodes.setdefault(kind, Counter())[device.node] += is_free(device, holders)
    lines: list[str] = []
    for kind, free in nodes.items():
        text = f"{kind}: {sum(free.values()):,} of {total[kind]:,} free on {count_of(len(free), 'node')}"
        largest = f", largest free node {max(free.values())}" if len(free) > 1 else ""
        lines.append(text + largest + _up_to(most.pop(kind, 0), total[kind]))
    most = {kind: count for kind, count in most.items() if count and kind != "cpu"}
    lines += [f"{kind}: none available now{_up_to(count, 0)}" for kind, count in most.items()]
    coming = (status.inventory.coming or "").strip()
    return [*lines, coming] if coming else lines


def node_rows(status: PoolStatus) -> list[Row]:
    """Return a row for each node, in a large pool those with most free first, and one for the nodes left out."""
    holders = device_holders(status)
    known = {node.node: node for node in status.inventory.nodes}
    nodes: dict[str, list[Device]] = {name: [] for name in known}
    for device in status.inventory.devices:
        nodes.setdefault(device.node, []).append(device)
    free = {name: sum(is_free(device, holders) for device in devices) for name, devices in nodes.items()}
    # sort a large pool by free devices; keep the order of a small one
    order = list(nodes) if len(nodes) <= _MAX_NODES else sorted(nodes, key=lambda name: -free[name])
    rows: list[Row] = []
    for name in order[:_MAX_NODES]:
        host, cores = (known[name].host, known[name].cores) if name in known else (name, 0)
        kinds = Counter(type_label(each.type) + format_simulated(status, each.simulated) for each in nodes[name])
        devices = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or count_of(cores, "core")
        used = [each.utilization_pct for each in nodes[name] if each.utilization_pct is not None]
        use = f"{sum(used) / len(used):.0f} %" if used else "-"
        rows.append((host, devices, str(free[name]) if kinds else "-", use, _users(nodes[name], holders)))
    if left := order[_MAX_NODES:]:
        rows.append((f"and {count_of(len(left), 'more node')}", "", f"{sum(free[name] for name in left):,}", "", ""))
    return rows


def _users(devices: Sequence[Device], holders: Holders) -> str:
    """Return the runs with most of a node's devices, and how many devices are in use outside the pool."""
    held = Counter(holders[device.uuid][0].run_id for device in devices if device.uuid in holders)
    runs = [f"{short(run_id)} has {count}" for run_id, count in held.most_common(_MAX_RUNS)]
    runs += [f"{len(held) - _MAX_RUNS} more"] if len(held) > _MAX_RUNS else []
    others = [device for device in devices if device.uuid not in holders]
    out = sum(bool(device.unavailable) for device in others)
    outside = sum(bool(device.outside_use) and not device.unavailable for device in others)
    words = [f"{outside} in use outside the pool"] if outside else []
    return ", ".join([*runs, *words, *([f"{out} unavailable"] if out else [])])


def _up_to(most: int, there: int) -> str:
    return f", up to {most:,} with those that the cluster may add" if most > there else ""
