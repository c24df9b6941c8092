"""What the nodes of a pool have together. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sgpu_magic.wire.devices import Inventory, Node


def merged_inventory(host: str, inventories: Mapping[str, Inventory], addresses: Mapping[str, str]) -> Inventory:
    """Join the inventories that the nodes' agents have told.

    Args:
        host: What the whole is called.
        inventories: By node id.
        addresses: By node id, where other nodes reach it.
    """
    nodes = tuple(
        Node(
            node=node,
            host=inventory.host,
            address=addresses.get(node, ""),
            cores=inventory.cores,
            cpu_slots=inventory.cpu_slots,
            cpu_slots_free=inventory.cpu_slots,
            driver=inventory.driver,
        )
        for node, inventory in inventories.items()
    )
    problems = [f"{inventory.host}: {inventory.problem}" for inventory in inventories.values() if inventory.problem]
    return Inventory(
        host=host,
        devices=tuple(
            # simulated devices are named alike on every node
            msgspec.structs.replace(
                device, node=node, uuid=f"{device.uuid}@{node}" if device.simulated else device.uuid
            )
            for node, inventory in inventories.items()
            for device in inventory.devices
        ),
        cpu_slots=sum(node.cpu_slots for node in nodes),
        cores=sum(node.cores for node in nodes),
        problem="; ".join(problems),
        driver=next((node.driver for node in nodes if node.driver), ""),
        nodes=nodes,
    )
