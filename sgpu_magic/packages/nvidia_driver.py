"""The NVIDIA driver that a CUDA version needs."""

from __future__ import annotations

import re
from pathlib import Path

from sgpu_magic.packages.distributions import contents_of

# NVIDIA, "CUDA Compatibility", chapter "Minor Version Compatibility", table 1: the oldest driver by CUDA major version
_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_KERNEL_MODULE = re.compile(r"Kernel Module.*?\s(\d{3,}(?:\.\d+)+)\s")


def driver_version() -> str:
    """Return the version of this machine's NVIDIA driver, "" without one. Reads one small file."""
    return driver_in(contents_of(_DRIVER_FILE).decode(errors="replace"))


def driver_in(text: str) -> str:
    """Return the driver's version from the text of `/proc/driver/nvidia/version`, "" if it has none."""
    found = _KERNEL_MODULE.search(text)
    return found[1] if found is not None else ""


def oldest_driver(cuda: str) -> int | None:
    """Return the oldest major driver version that supports a CUDA version; None if unknown.

    Args:
        cuda: CUDA version, `12.6`.
    """
    major = cuda.partition(".")[0]
    return _OLDEST_DRIVERS.get(int(major)) if major.isdigit() else None


def is_driver_too_old(cuda: str, driver: str) -> bool:
    """Whether a driver is too old for a CUDA version. False if one of them is unknown.

    Args:
        cuda: CUDA version, `12.6`, "" for none.
        driver: Driver version, `535.183.01`, "" for none.
    """
    oldest, major = oldest_driver(cuda), driver.partition(".")[0]
    return oldest is not None and major.isdigit() and int(major) < oldest
