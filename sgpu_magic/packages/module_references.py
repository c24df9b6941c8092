"""Modules that a payload names, and whether ranks have them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING

from sgpu_magic.errors import SerializationError
from sgpu_magic.packages.distributions import distribution_name, normalised
from sgpu_magic.packages.snapshot import take_snapshot
from sgpu_magic.wire.attachments import Environment
from sgpu_magic.wire.option_text import OptionName, text_of

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

    from sgpu_magic.packages.local_code import LocalCode

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
        raise SerializationError(f"{thing} can't be sent to the ranks: {_why(top, packages, environment)}")


def check_versions(modules: Iterable[tuple[str, str]], environment: Environment) -> None:
    """Refuse a payload with values that the ranks' older version of their package can't read.

    Args:
        modules: Pairs of a module and the object needed from it, as in `Packed.modules`.
        environment: The ranks' packages.

    Raises:
        SerializationError: They can't be read there. The message has both versions and the remedy.
    """
    from sgpu_magic.packages.requirement_files import key_of, specifier_of
    from sgpu_magic.packages.unreadable_values import find_unreadable

    def here(package: str) -> str:
        return str(getattr(sys.modules.get(package), "__version__", ""))

    def there(package: str) -> SpecifierSet:
        lines = (*environment.requirements, *environment.needed)
        return next((specifier_of(line) for line in lines if key_of(line) == package), specifier_of(package))

    for package, what, versions in find_unreadable(modules, here, there):
        label = f"environment {environment.label}" if environment.label else "the ranks' environment"
        own, version = f"{package} {here(package)}", str(versions).removeprefix("==")
        raise SerializationError(
            text_of(
                f"a value of this cell can't be sent to the ranks: the notebook has {own}, and {label} has {package} "
                f"{version}, which can't read {what} of the newer version. Nothing was started. Install the same "
                f"version on both sides (`%pip install '{package}{versions}'` and a restart of the kernel, or "
                f"{package}=={here(package)} in {label}), leave ",
                OptionName("env-version"),
                " out (`",
                OptionName("env-version", "none"),
                "`), or send the value in another form, such as a plain array, list or dict.",
            )
        )


def _names_in(environment: Environment) -> frozenset[str]:
    """Return the ranks' packages, including those of a node's base layer that this Python has too."""
    # `packaging` takes 20 ms to import
    from sgpu_magic.packages.node.base_layer import base_layer
    from sgpu_magic.packages.requirement_files import key_of

    needed = list(map(key_of, environment.needed))
    wheels = map(distribution_name, environment.wheels)
    return frozenset({*base_layer(further=needed), *needed, *map(key_of, environment.requirements), *wheels})


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
    where = f"environment {label}" if label else "the packages that are sent"
    if packages:
        return (
            f"the ranks lack the package {' or '.join(sorted(set(packages)))}, which {where} "
            f"{'does' if label else 'do'} not have. "
            + (
                "Add it there, or leave the option env-version out to take the notebook's own packages."
                if label
                else "Install it in the notebook from a package index, so that it can be sent."
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
