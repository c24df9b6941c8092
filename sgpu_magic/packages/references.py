"""Whether a node can import what a payload names: nothing is pickled by reference to what is not there."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from sgpu_magic.errors import SerializationError
from sgpu_magic.packages.local_code import LocalCode
from sgpu_magic.wire.attachments import Environment

# every node's base layer has it, and what it needs
_ALWAYS = ("sgpu-magic", "torch")
_NOT_IMPORTED = frozenset({"", "builtins", "__main__", "__mp_main__", "sgpu_magic"})


def check_references(
    modules: Iterable[tuple[str, str]],
    code: Iterable[LocalCode],
    environment: Environment | None,
    *,
    projects: Collection[str] = (),
) -> None:
    """Refuse a payload that needs modules which neither travel nor are in the ranks' packages.

    Args:
        modules: As `Packed.modules`.
        code: The local code that travels along.
        environment: The ranks' packages; None where they are a session's: then any package counts.
        projects: Directories of which wheels are made.

    Raises:
        SerializationError: Names the module, what is needed of it, and the remedy.
    """
    local = {name for each in code for name in each.modules}
    there: frozenset[str] | None = None
    for name, what in modules:
        top = name.partition(".")[0]
        if top in _NOT_IMPORTED or top in local or top in sys.stdlib_module_names:
            continue
        if environment is not None and not environment.resolve:
            there = _names_in(environment) if there is None else there
            # most packages are called like their module; looking into all of them takes half a second
            if canonicalize_name(top) in there:
                continue
        packages = _all_distributions(_installed()).get(top, ())
        # of a session's packages, and of those whose dependencies a node looks up, not all are known here
        if (packages and (there is None or not there.isdisjoint(packages))) or _lies_in(top, projects):
            continue
        thing = f"`{what}` of the module `{name}`" if what else f"the module `{name}`"
        raise SerializationError(f"{thing} can't travel to the ranks: {_why(top, packages, environment)}")


# ---------------------------------------------------------------- within


def _names_in(environment: Environment) -> frozenset[str]:
    lines = [*environment.requirements, *environment.needed]
    wheels = [parse_wheel_filename(wheel.file)[0] for wheel in environment.wheels]
    brought = _closure((*_ALWAYS, *(_name_of(line) for line in environment.needed)), _installed())
    return brought.union(wheels, (_name_of(line) for line in lines))


def _name_of(line: str) -> str:
    """The normalised name in a line of a requirements file."""
    try:
        return canonicalize_name(Requirement(line.partition(" --")[0].strip()).name)
    except InvalidRequirement:
        return ""


@functools.lru_cache(maxsize=16)
def _closure(names: tuple[str, ...], installed: tuple[tuple[str, int], ...]) -> frozenset[str]:
    """What a node's base layer brings: these, and all that they need. As far as this Python has them."""
    del installed
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if not name or name in found:
            continue
        found.add(name)
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for line in lines:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(canonicalize_name(requirement.name))
    return frozenset(found)


@functools.lru_cache(maxsize=1)
def _all_distributions(installed: tuple[tuple[str, int], ...]) -> Mapping[str, tuple[str, ...]]:
    del installed
    return {
        top: tuple(canonicalize_name(name) for name in names)
        for top, names in metadata.packages_distributions().items()
    }


def _installed() -> tuple[tuple[str, int], ...]:
    """Changes with every package that is installed or removed."""
    found: list[tuple[str, int]] = []
    for entry in sys.path:
        with contextlib.suppress(OSError):
            found.append((entry, os.stat(entry).st_mtime_ns))
    return tuple(found)


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
            f"it lies in {file}, which is neither in the notebook's folder, nor below an entry of sys.path, nor in a "
            "package that the ranks have. Import it from such a folder (`sys.path.insert(0, ...)`), install it as a "
            "package, or define in a cell what is needed of it."
        )
    return (
        f"`{top}` was made by the program and has no file that the ranks could import. Define in a cell what is needed "
        "of it, or write it to a file in the notebook's folder and import that."
    )
