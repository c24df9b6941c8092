"""A pool's devices as a panel shows them, and an estimate of when more of them will be free. Pure functions."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath

import msgspec
from msgspec.structs import replace

from sgpu_magic.panel.schema import PanelDevice, PanelHistory
from sgpu_magic.views.format_pool import HOLDING, Holders, device_name, format_outside, is_free
from sgpu_magic.views.history_table import MAX_NAMED_RUNS, recent_runs
from sgpu_magic.views.run_notes import run_name
from sgpu_magic.wire.base import RunKind, RunState
from sgpu_magic.wire.devices import CPU, Device, Inventory
from sgpu_magic.wire.pool_status import DeviceHistory, RunSummary

Use = Mapping[str, tuple[float | None, int | None]]
"""Maps a device's UUID to its utilization in percent and the memory in use in bytes; None when unknown."""

MOST_DEVICES = 64
"""The most devices that are listed, and that have a history each, in a pool of several nodes."""

_FREE = "free"
# larger pools are shown by node, with at most `_MOST_NODES` nodes
_MOST_NODES = 32
# shortest wait for a device that is not free now
_LEAST_S = 1.0
# estimates are rounded up: (upper limit in seconds, step in seconds)
_STEPS = ((60.0, 10.0), (600.0, 30.0), (float("inf"), 60.0))


class PanelHistories(msgspec.Struct, frozen=True):
    """The last ten minutes of a pool's devices.

    Args:
        devices: By UUID; empty in pools with more than 64 devices.
        types: The means of the types in such pools.
    """

    devices: Mapping[str, PanelHistory] = {}
    types: Mapping[str, PanelHistory] = {}


NO_HISTORIES = PanelHistories()


def panel_histories(histories: Iterable[DeviceHistory], runs: Iterable[RunSummary], now: float) -> PanelHistories:
    """Return the pool's histories; a device's has the runs that held it. Arguments as in `pool_snapshot`."""
    recent = recent_runs(runs, now)
    devices: dict[str, PanelHistory] = {}
    types: dict[str, PanelHistory] = {}
    for history in histories:
        use, memory = history.utilization_pct, history.memory_pct
        if history.uuid:
            held_by = recent.get(history.uuid, ())[:MAX_NAMED_RUNS]
            devices[history.uuid] = PanelHistory(utilization_pct=use, memory_pct=memory, runs=held_by)
        else:
            types[history.type] = PanelHistory(utilization_pct=use, memory_pct=memory)
    return PanelHistories(devices, types)


def panel_devices(
    inventory: Inventory,
    order: Mapping[str, int],
    holders: Holders,
    histories: PanelHistories = NO_HISTORIES,
) -> tuple[PanelDevice, ...]:
    """Return what a panel shows of a pool's devices.

    A pool of several nodes and more than 64 devices is summarized: first each device that a notebook holds, then one
    row for each node and type, those with most free devices first.

    Args:
        inventory: The pool's inventory.
        order: Maps a type to its position among the types.
        holders: The runs that hold devices.
        histories: The devices' last ten minutes.
    """

    def device_of(device: Device) -> PanelDevice:
        return _device(device, holders, hosts.get(device.node, ""), histories.devices.get(device.uuid))

    devices = sorted(inventory.devices, key=lambda one: order[one.type])
    hosts = {node.node: node.host for node in inventory.nodes}
    if not hosts or len(devices) <= MOST_DEVICES:
        return tuple(map(device_of, devices))
    held = [device for device in devices if device.uuid in holders and holders[device.uuid][0].kernel]
    nodes: dict[tuple[str, str], list[Device]] = {}
    for device in devices:
        nodes.setdefault((device.node, device.type), []).append(device)
    rows = [_node(hosts.get(node, node), of_node, holders) for (node, _), of_node in nodes.items()]
    rows.sort(key=lambda row: row[0], reverse=True)
    return (
        *map(device_of, held[:MOST_DEVICES]),
        *(snapshot for _, snapshot in rows[:_MOST_NODES]),
    )


def with_use(inventory: Inventory, use: Use) -> Inventory:
    """Return an inventory in which these devices have this use."""
    devices = (
        replace(device, utilization_pct=use[device.uuid][0], used_bytes=use[device.uuid][1])
        if device.uuid in use
        else device
        for device in inventory.devices
    )
    return replace(inventory, devices=tuple(devices)) if use else inventory


def file_name(path: str) -> str:
    """Return a notebook's name without its folders."""
    return PurePath(path).name


def _device(device: Device, holders: Holders, host: str, history: PanelHistory | None) -> PanelDevice:
    run, rank = holders.get(device.uuid, (None, 0))
    if run is None:
        user = format_outside(device) or _FREE
    elif run.kind is RunKind.SESSION:
        user = file_name(run.notebook) or run_name(run)
    else:
        user = f"{run_name(run)} · rank {rank}"
    return PanelDevice(
        uuid=device.uuid,
        type=device.type,
        label=f"{device_name(device)} · {host}" if host else device_name(device),
        simulated=device.simulated,
        utilization_pct=device.utilization_pct,
        used_bytes=device.used_bytes,
        memory_bytes=device.memory_bytes,
        run_id="" if run is None else run.run_id,
        kernel="" if run is None else run.kernel,
        user=user,
        free=is_free(device, holders),
        history=history,
    )


def _node(host: str, devices: Sequence[Device], holders: Holders) -> tuple[int, PanelDevice]:
    """Return how many of the node's devices of a type are free, and their snapshot."""
    free = sum(is_free(device, holders) for device in devices)
    used = [device.used_bytes for device in devices if device.used_bytes is not None]
    busy = [device.utilization_pct for device in devices if device.utilization_pct is not None]
    first = devices[0]
    return free, PanelDevice(
        uuid=f"{first.node} {first.type}",
        type=first.type,
        label=f"{host} · {len(devices)} {first.type.upper()}",
        simulated=first.simulated,
        utilization_pct=sum(busy) / len(busy) if busy else None,
        used_bytes=sum(used) if used else None,
        memory_bytes=sum(device.memory_bytes for device in devices),
        user=f"{free} of {len(devices)} free",
        free=free == len(devices),
    )


class Claim(msgspec.Struct, frozen=True):
    """Devices that a run holds, or that a run in the queue requests.

    Args:
        count: Their number.
        left_s: Estimated seconds from now, or from its start, until it releases them; None when unknown.
    """

    count: int
    left_s: float | None


class Durations:
    """How long ended runs held their devices.

    Args:
        runs: The ledger's rows; runs that have not ended, never started or used a session's devices are skipped.
    """

    def __init__(self, runs: Iterable[RunSummary]) -> None:
        self._of: dict[tuple[str, ...], list[float]] = {}
        for run in runs:
            began = run.metered_at if run.metered_at is not None else run.started_at
            if run.session or began is None or run.ended_at is None or not run.state.is_final:
                continue
            took = max(0.0, run.ended_at - began)
            for key in _keys(run.device_type, run):
                bisect.insort(self._of.setdefault(key, []), took)

    def left_s(self, run: RunSummary, device_type: str, elapsed_s: float) -> float | None:
        """Return how much longer a run will hold its devices, None when no similar run has ended before.

        Args:
            run: An active or queued run.
            device_type: The type of its devices.
            elapsed_s: How long it has held them.
        """
        known = next((found for key in _keys(device_type, run) if (found := self._of.get(key))), None)
        if known is None:
            return None
        longer = known[bisect.bisect_right(known, elapsed_s) :]
        return max(_LEAST_S, _median(longer) - elapsed_s if longer else elapsed_s)


def _keys(device_type: str, run: RunSummary) -> Sequence[tuple[str, ...]]:
    """Return keys for finding similar runs, the most specific first."""
    kind = "session" if run.kind is RunKind.SESSION else "run"
    return (device_type, kind, run.name), (device_type, kind), (device_type,)


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def waits(total: int, free: int, held: Iterable[Claim], queue: Iterable[Claim]) -> tuple[float | None, ...]:
    """Return, for each number of devices from 1 to `total`, the estimated seconds until that many are free.

    Args:
        total: Number of devices of the type.
        free: Number of these that are free now.
        held: The devices that runs hold.
        queue: The runs that wait for them, in order.

    Returns:
        Non-decreasing seconds: 0 for as many as are free now, None when unknown.
    """
    found: list[float | None] = [0.0] * free + [None] * (total - free)
    ends = sorted((max(_LEAST_S, one.left_s), one.count) for one in held if one.left_s is not None)
    waiting = [one for one in queue if one.count <= total]
    now, most = 0.0, free
    while True:
        free, waiting = _grant(free, waiting, now, ends)
        for number in range(most, min(free, total)):
            found[number] = now
        most = max(most, min(free, total))
        if not ends:
            return tuple(None if wait is None else _in_steps(wait) for wait in found)
        now = ends[0][0]
        while ends and ends[0][0] <= now:
            free += ends.pop(0)[1]
        free = min(free, total)


def _grant(free: int, waiting: list[Claim], now: float, ends: list[tuple[float, int]]) -> tuple[int, list[Claim]]:
    """Grant devices to the runs that fit; return the number left and the runs that still wait."""
    left: list[Claim] = []
    for one in waiting:
        if one.count > free:
            left.append(one)
            continue
        free -= one.count
        if one.left_s is not None:
            bisect.insort(ends, (now + max(_LEAST_S, one.left_s), one.count))
    return free, left


def _in_steps(wait_s: float) -> float:
    step = next(step for until, step in _STEPS if wait_s <= until)
    return -(-wait_s // step) * step


def holders_of(
    device_type: str, runs: Iterable[RunSummary], durations: Durations, now: float, uuids: frozenset[str]
) -> list[Claim]:
    """Return the devices of a type that runs hold.

    Args:
        device_type: As in `--type`.
        runs: The pool's runs.
        durations: Durations of earlier runs.
        now: Wall-clock time, seconds since the epoch.
        uuids: The type's devices; empty for CPU slots.
    """
    found: list[Claim] = []
    for run in runs:
        if run.state not in HOLDING or run.session:
            continue
        # a run without devices has slots, as many as ranks
        count = len(uuids.intersection(run.uuids)) if uuids or run.uuids else run.ranks
        if not count:
            continue
        began = run.metered_at if run.metered_at is not None else run.started_at
        left_s = durations.left_s(run, device_type, 0.0 if began is None else max(0.0, now - began))
        if run.idle_ends_at is not None:
            # the session ends then unless it is used again
            idle_s = max(_LEAST_S, run.idle_ends_at - now)
            left_s = idle_s if left_s is None else min(left_s, idle_s)
        found.append(Claim(count, left_s))
    return found


def queue_of(device_type: str, runs: Iterable[RunSummary], durations: Durations, main_type: str = CPU) -> list[Claim]:
    """Return the runs that wait for devices of a type, in queue order.

    Args:
        device_type: As in `--type`.
        runs: The pool's runs.
        durations: Durations of earlier runs.
        main_type: The type that the pool chooses for runs that name none.
    """
    waiting = [run for run in runs if run.state is RunState.QUEUED and not run.session]
    waiting = [run for run in waiting if (main_type if run.device_type == "any" else run.device_type) == device_type]
    waiting.sort(key=lambda run: (run.position is None, run.position or 0, run.submitted_at))
    return [Claim(run.ranks, durations.left_s(run, device_type, 0.0)) for run in waiting]
