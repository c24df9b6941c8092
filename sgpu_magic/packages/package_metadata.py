"""Metadata of installed packages that decide whether they work together."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
from packaging.requirements import Requirement

from sgpu_magic.packages.distributions import Distribution, InstalledPackages, contents_of, normalised
from sgpu_magic.packages.requirement_files import needed_by

_CUDA = re.compile(r"^cuda\s*(?::[^=]*)?=\s*['\"]([\d.]+)['\"]", re.MULTILINE)
_LOCAL_CUDA = re.compile(r"\+cu(\d{2})(\d)")
# torch's CUDA version also follows from the CUDA runtime package that it requires
_RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11")


class Package(msgspec.Struct, frozen=True):
    """One package.

    Args:
        version: Its version.
        requires: Its requirements on this platform, by normalised name.
        cuda: The CUDA version that it was built with, "" for none. Only set for torch.
    """

    version: str
    requires: Mapping[str, Requirement]
    cuda: str = ""


Packages = Mapping[str, Package]
"""Packages by normalised name."""


@functools.lru_cache(maxsize=1)
def packages_of(snapshot: InstalledPackages) -> Packages:
    """Read the metadata of a snapshot's packages, cached for the last snapshot. Takes under 0.5 ms per package."""
    return {found.key: _read(found) for found in snapshot.distributions}


def packages_of_pins(pins: Mapping[str, str]) -> dict[str, Package]:
    """Return packages of which only the versions are known.

    Args:
        pins: Versions by normalised name.
    """
    packages = {name: Package(version, {}) for name, version in pins.items()}
    if "torch" in packages:
        runtime = next((pins[name] for name in _RUNTIMES if name in pins), "")
        cuda = _local_cuda(pins["torch"]) or ".".join(runtime.split(".")[:2])
        packages["torch"] = Package(pins["torch"], {}, cuda)
    return packages


def _read(found: Distribution) -> Package:
    info = Path(found.location)
    requires = {normalised(requirement.name): requirement for requirement in needed_by(info)}
    cuda = ""
    if found.key == "torch":
        built_with = _CUDA.search(contents_of(info.parent / "torch" / "version.py").decode(errors="replace"))
        cuda = built_with[1] if built_with is not None else _local_cuda(found.version)
    return Package(found.version, requires, cuda)


def _local_cuda(version: str) -> str:
    found = _LOCAL_CUDA.search(version)
    return f"{found[1]}.{found[2]}" if found is not None else ""
