"""How the GPUs of one node are connected with each other, as far as a model's name tells. No I/O.

By NVIDIA's data sheets: SXM boards and the superchips have NVLink to their neighbours; of the cards for PCIe slots
only those of two generations take a bridge, which joins two and which no name tells, so that they count as PCIe.
"""

from __future__ import annotations

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
