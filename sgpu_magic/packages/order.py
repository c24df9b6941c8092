"""From what the notebook has to what a node is told to build; what would surely break there is refused.

Mismatches of the notebook's own packages are told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.packages.distributions import (
    Distribution,
    Kind,
    Snapshot,
    environment_digest,
    has_project_file,
    is_from_node,
    normalised,
)
from sgpu_magic.packages.lock import Lock
from sgpu_magic.wire.attachments import Environment, Wheel

if TYPE_CHECKING:
    from sgpu_magic.packages.mismatches import Mismatch

# every conda environment has them; no code of a notebook's needs them in conda's build
_INSTALLERS = {"pip", "setuptools", "wheel", "uv"}


@dataclass(frozen=True, slots=True)
class Ordered:
    """What a node is told.

    Args:
        environment: That is.
        notes: Sentences about what does not come along.
    """

    environment: Environment
    notes: tuple[str, ...] = ()


def order_of(
    snapshot: Snapshot,
    lock: Lock,
    *,
    torch_mine: bool,
    allow_build: bool,
    build: Callable[[Distribution], Wheel],
    repack: Callable[[Distribution], Wheel],
) -> Ordered:
    """Say what a node has to install to have what is installed here.

    Args:
        snapshot: What is installed here.
        lock: What the package index said of it.
        torch_mine: `--torch mine`.
        allow_build: `--allow-build`.
        build: Makes a wheel of an editable project.
        repack: Makes a wheel of what is installed.

    Raises:
        EnvironmentFailed: A wheel can't be made.
    """
    requirements: list[str] = []
    needed: list[str] = []
    conda: list[str] = []
    wheels: list[Wheel] = []
    notes: list[str] = []
    for distribution in snapshot.distributions:
        key, kind = distribution.key, distribution.kind
        if is_from_node(key, torch_mine=torch_mine):
            needed.append(distribution.pin)
        elif kind is Kind.CONDA and key not in _INSTALLERS:
            conda.append(distribution.pin)
        elif kind in (Kind.VCS, Kind.ARCHIVE):
            requirements.append(distribution.direct_reference)
        elif kind is Kind.EDITABLE and not has_project_file(distribution.path or Path()) and not distribution.record:
            # metadata that lie in a folder of the user's: what is imported from there is local code
            where = f"{distribution.name} in {distribution.path}"
            notes.append(f"{where} has no project file: it travels as local code only.")
        elif kind is Kind.EDITABLE:
            wheels.append(build(distribution))
        elif kind is Kind.SYSTEM and key in lock.unpublished:
            what = f"{distribution.name} {distribution.version}"
            notes.append(f"{what} stays here: it is the operating system's, and in no package index.")
        elif kind in (Kind.PROJECT, Kind.WHEEL) or key in lock.unpublished or key in lock.other_builds:
            wheels.append(repack(distribution))
        else:
            requirements.append(distribution.pin)
    parts = [*snapshot.parts, *(f"wheel {wheel.file} {wheel.sha256}" for wheel in wheels)]
    environment = Environment(
        digest=environment_digest(
            parts, snapshot.tag, snapshot.platform, torch_mine=torch_mine, allow_build=allow_build
        ),
        python=snapshot.python,
        platform=snapshot.platform,
        requirements=tuple(requirements),
        needed=tuple(needed),
        wheels=tuple(wheels),
        torch_mine=torch_mine,
        allow_build=allow_build,
        packages=len(requirements) + len(wheels),
        conda=tuple(conda),
    )
    return Ordered(environment, tuple(notes))


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
    # `packaging` takes 20 ms, which a notebook need not wait for when it loads the magics
    from sgpu_magic.packages.mismatches import find_left_behind, find_mismatches, packages_of, packages_of_pins
    from sgpu_magic.packages.requirement_files import name_of, version_of

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


def _refusal(environment: Environment, sure: list[Mismatch]) -> str:
    whose = f"the packages of {environment.label}" if environment.label else "the notebook's packages"
    more = f" (There are {len(sure) - 1} more like this: %sgpu_env lists them.)" if len(sure) > 1 else ""
    return f"{whose} would break on the ranks, so nothing was started: {sure[0].sentence}{more}"


# ---------------------------------------------------------------- looked for in the background, told once

_lock = threading.Lock()
_looked_at = ""
_told: set[str] = set()
_news: tuple[str, ...] = ()


def look_for_mismatches(snapshot: Snapshot) -> None:
    """Look through a snapshot, once for each. Some 50 ms for 100 packages, so never where somebody waits."""
    global _looked_at, _news
    if snapshot.digest == _looked_at:
        return
    # who only asks for the news needs nothing of this
    from sgpu_magic.packages.cuda import driver_version
    from sgpu_magic.packages.mismatches import find_mismatches, packages_of

    # a package that is there twice is told by %sgpu_env: many a Python has dozens
    found = find_mismatches(packages_of(snapshot), driver=driver_version())
    with _lock:
        _looked_at = snapshot.digest
        _news = tuple(mismatch.sentence for mismatch in found if mismatch.sentence not in _told)


def mismatch_news() -> tuple[str, ...]:
    """What was found and not told yet. Never waits."""
    global _news
    if not _news:
        return ()
    with _lock:
        new, _news = _news, ()
        _told.update(new)
    return new
