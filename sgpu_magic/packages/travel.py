"""Checks of the packages that a run needs on a node of another machine, for known mismatches.

A run's packages are checked before it is submitted, the notebook's own also in the background.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.packages.distributions import InstalledPackages, is_from_node
from sgpu_magic.wire.attachments import Environment

if TYPE_CHECKING:
    from sgpu_magic.packages.mismatches import Mismatch

# ---------------------------------------------------------------- before a run


def check_before_travel(
    environment: Environment, snapshot: InstalledPackages | None = None, *, driver: str = ""
) -> list[str]:
    """Check the packages that a node will install for known mismatches.

    Args:
        environment: The packages.
        snapshot: The notebook's packages, if the environment is a copy of them.
        driver: Version of the NVIDIA driver on the node, "" if unknown.

    Returns:
        Warnings for the user.

    Raises:
        EnvironmentFailed: The packages would certainly break.
    """
    # `packaging` takes 20 ms to import, too long for loading the magics
    from sgpu_magic.packages.mismatches import find_left_behind, find_mismatches
    from sgpu_magic.packages.package_metadata import packages_of, packages_of_pins
    from sgpu_magic.packages.requirement_files import key_of, version_of

    if snapshot is not None:
        everything = packages_of(snapshot)
        mine = environment.torch_mine
        sent = {name: package for name, package in everything.items() if not is_from_node(name, torch_mine=mine)}
        found = find_mismatches(sent, driver=driver if mine else "")
        doubtful = () if mine else find_left_behind(everything)
    else:
        pins = {key_of(line): version_of(line) for line in environment.requirements}
        sent = packages_of_pins({name: version for name, version in pins.items() if version})
        found, doubtful = find_mismatches(sent, driver=driver), ()
    if found:
        raise EnvironmentFailed(_refusal(environment, found))
    return [mismatch.sentence for mismatch in doubtful]


def _refusal(environment: Environment, found: Sequence[Mismatch]) -> str:
    whose = f"the packages of {environment.label}" if environment.label else "the notebook's packages"
    more = f" (There are {len(found) - 1} more like this: %sgpu_env lists them.)" if len(found) > 1 else ""
    return f"{whose} would break on the ranks, so nothing was started: {found[0].sentence}{more}"


# ---------------------------------------------------------------- background check, each mismatch reported once

_lock = threading.Lock()
_looked_at = ""
_reported: set[str] = set()
_found: tuple[str, ...] = ()


def start_mismatch_check(snapshot: InstalledPackages) -> None:
    """Check a snapshot for mismatches, once for each. Takes about 50 ms for 100 packages: call it in the background."""
    global _looked_at, _found
    if snapshot.digest == _looked_at:
        return
    # not needed by `new_mismatches`
    from sgpu_magic.packages.mismatches import find_mismatches
    from sgpu_magic.packages.nvidia_driver import driver_version
    from sgpu_magic.packages.package_metadata import packages_of

    found = find_mismatches(packages_of(snapshot), driver=driver_version())
    _looked_at, _found = snapshot.digest, tuple(mismatch.sentence for mismatch in found)


def new_mismatches() -> tuple[str, ...]:
    """Return the mismatches that were found and not yet reported. Never blocks."""
    with _lock:
        new = tuple(sentence for sentence in _found if sentence not in _reported)
        _reported.update(new)
    return new
