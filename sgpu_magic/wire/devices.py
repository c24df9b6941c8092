"""Devices: one short name per GPU model, how GPUs are connected; what a node has, a run asks for, a run is granted."""

from __future__ import annotations

import re

from sgpu_magic.wire.record import Record

CPU = "cpu"
ANY = "any"

# Total memory in MiB as the driver reports it (ECC on where it is the default), the usual size of each type.
_MEMORY_MIB = {
    "a2": 15356,
    "a10": 23028,
    "a16": 15356,
    "a30": 24576,
    "a40": 46068,
    "a100": 81920,
    "a800": 81920,
    "a4000": 16376,
    "a5000": 24564,
    "a6000": 49140,
    "b200": 183359,
    "b300": 275040,
    "gb200": 189471,
    "gh200": 97871,
    "gtx1080ti": 11264,
    "h20": 97871,
    "h100": 81559,
    "h200": 143771,
    "h800": 81559,
    "k80": 11441,
    "l4": 23034,
    "l40": 46068,
    "l40s": 46068,
    "p4": 7680,
    "p40": 23040,
    "p100": 16384,
    "rtx2080ti": 11264,
    "rtx3080": 10240,
    "rtx3090": 24576,
    "rtx4000ada": 20475,
    "rtx4080": 16376,
    "rtx4090": 24564,
    "rtx5000ada": 32760,
    "rtx5080": 16303,
    "rtx5090": 32607,
    "rtx6000ada": 49140,
    "rtxpro6000": 97887,
    "t4": 15360,
    "titanrtx": 24576,
    "titanv": 12288,
    "v100": 16384,
}

KNOWN_TYPES: tuple[str, ...] = tuple(_MEMORY_MIB)
"""The types that completion offers. Others are accepted by their full NVML name."""

# The same chip under a cloud's or a workstation's name.
_ALIASES = {
    "a10g": "a10",
    "h100nvl": "h100",
    "rtxa4000": "a4000",
    "rtxa5000": "a5000",
    "rtxa6000": "a6000",
    "t4g": "t4",
    "v100s": "v100",
}

_MIG_SUFFIX = re.compile(r"[ _-]mig([ _-].*)?$")
_WORD = re.compile(r"[a-z0-9]+")
_VENDORS = ("nvidia", "tesla", "geforce", "quadro", "grid")
# Words that say how a card is built, not which it is: board, memory size and kind, series.
_FORM = re.compile(
    r"nvidia|tesla|geforce|sxm[2-9]?|pcie|nvl|fhhl|dgxs|\d+gb|hbm\d?e?|generation|blackwell|workstation|server|edition|gpu|ac"
)
# A model that is not in the table still has a recognisable short name.
_CONSUMER = re.compile(r"(gtx|rtx)\d{3,4}(ti|super|tisuper|ada|sffada|d)?(laptop)?")


def canonical_type(text: str) -> str:
    """Return the short type that `text` means.

    Args:
        text: A short type (`a10`, `A10G`), `cpu`, `any`, or a full name as NVML gives it
            (`NVIDIA A100-SXM4-80GB`), in any case. A MIG slice has its GPU's type.

    Returns:
        One of `KNOWN_TYPES`, `cpu`, `any`, or for a model that is not listed a name made of its words:
        `rtx3060`, `nvidia-gb10`. Applying the function again changes nothing.

    Raises:
        ValueError: It is no device type; the message names those close to it.
    """
    asked = text.strip().lower()
    if asked in (CPU, ANY):
        return asked
    words = _WORD.findall(_MIG_SUFFIX.sub("", asked))
    model = [word for word in words if not _FORM.fullmatch(word)]
    joined = "".join(model)
    short = _ALIASES.get(joined, joined)
    if short in _MEMORY_MIB or _CONSUMER.fullmatch(short):
        return short
    if len(words) > 1 and words[0] in _VENDORS:
        return "-".join(words)
    # only now: ranks import this module too
    import difflib

    near = difflib.get_close_matches(joined, KNOWN_TYPES, n=3) if joined else []
    if near:
        raise ValueError(f"{text[:60]!r} is no device type. Did you mean {' or '.join(near)}?")
    raise ValueError(f"{text[:60]!r} is no device type. Types are {', '.join(KNOWN_TYPES)}, {CPU} and {ANY}.")


def memory_of(device_type: str) -> int:
    """Return the memory in bytes that a GPU of this canonical type usually has, 0 when that is not known."""
    return _MEMORY_MIB.get(device_type, 0) << 20


# ---------------------------------------------------------------- interconnects

# By NVIDIA's data sheets: SXM boards and the superchips have NVLink to their neighbours; of the cards for PCIe slots
# only those of two generations take a bridge, which joins two and which no name tells, so that they count as PCIe.
NVLINK, PCIE, UNKNOWN = "NVLink", "PCIe", ""

# models of which only boards with NVLink exist
_ALWAYS_NVLINK = frozenset({"b200", "b300", "gb200", "gh200"})
# models that exist as cards only
_ALWAYS_PCIE = frozenset(
    {"a2", "a10", "a16", "a4000", "a5000", "a6000", "a30", "a40", "k80", "l4", "l40", "l40s", "p4", "p40", "t4"}
)
_CARDS = ("rtx", "gtx", "titan")


def interconnect_of(device_type: str, name: str = "") -> str:
    """Return `NVLink`, `PCIe`, or "" where it is not known.

    Args:
        device_type: Canonical.
        name: NVML's full name, which tells an SXM board from a card.
    """
    words = name.upper().replace("-", " ").split()
    if device_type in _ALWAYS_NVLINK or any(word.startswith("SXM") for word in words):
        return NVLINK
    if device_type in _ALWAYS_PCIE or device_type.startswith(_CARDS):
        return PCIE
    return PCIE if any(word.startswith("PCI") for word in words) else UNKNOWN


# ---------------------------------------------------------------- records


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
