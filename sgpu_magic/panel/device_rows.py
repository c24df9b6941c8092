"""A pool's devices as a panel draws them: each one of a few, those of a large pool by node. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from sgpu_magic.panel.picture import DevicePicture
from sgpu_magic.views.pool_words import device_name, outside_words
from sgpu_magic.views.run_notes import run_name
from sgpu_magic.wire.devices import Device, Inventory
from sgpu_magic.wire.pool_status import RunSummary
from sgpu_magic.wire.states import RunKind

Holders = Mapping[str, tuple[RunSummary, int]]
"""By a device's UUID, who holds it, and the rank that it belongs to."""

_FREE = "free"
# of more nobody looks at each; nor at more nodes
_MOST_DEVICES = 64
_MOST_NODES = 32


def device_pictures(inventory: Inventory, order: Mapping[str, int], holders: Holders) -> tuple[DevicePicture, ...]:
    """Return what is drawn of a pool's devices.

    In a pool of many nodes with many devices, those that notebooks hold come first, each for itself, and then the
    nodes, those with most free devices before others.

    Args:
        inventory: What the pool has.
        order: By type, its place among types.
        holders: Who holds what.
    """
    devices = sorted(inventory.devices, key=lambda one: order[one.type])
    hosts = {node.node: node.host for node in inventory.nodes}
    if not hosts or len(devices) <= _MOST_DEVICES:
        return tuple(_device(device, holders, hosts.get(device.node, "")) for device in devices)
    held = [device for device in devices if device.uuid in holders and holders[device.uuid][0].kernel]
    nodes: dict[tuple[str, str], list[Device]] = {}
    for device in devices:
        nodes.setdefault((device.node, device.type), []).append(device)
    rows = [_node(hosts.get(node, node), of_node, holders) for (node, _), of_node in nodes.items()]
    rows.sort(key=lambda row: row[0], reverse=True)
    return (
        *(_device(device, holders, hosts.get(device.node, "")) for device in held[:_MOST_DEVICES]),
        *(picture for _, picture in rows[:_MOST_NODES]),
    )


def is_free(device: Device, holders: Holders) -> bool:
    """Whether the pool may give it away."""
    return device.uuid not in holders and not device.outside_use


def file_name(path: str) -> str:
    """Return a notebook's name without its folders."""
    return PurePath(path).name


def _device(device: Device, holders: Holders, host: str) -> DevicePicture:
    run, rank = holders.get(device.uuid, (None, 0))
    if run is None:
        user = outside_words(device) or _FREE
    elif run.kind is RunKind.SESSION:
        user = file_name(run.notebook) or run_name(run)
    else:
        user = f"{run_name(run)} · rank {rank}"
    return DevicePicture(
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
    )


def _node(host: str, devices: Sequence[Device], holders: Holders) -> tuple[int, DevicePicture]:
    """Return how many of the node's devices of a type are free, and their picture."""
    free = sum(is_free(device, holders) for device in devices)
    used = [device.used_bytes for device in devices if device.used_bytes is not None]
    busy = [device.utilization_pct for device in devices if device.utilization_pct is not None]
    first = devices[0]
    return free, DevicePicture(
        uuid=f"{first.node} {first.type}",
        type=first.type,
        label=f"{host} · {len(devices)} {first.type.upper()}",
        simulated=first.simulated,
        utilization_pct=sum(busy) / len(busy) if busy else None,
        used_bytes=sum(used) if used else None,
        memory_bytes=sum(device.memory_bytes for device in devices),
        run_id="",
        kernel="",
        user=f"{free} of {len(devices)} free",
        free=free == len(devices),
    )
