"""Mismatches are found before packages travel: what surely breaks is refused, the rest is said."""

from __future__ import annotations

import threading

from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.packages.distributions import Snapshot, normalised
from sgpu_magic.packages.from_node import is_from_node
from sgpu_magic.packages.mismatches import Mismatch, find_left_behind, find_mismatches
from sgpu_magic.packages.package_facts import Packages, packages_in, packages_of_pins
from sgpu_magic.packages.requirement_files import name_of, version_of
from sgpu_magic.wire.environment import Environment

_lock = threading.Lock()
_read: tuple[Snapshot, Packages] | None = None


def check_before_travel(environment: Environment, snapshot: Snapshot | None = None, *, driver: str = "") -> list[str]:
    """Look for what is known to break in packages that a node is to install.

    Args:
        environment: The packages.
        snapshot: What they are a copy of, for the notebook's own.
        driver: The NVIDIA driver's version on the node, "" when it is not known.

    Returns:
        Sentences for the user.

    Raises:
        EnvironmentFailed: They would surely break.
    """
    if snapshot is not None:
        everything = packages_of(snapshot)
        travelling = {
            name: package
            for name, package in everything.items()
            if not is_from_node(name, torch_mine=environment.torch_mine)
        }
        found = [*find_mismatches(travelling, driver=driver if environment.torch_mine else "")]
        if not environment.torch_mine:
            found += find_left_behind({**travelling, **{k: v for k, v in everything.items() if k == "torch"}})
    else:
        pins = {normalised(name_of(line)): version_of(line) for line in environment.requirements}
        travelling = packages_of_pins({name: version for name, version in pins.items() if version})
        found = [*find_mismatches(travelling, driver=driver)]
    sure = [mismatch for mismatch in found if mismatch.sure]
    if sure:
        raise EnvironmentFailed(_refusal(environment, sure))
    return [mismatch.sentence for mismatch in found]


def packages_of(snapshot: Snapshot) -> Packages:
    """What the packages of a snapshot say of themselves, read once for each."""
    global _read
    with _lock:
        if _read is None or _read[0] is not snapshot:
            _read = (snapshot, packages_in(snapshot))
        return _read[1]


def _refusal(environment: Environment, sure: list[Mismatch]) -> str:
    whose = f"the packages of {environment.label}" if environment.label else "the notebook's packages"
    more = f" (There are {len(sure) - 1} more like this: %sgpu_env lists them.)" if len(sure) > 1 else ""
    return f"{whose} would break on the ranks, so nothing was started: {sure[0].sentence}{more}"
