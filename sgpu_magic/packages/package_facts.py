"""What installed packages say of themselves: what they need, and whether they are compiled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from sgpu_magic.packages.distributions import Distribution, Snapshot, normalised

_CUDA = re.compile(r"^cuda\s*(?::[^=]*)?=\s*['\"]([\d.]+)['\"]", re.MULTILINE)
_LOCAL_CUDA = re.compile(r"\+cu(\d{2})(\d)")
# torch says which CUDA it was built with by what it needs, too: the runtime of that version
_RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11")


@dataclass(frozen=True, slots=True)
class Package:
    """One package.

    Args:
        version: Its version.
        requires: What it needs here, by normalised name.
        compiled: It has binary modules; None when that is not known.
        cuda: The CUDA version that it was built with, "" for none. Only known of torch.
    """

    version: str
    requires: Mapping[str, Requirement]
    compiled: bool | None = None
    cuda: str = ""


Packages = Mapping[str, Package]
"""Packages by normalised name."""


def packages_in(snapshot: Snapshot) -> dict[str, Package]:
    """Read what a snapshot's packages say of themselves: less than half a millisecond for each."""
    return {found.key: _read(found) for found in snapshot.distributions}


def packages_of_pins(pins: Mapping[str, str]) -> dict[str, Package]:
    """Packages of which only the versions are known.

    Args:
        pins: Versions by normalised name.
    """
    packages = {name: Package(version, {}) for name, version in pins.items()}
    if "torch" in packages:
        runtime = next((pins[name] for name in _RUNTIMES if name in pins), "")
        cuda = _local_cuda(pins["torch"]) or ".".join(runtime.split(".")[:2])
        packages["torch"] = Package(pins["torch"], {}, compiled=True, cuda=cuda)
    return packages


def _read(found: Distribution) -> Package:
    info = Path(found.location)
    requires: dict[str, Requirement] = {}
    head = _text(info / "METADATA").partition("\n\n")[0]
    for line in head.splitlines():
        if line.startswith("Requires-Dist:") and "extra ==" not in line and "extra==" not in line:
            requirement = _needed_here(line.removeprefix("Requires-Dist:").strip())
            if requirement is not None:
                requires[normalised(requirement.name)] = requirement
    pure = re.search(r"^Root-Is-Purelib:\s*(\w+)", _text(info / "WHEEL"), re.MULTILINE)
    compiled = None if pure is None else pure[1].lower() == "false"
    cuda = ""
    if found.key == "torch":
        built_with = _CUDA.search(_text(info.parent / "torch" / "version.py"))
        cuda = built_with[1] if built_with is not None else _local_cuda(found.version)
    return Package(found.version, requires, compiled, cuda)


def _needed_here(line: str) -> Requirement | None:
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        return None
    marker = requirement.marker
    return requirement if marker is None or marker.evaluate({"extra": ""}) else None


def _local_cuda(version: str) -> str:
    found = _LOCAL_CUDA.search(version)
    return f"{found[1]}.{found[2]}" if found is not None else ""


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""
