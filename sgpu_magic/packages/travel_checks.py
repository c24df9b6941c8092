"""Checks before a run is submitted: do its packages work together, and can a node import what its payload names.

Also finds mismatches among the notebook's own packages in the background.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Collection, Iterable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING

from sgpu_magic.errors import EnvironmentFailed, SerializationError
from sgpu_magic.packages.distributions import Snapshot, distribution_name, is_from_node, normalised
from sgpu_magic.packages.snapshot import take_snapshot
from sgpu_magic.wire.attachments import Environment

if TYPE_CHECKING:
    from sgpu_magic.packages.local_code import LocalCode
    from sgpu_magic.packages.mismatches import Mismatch

# ---------------------------------------------------------------- packages that break together


def check_before_travel(environment: Environment, snapshot: Snapshot | None = None, *, driver: str = "") -> list[str]:
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


# ---------------------------------------------------------------- background check, each mismatch reported once

_lock = threading.Lock()
_looked_at = ""
_told: set[str] = set()
_news: tuple[str, ...] = ()


def look_for_mismatches(snapshot: Snapshot) -> None:
    """Check a snapshot for mismatches, once for each. Takes about 50 ms for 100 packages: call it in the background."""
    global _looked_at, _news
    if snapshot.digest == _looked_at:
        return
    # not needed by `mismatch_news`
    from sgpu_magic.packages.mismatches import driver_version, find_mismatches, packages_of

    # packages installed twice are only listed by %sgpu_env: many Pythons have dozens
    found = find_mismatches(packages_of(snapshot), driver=driver_version())
    with _lock:
        _looked_at = snapshot.digest
        _news = tuple(mismatch.sentence for mismatch in found if mismatch.sentence not in _told)


def mismatch_news() -> tuple[str, ...]:
    """Return the mismatches that were found and not yet reported. Never blocks."""
    global _news
    if not _news:
        return ()
    with _lock:
        new, _news = _news, ()
        _told.update(new)
    return new


# ---------------------------------------------------------------- modules that a payload names

_NOT_IMPORTED = frozenset({"", "builtins", "__main__", "__mp_main__", "sgpu_magic"})


def check_references(
    modules: Iterable[tuple[str, str]],
    code: Iterable[LocalCode],
    environment: Environment | None,
    *,
    projects: Collection[str] = (),
) -> None:
    """Refuse a payload that needs modules which are neither sent with it nor in the ranks' packages.

    Args:
        modules: Pairs of a module and the object needed from it, as in `Packed.modules`.
        code: The local code sent with the payload.
        environment: The ranks' packages; None in a session, where any package installed here counts.
        projects: Directories of projects that are sent as wheels.

    Raises:
        SerializationError: A module is missing. The message names it, what is needed from it, and the remedy.
    """
    local = {name for each in code for name in each.modules}
    there: frozenset[str] | None = None
    for name, what in modules:
        top = name.partition(".")[0]
        if top in _NOT_IMPORTED or top in local or top in sys.stdlib_module_names:
            continue
        if environment is not None and not environment.resolve:
            there = _names_in(environment) if there is None else there
            # most packages have the name of their module; reading all of their metadata takes half a second
            if normalised(top) in there:
                continue
        packages = _packages_of_modules(take_snapshot().digest).get(top, ())
        # a session's packages, and those whose dependencies a node resolves, are not all known here
        if (packages and (there is None or not there.isdisjoint(packages))) or _lies_in(top, projects):
            continue
        thing = f"`{what}` of the module `{name}`" if what else f"the module `{name}`"
        raise SerializationError(f"{thing} can't travel to the ranks: {_why(top, packages, environment)}")


def _names_in(environment: Environment) -> frozenset[str]:
    """Return the ranks' packages, including those of a node's base layer that this Python has too."""
    # `packaging` takes 20 ms to import
    from sgpu_magic.packages.node.base_layer import base_layer
    from sgpu_magic.packages.requirement_files import name_of

    needed = [normalised(name_of(line)) for line in environment.needed]
    lines = [normalised(name_of(line)) for line in environment.requirements]
    return frozenset({*base_layer(further=needed), *needed, *lines, *map(distribution_name, environment.wheels)})


@functools.lru_cache(maxsize=1)
def _packages_of_modules(digest: str) -> Mapping[str, tuple[str, ...]]:
    """Return packages by top-level module.

    Args:
        digest: Digest of the installed packages, the cache key.
    """
    return {top: tuple(map(normalised, names)) for top, names in metadata.packages_distributions().items()}


def _lies_in(top: str, projects: Collection[str]) -> bool:
    file = getattr(sys.modules.get(top), "__file__", None)
    return isinstance(file, str) and any(
        os.path.realpath(file).startswith(os.path.realpath(project) + os.sep) for project in projects
    )


def _why(top: str, packages: Collection[str], environment: Environment | None) -> str:
    module = sys.modules.get(top)
    file = getattr(module, "__file__", None)
    label = environment.label if environment is not None else ""
    where = f"environment {label}" if label else "the packages that travel"
    if packages:
        return (
            f"the ranks lack the package {' or '.join(sorted(set(packages)))}, which {where} "
            f"{'does' if label else 'do'} not have. "
            + (
                "Add it there, or leave --env-version out (`--env-version none`) to take the notebook's own packages."
                if label
                else "Install it in the notebook from a package index, so that it can travel."
            )
        )
    if isinstance(file, str):
        return (
            f"it is in {file}, which is neither in the notebook's folder, nor below an entry of sys.path, nor in a "
            "package that the ranks have. Import it from such a folder (`sys.path.insert(0, ...)`), install it as a "
            "package, or define what you need of it in a cell."
        )
    return (
        f"`{top}` was created at run time and has no file that the ranks could import. Define what you need of it in a "
        "cell, or write it to a file in the notebook's folder and import that."
    )
