"""Records of devices: what a node has, what a run asks for, what it is granted."""

from __future__ import annotations

from sgpu_magic.wire.record import Record


class Device(Record, frozen=True, kw_only=True):
    """One GPU (or simulated GPU) of a node.

    Args:
        uuid: NVML's UUID, `SIM-a10-0` for a simulated one. The only key a device is known by.
        type: Canonical short type, lower case: `a10`, `h100`.
        name: NVML's full name.
        index: Position on its node in PCI bus order, for display.
        memory_bytes: Total memory; 0 when unknown.
        simulated: True when CPU processes stand in for it.
        used_bytes: Memory in use now; None when the driver does not tell.
        utilization_pct: 0 to 100; None when the driver does not tell.
        outside_use: Why it counts as in use outside the pool, "" when it does not.
        node: The id of its node, "" in a pool of one machine.
    """

    uuid: str
    type: str
    name: str = ""
    index: int = 0
    memory_bytes: int = 0
    simulated: bool = False
    used_bytes: int | None = None
    utilization_pct: float | None = None
    outside_use: str = ""
    node: str = ""


class Node(Record, frozen=True, kw_only=True):
    """One machine of a pool that has many.

    Args:
        node: Its id, stable while it lives.
        host: Its name, for people.
        address: Where other nodes reach it: an IP address.
        cores: CPU cores.
        cpu_slots: CPU ranks that fit at once.
        cpu_slots_free: Of these, those that nobody outside the pool uses.
        driver: The NVIDIA driver's version, "" without one.
    """

    node: str
    host: str
    address: str = ""
    cores: int = 1
    cpu_slots: int = 0
    cpu_slots_free: int = 0
    driver: str = ""


class Inventory(Record, frozen=True, kw_only=True):
    """What a pool really has: one machine's devices, or those of many nodes.

    Args:
        host: The machine, or the name of the cluster.
        devices: All of them.
        cpu_slots: CPU ranks that fit at once, on all nodes together.
        nodes: The machines of a pool of many, empty in a pool of one: then everything is on `host`.
        elastic: (type, devices) that an autoscaler may bring at most, those that are there included; `cpu` for slots.
        coming: A sentence on what an autoscaler is bringing now, "" when nothing.
        problem: Why NVML could not tell, "" when it could or no driver exists.
        driver: The NVIDIA driver's version, "" without one.
    """

    host: str
    devices: tuple[Device, ...] = ()
    cpu_slots: int = 16
    cores: int = 1
    problem: str = ""
    driver: str = ""
    nodes: tuple[Node, ...] = ()
    elastic: tuple[tuple[str, int], ...] = ()
    coming: str = ""


class Placement(Record, frozen=True, kw_only=True):
    """What a run asks for.

    Args:
        ranks: Number of ranks, at least 1.
        device_type: Canonical type, `cpu`, or `any` (the pool's choice: GPUs where there are, else CPU).
        allow_busy: Also take devices that others use.
        stand_in: Run on CPU where the pool lacks the type (`SGPU_STAND_IN=cpu`).
        nodes: Number of nodes that the ranks are spread over evenly; 0 leaves it to the pool.
        strategy: `pack` on as few nodes as can be, `strict_pack` on one, `spread` over as many as can be.
        min_memory_bytes: Devices with less memory are not taken; 0 takes any.
    """

    ranks: int
    device_type: str = "any"
    allow_busy: bool = False
    stand_in: bool = False
    nodes: int = 0
    strategy: str = "pack"
    min_memory_bytes: int = 0


class NodeShare(Record, frozen=True, kw_only=True):
    """The part of a lease that is on one node. Ranks are numbered through, share after share.

    Args:
        node: The node's id.
        host: Its name, for people.
        address: Where other nodes reach it.
        ranks: How many ranks are there.
        uuids: Their devices in rank order; empty for CPU slots.
    """

    node: str
    host: str
    ranks: int
    address: str = ""
    uuids: tuple[str, ...] = ()


class Lease(Record, frozen=True, kw_only=True):
    """Devices granted to one run.

    Args:
        lease_id: Its id.
        device_type: The type granted, `cpu` for slots.
        uuids: The devices in rank order; empty for CPU slots.
        cpu_slots: CPU slots held (0 when devices are).
        simulated: CPU stands in for the type.
        note: What the user should know, such as oversubscription; "" when nothing.
        shares: Which node has which part, in rank order; empty in a pool of one machine.
    """

    lease_id: str
    device_type: str
    ranks: int
    uuids: tuple[str, ...] = ()
    cpu_slots: int = 0
    simulated: bool = False
    note: str = ""
    shares: tuple[NodeShare, ...] = ()
