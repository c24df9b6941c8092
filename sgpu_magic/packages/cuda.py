"""Which NVIDIA driver a CUDA version needs, and which one is there."""

from __future__ import annotations

import re

# NVIDIA, "CUDA Compatibility", chapter "Minor Version Compatibility", table 1: the oldest driver by CUDA major version
_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
_DRIVER_FILE = "/proc/driver/nvidia/version"
_KERNEL_MODULE = re.compile(r"Kernel Module.*?\s(\d{3,}(?:\.\d+)+)\s")


def driver_version() -> str:
    """The version of this machine's NVIDIA driver, "" without one. Costs the reading of a small file."""
    try:
        with open(_DRIVER_FILE, encoding="utf-8", errors="replace") as file:
            return driver_in(file.read())
    except OSError:
        return ""


def driver_in(text: str) -> str:
    """Find the version in the words of the driver's kernel module, "" where there is none."""
    found = _KERNEL_MODULE.search(text)
    return found[1] if found is not None else ""


def oldest_driver(cuda: str) -> int | None:
    """The oldest major version of a driver that programs of a CUDA version run on; None when that is not known.

    Args:
        cuda: `12.6`.
    """
    major, _, _ = cuda.partition(".")
    return _OLDEST_DRIVERS.get(int(major)) if major.isdigit() else None


def is_driver_too_old(cuda: str, driver: str) -> bool:
    """Whether a driver is known to be too old for a CUDA version; False when one of them is not known.

    Args:
        cuda: `12.6`, "" for none.
        driver: `535.183.01`, "" for none.
    """
    oldest = oldest_driver(cuda)
    major, _, _ = driver.partition(".")
    return oldest is not None and major.isdigit() and int(major) < oldest
