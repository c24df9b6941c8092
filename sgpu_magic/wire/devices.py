"""Devices: short names of GPU models, interconnects, a node's devices, placement requests and leases."""

from __future__ import annotations

import re

from sgpu_magic.suggestions import did_you_mean
from sgpu_magic.wire.base import Record

CPU = "cpu"
ANY = "any"
# of one run on one machine; a run of more is taken for a mistake
_MOST_RANKS_PER_SLOT = 4

# Memory of each type in GB as the vendor states it; of several variants the most common one.
_MODELS = (
    "a2:16 a10:24 a16:16 a30:24 a40:48 a100:80 a800:80 a4000:16 a5000:24 a6000:48 b200:180 b300:288 gb200:186 gh200:96 "
    "gtx1080ti:11 h20:96 h100:80 h200:141 h800:80 k80:12 l4:24 l40:48 l40s:48 p4:8 p40:24 p100:16 rtx2080ti:11 "
    "rtx3080:10 rtx3090:24 rtx4000ada:20 rtx4080:16 rtx4090:24 rtx5000ada:32 rtx5080:16 rtx5090:32 rtx6000ada:48 "
    "rtxpro6000:96 t4:16 titanrtx:24 titanv:12 v100:16"
)
_MEMORY_GB = {model: int(size) for model, size in re.findall(r"(\w+):(\d+)", _MODELS)}

# all sizes that are sold, with those of other variants and of MIG slices
_SIZES_GB = sorted({*_MEMORY_GB.values(), 1, 2, 3, 4, 5, 6, 40, 64, 94, 120, 144, 192})
_GB = 10**9
# The driver reports GiB, less what it and ECC take: 22.5 GiB of an A10's 24 GB, at least 92 % of any model's.
_LEAST_REPORTED = 0.92

KNOWN_TYPES: tuple[str, ...] = tuple(_MEMORY_GB)
"""The types offered by completion. Others are accepted by their full NVML name."""

# Names of the same chip in clouds or workstations.
_ALIASES = {
    "a10g": "a10",
    "h100nvl": "h100",
    "rtxa4000": "a4000",
    "rtxa5000": "a5000",
    "rtxa6000": "a6000",
    "t4g": "t4",
    "v100s": "v100",
}

# a slice of a GPU: NVML's `NVIDIA H100 80GB HBM3 MIG 3g.40gb` is the type `h100-3g.40gb`
_SLICE = re.compile(r"[ _-](?:mig[ _-])?(?P<profile>(?:\d+c\.)?\d+g\.(?P<gb>\d+)gb(?:[+.-][a-z0-9.]+)*)$")
_SLICE_OF_NO_PROFILE = re.compile(r"[ _-]mig([ _-].*)?$")
_WORD = re.compile(r"[a-z0-9]+")
_VENDORS = ("nvidia", "tesla", "geforce", "quadro", "grid")
# Words for a card's form, not its model: board, memory size and kind, series.
_FORM = re.compile(
    r"nvidia|tesla|geforce|sxm[2-9]?|pcie|nvl|fhhl|dgxs|\d+gb|hbm\d?e?|generation|blackwell|workstation|server|edition|gpu|ac"
)
# Short names of models that are not in the table.
_CONSUMER = re.compile(r"(gtx|rtx)\d{3,4}(ti|super|tisuper|ada|sffada|d)?(laptop)?")
# models that exist only with NVLink
_ALWAYS_NVLINK = frozenset({"b200", "b300", "gb200", "gh200"})
# models that exist only as PCIe cards
_ALWAYS_PCIE = frozenset(
    {"a2", "a10", "a16", "a4000", "a5000", "a6000", "a30", "a40", "k80", "l4", "l40", "l40s", "p4", "p40", "t4"}
)
_CARDS = ("rtx", "gtx", "titan")


def canonical_type(text: str) -> str:
    """Return the canonical short type for `text`.

    Args:
        text: A short type (`a10`, `A10G`), `cpu`, `any`, or a full NVML name (`NVIDIA A100-SXM4-80GB`), in any case. A
            MIG slice has a type of its own, that of its GPU and its profile: `h100-3g.40gb`.

    Returns:
        One of `KNOWN_TYPES`, `cpu`, `any`, or for an unlisted model a name made of its words: `rtx3060`,
        `nvidia-gb10`. The function is idempotent.

    Raises:
        ValueError: `text` is not a device type; the message suggests similar ones.
    """
    asked = text.strip().lower()
    if asked in (CPU, ANY):
        return asked
    if (part := _SLICE.search(asked)) is not None:
        return f"{canonical_type(asked[: part.start()])}-{part['profile']}"
    if (part := _SLICE_OF_NO_PROFILE.search(asked)) is not None:
        return f"{canonical_type(asked[: part.start()])}-mig"
    words = _WORD.findall(asked)
    joined = "".join(word for word in words if not _FORM.fullmatch(word))
    short = _ALIASES.get(joined, joined)
    if short in _MEMORY_GB or _CONSUMER.fullmatch(short):
        return short
    if len(words) > 1 and words[0] in _VENDORS:
        return "-".join(words)
    types = f"Types are {', '.join(KNOWN_TYPES)}, {CPU} and {ANY}."
    raise ValueError(f"`{text[:60]}` is not a device type. {did_you_mean(joined, KNOWN_TYPES, most=3) or types}")


def type_named(name: str) -> str:
    """Return the type of a device with this name; an unknown name also gives a type that users can request."""
    try:
        return canonical_type(name)
    except ValueError:
        return canonical_type(f"nvidia gpu {name}")


def memory_of(device_type: str) -> int:
    """Return the memory in bytes of a device of this canonical type as its vendor states it, 0 if unknown."""
    if (part := _SLICE.search(device_type)) is not None:
        return int(part["gb"]) * _GB
    return _MEMORY_GB.get(device_type, 0) * _GB


def vendor_bytes(reported_bytes: int) -> int:
    """Return a device's memory as its vendor states it: 80 GB for the 85.5 GB that the driver of an H100 reports.

    Vendors count in GiB and write GB, and the driver reports less than the whole. A size that no vendor uses is rounded
    to whole GiB, and called GB as well.

    Args:
        reported_bytes: Total memory in bytes as the driver reports it, or a vendor's number, which is returned as it
            is; 0 if unknown.
    """
    if reported_bytes % _GB == 0 or reported_bytes < 1 << 29:
        return reported_bytes
    gib = reported_bytes / (1 << 30)
    size = next((size for size in _SIZES_GB if size >= gib * 0.999), 0)
    return (size if gib >= _LEAST_REPORTED * size > 0 else round(gib)) * _GB


def type_label(device_type: str) -> str:
    """Return a device type as messages and views name it: `A10` for `a10`, `CPU` for `cpu`; "" for any."""
    return "" if device_type in ("", ANY) else device_type.upper()


def memory_text(reported_bytes: int) -> str:
    """Return a device's memory as its vendor states it: `80 GB`; `?` if unknown."""
    size = vendor_bytes(reported_bytes)
    return f"{size / _GB:.{0 if size % _GB == 0 else 1}f} GB" if size else "?"


def used_bytes_of(used_bytes: int, reported_bytes: int) -> float:
    """Return memory in use on the scale of `vendor_bytes`, so that it never exceeds the device's memory."""
    return used_bytes * vendor_bytes(reported_bytes) / reported_bytes if reported_bytes else used_bytes


# ---------------------------------------------------------------- interconnects

# By NVIDIA's data sheets, SXM boards and the superchips have NVLink to their neighbours. Among PCIe cards, only those
# of two generations support a bridge between two cards. Their name does not show it, so they count as PCIe.
NVLINK, PCIE, UNKNOWN = "NVLink", "PCIe", ""


def interconnect_of(device_type: str, name: str = "") -> str:
    """Return `NVLink`, `PCIe`, or "" if unknown.

    Args:
        device_type: Canonical type.
        name: Full NVML name, which distinguishes an SXM board from a PCIe card.
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
        uuid: NVML's UUID; `SIM-a10-0` for a simulated device. The only key that identifies a device.
        type: Canonical short type, lower case: `a10`, `h100`.
        name: Full NVML name.
        index: Position on its node in PCI bus order, as in nvidia-smi; of a simulated device, among those of its type.
        memory_bytes: Total memory as the driver reports it; 0 if unknown.
        simulated: The device is simulated by CPU processes.
        used_bytes: Memory in use; None if the driver does not report it.
        utilization_pct: 0 to 100; None if the driver does not report it.
        outside_use: Why it counts as in use outside the pool; None if it does not.
        unavailable: Why no run can have it, even one that takes devices in use, with the remedy; None if one can.
        node: Id of its node; "" in a single-machine pool.
        distances: How far it is from each device of its node, by their index: 0 over NVLink, else NVML's level of their
            common ancestor, from 10 (the same PCIe switch) to 50 (other sockets). Empty if unknown.
    """

    uuid: str
    type: str
    name: str = ""
    index: int = 0
    memory_bytes: int = 0
    simulated: bool = False
    used_bytes: int | None = None
    utilization_pct: float | None = None
    outside_use: str | None = None
    node: str = ""
    distances: tuple[int, ...] = ()
    unavailable: str | None = None


def is_slice(uuid: str) -> bool:
    """Whether this is the UUID of a MIG slice. A process can use one slice only, and NCCL none together with others."""
    return uuid.startswith("MIG-")


def backend(lease: Lease) -> str:
    """Return the process group's backend: `nccl` on real GPUs, else `gloo`, also on MIG slices."""
    has_gpus = not lease.simulated and lease.device_type != CPU and not any(map(is_slice, lease.uuids))
    return "nccl" if has_gpus else "gloo"


def memory_bytes(device: Device) -> int:
    """Return the memory that a request's minimum is compared with, 0 if unknown.

    It is the larger of the driver's number and the vendor's, so that both `80GB` and `79GiB` fit an H100.
    """
    return max(device.memory_bytes, vendor_bytes(device.memory_bytes)) or memory_of(device.type)


class Node(Record, frozen=True, kw_only=True):
    """One machine of a multi-node pool.

    Args:
        node: The node's id, stable for its lifetime.
        host: Host name, for display.
        address: IP address at which other nodes reach it.
        cores: Number of CPU cores.
        cpu_slots: Number of CPU ranks that fit at once.
        cpu_slots_free: Number of CPU slots that are not in use outside the pool.
        driver: Version of the NVIDIA driver; "" without one.
    """

    node: str
    host: str
    address: str = ""
    cores: int = 1
    cpu_slots: int = 0
    cpu_slots_free: int = 0
    driver: str = ""


class Inventory(Record, frozen=True, kw_only=True):
    """The devices and CPU slots of a pool: those of one machine, or of many nodes.

    Args:
        host: Host name of the machine, or the name of the cluster.
        devices: All devices.
        cpu_slots: Number of CPU ranks that fit at once, on all nodes together.
        nodes: The machines of a multi-node pool; empty in a single-machine pool, where everything is on `host`.
        elastic: (type, number) of the most devices that an autoscaler can provide, including existing ones; `cpu` for
            slots.
        coming: A sentence about what an autoscaler is starting; None for nothing.
        problem: Why NVML could not be read; None if it could, or if there is no driver.
        driver: Version of the NVIDIA driver; "" without one.
    """

    host: str
    devices: tuple[Device, ...] = ()
    cpu_slots: int = 16
    cores: int = 1
    problem: str | None = None
    driver: str = ""
    nodes: tuple[Node, ...] = ()
    elastic: tuple[tuple[str, int], ...] = ()
    coming: str | None = None

    @property
    def most_cpu_ranks(self) -> int:
        """The most CPU ranks of one run. On one machine, ranks may share CPU slots."""
        return self.cpu_slots if self.nodes or self.elastic else _MOST_RANKS_PER_SLOT * self.cpu_slots


class Placement(Record, frozen=True, kw_only=True):
    """The devices that a run requests.

    Args:
        ranks: Number of ranks, at least 1.
        device_type: Canonical type, `cpu`, or `any` (the pool chooses: GPUs if it has any, else CPU).
        allow_busy: Also use devices that others are using.
        stand_in: Run on CPU if the pool lacks the type (`SGPU_STAND_IN=cpu`).
        nodes: Number of nodes over which the ranks are evenly spread; 0 lets the pool choose.
        strategy: `pack` uses as few nodes as possible, `strict_pack` one node, `spread` as many nodes as possible.
        min_memory_bytes: Minimum memory of a device, as `memory_bytes` returns it; 0 accepts any.
    """

    ranks: int
    device_type: str = "any"
    allow_busy: bool = False
    stand_in: bool = False
    nodes: int = 0
    strategy: str = "pack"
    min_memory_bytes: int = 0


class NodeShare(Record, frozen=True, kw_only=True):
    """The part of a lease on one node. Ranks are numbered consecutively across shares.

    Args:
        node: The node's id.
        host: Host name, for display.
        address: Address at which other nodes reach it.
        ranks: Number of ranks on the node.
        uuids: Their devices in rank order; empty for CPU slots.
    """

    node: str
    host: str
    ranks: int
    address: str = ""
    uuids: tuple[str, ...] = ()


class SharedCores(Record, frozen=True):
    """The CPU cores that more ranks share than there are slots for.

    Args:
        cores: Number of cores.
        slots: Number of CPU slots.
    """

    cores: int
    slots: int


class Lease(Record, frozen=True, kw_only=True):
    """Devices granted to one run.

    Args:
        lease_id: The lease's id.
        device_type: The granted type; `cpu` for slots.
        uuids: The devices in rank order; empty for CPU slots.
        cpu_slots: Number of CPU slots held; 0 if devices are.
        simulated: The run uses CPU in place of the type.
        shared_cores: What its ranks share if they are more than the CPU slots; None otherwise.
        shares: The part of each node, in rank order; empty in a single-machine pool.
    """

    lease_id: str
    device_type: str
    ranks: int
    uuids: tuple[str, ...] = ()
    cpu_slots: int = 0
    simulated: bool = False
    shared_cores: SharedCores | None = None
    shares: tuple[NodeShare, ...] = ()
