"""Records of devices: what a node has, what a run asks for, what it is granted."""

from __future__ import annotations

from sgpu_magic.protocol.record import Record


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


class Inventory(Record, frozen=True, kw_only=True):
    """What a node really has.

    Args:
        problem: Why NVML could not tell, "" when it could or no driver exists.
        driver: The NVIDIA driver's version, "" without one.
    """

    host: str
    devices: tuple[Device, ...] = ()
    cpu_slots: int = 16
    cores: int = 1
    problem: str = ""
    driver: str = ""


class Placement(Record, frozen=True, kw_only=True):
    """What a run asks for.

    Args:
        ranks: Number of ranks, at least 1.
        device_type: Canonical type, `cpu`, or `any` (the pool's choice: GPUs where there are, else CPU).
        allow_busy: Also take devices that others use.
        stand_in: Run on CPU where the pool lacks the type (`SGPU_STAND_IN=cpu`).
    """

    ranks: int
    device_type: str = "any"
    allow_busy: bool = False
    stand_in: bool = False


class Lease(Record, frozen=True, kw_only=True):
    """Devices granted to one run.

    Args:
        lease_id: Its id.
        device_type: The type granted, `cpu` for slots.
        uuids: The devices in rank order; empty for CPU slots.
        cpu_slots: CPU slots held (0 when devices are).
        simulated: CPU stands in for the type.
        note: What the user should know, such as oversubscription; "" when nothing.
    """

    lease_id: str
    device_type: str
    ranks: int
    uuids: tuple[str, ...] = ()
    cpu_slots: int = 0
    simulated: bool = False
    note: str = ""
