"""The environment that a node is asked to build: the notebook's own packages, or those of `--env-version`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path

import msgspec
from msgspec.structs import replace
from packaging.requirements import Requirement

from sgpu_magic.config import Settings
from sgpu_magic.errors import EnvironmentFailed, UsageError
from sgpu_magic.files.atomic_file import sha256_of
from sgpu_magic.formatting import names_text
from sgpu_magic.packages import named_environments
from sgpu_magic.packages.distributions import (
    SGPU_MAGIC,
    Distribution,
    InstalledPackages,
    Kind,
    has_project_file,
    is_from_node,
    normalised,
)
from sgpu_magic.packages.environment_digest import environment_digest, own_python
from sgpu_magic.packages.lock import Lock
from sgpu_magic.packages.named_environments import BASE_NAMES, BaseList, base_list
from sgpu_magic.packages.requirement_files import key_of, read_file, version_of
from sgpu_magic.packages.uv_command import index_variables
from sgpu_magic.packages.wheels import build_project
from sgpu_magic.wire.attachments import Environment, Wheel
from sgpu_magic.wire.option_text import OptionName, Text, text_of

NONE = "none"
"""`--env-version none`: the notebook's own packages."""

# in every conda environment; the builds on the package index serve as well
_INSTALLERS = {"pip", "setuptools", "wheel", "uv"}
# sgpu-magic's requirements that its ranks import
_RANKS_NEED = ("cloudpickle", "dill", "ipython", "mlflow-skinny", "msgspec", "numpy", "platformdirs", "sqlalchemy")


class Ordered(msgspec.Struct, frozen=True):
    """An environment to build.

    Args:
        environment: The environment.
        notes: Sentences for the user about packages that are left out or replaced.
    """

    environment: Environment
    notes: tuple[str, ...] = ()


# ---------------------------------------------------------------- the notebook's own packages


def order_of(
    snapshot: InstalledPackages,
    lock: Lock,
    *,
    torch_mine: bool,
    allow_build: bool,
    build: Callable[[Distribution], Wheel],
    repack: Callable[[Distribution], Wheel],
) -> Ordered:
    """Describe the environment that a node has to build to have the packages installed here.

    Args:
        snapshot: The packages installed here.
        lock: Their lock, with the package index's answers.
        torch_mine: Whether `--torch mine` is set.
        allow_build: Whether `--allow-build` is set.
        build: Builds a wheel from an editable project.
        repack: Makes a wheel from an installed package.

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
            # metadata in one of the user's folders: modules imported from there are local code
            where = f"{distribution.name} in {distribution.path}"
            notes.append(f"{where} has no project file: it travels as local code only.")
        elif kind is Kind.EDITABLE:
            wheels.append(build(distribution))
        elif kind is Kind.SYSTEM and key in lock.unpublished:
            what = f"{distribution.name} {distribution.version}"
            notes.append(f"{what} is not sent: it belongs to the operating system and is in no package index.")
        elif kind in (Kind.PROJECT, Kind.WHEEL) or key in lock.unpublished or key in lock.other_builds:
            wheels.append(repack(distribution))
        else:
            requirements.append(distribution.pin)
    environment = Environment(
        digest="",
        python=snapshot.python,
        platform=snapshot.platform,
        requirements=tuple(requirements),
        needed=tuple(needed),
        wheels=tuple(wheels),
        torch_mine=torch_mine,
        allow_build=allow_build,
        conda=tuple(conda),
    )
    parts = [*snapshot.parts, *(f"wheel {wheel.file} {wheel.sha256}" for wheel in wheels)]
    return Ordered(_described(environment, parts, snapshot.tag), tuple(notes))


def _described(environment: Environment, parts: Iterable[str], tag: str) -> Environment:
    """Return the environment with the digest of these parts (see `environment_digest`) and its number of packages."""
    options = {"torch_mine": environment.torch_mine, "allow_build": environment.allow_build}
    digest = environment_digest(parts, tag, environment.platform, **options)
    return replace(environment, digest=digest, packages=len(environment.requirements) + len(environment.wheels))


# ---------------------------------------------------------------- `--env-version`


def find_named(
    settings: Settings, env_version: str, *, torch_mine: bool = False, allow_build: bool = False
) -> Ordered | None:
    """Find the environment that `--env-version` names.

    Args:
        settings: The settings, with the default `env_version`.
        env_version: A base environment, a saved one, a requirements file or `none`; "" is the default.
        torch_mine: Whether `--torch mine` is set: torch is installed in the version that the environment names.
        allow_build: Whether `--allow-build` is set.

    Returns:
        The environment; None for the notebook's own packages.

    Raises:
        UsageError: There is no such environment, or its file can't be used.
        EnvironmentFailed: It is for another Python.
    """
    name = env_version or settings.env_version
    if name in ("", NONE):
        return None
    asked = Environment(digest="", own=False, python=own_python(), torch_mine=torch_mine, allow_build=allow_build)
    if name in BASE_NAMES:
        return _from_base(base_list(name), asked)
    path = Path(os.path.expanduser(name))
    if not os.path.isfile(path):
        kept = named_environments.load(settings, name)
        if kept is None:
            raise UsageError(_unknown(settings, name))
        return _from_saved(kept, asked)
    return _from_file(settings, path, asked)


def _from_base(base: BaseList, asked: Environment) -> Ordered:
    _check_python(base.title, base.python_minor, "")
    made = _completed(replace(asked, label=base.name), base.pins(allow_build=asked.allow_build))
    replaced: Mapping[str, str] = {} if asked.allow_build else base.wheels
    left_out = sorted({*base.left_out, *(name for name, version in replaced.items() if not version)})
    notes = [
        f"left out of environment {base.name}, as no package index has them for this Python: {names_text(left_out)}"
    ]
    other = [f"{name} {version} for {base.public[name]}" for name, version in sorted(replaced.items()) if version]
    if other:
        notes.append(f"environment {base.name} has versions that need no build: {', '.join(other)}")
    return Ordered(made.environment, (*notes, *made.notes))


def _from_file(settings: Settings, path: Path, asked: Environment) -> Ordered:
    found = read_file(path)
    _check_python(str(path), found.python, "")
    local = [(name, there) for name, there in found.local if not is_from_node(name, torch_mine=asked.torch_mine)]
    wheels = tuple(_wheel(settings, name, there) for name, there in local)
    return _completed(replace(asked, label=path.name, resolve=found.resolve, wheels=wheels), found.lines)


def _wheel(settings: Settings, name: str, there: Path) -> Wheel:
    """Return a local wheel, or build one from a local project."""
    if there.is_file():
        return Wheel(file=there.name, sha256=sha256_of(there), size=there.stat().st_size, path=str(there))
    project = Distribution(name=name, version="", kind=Kind.EDITABLE, url=there.resolve().as_uri())
    return build_project(project, settings.state_path / "wheels", index_variables(settings.index_url))


def _from_saved(kept: Environment, asked: Environment) -> Ordered:
    _check_python(f"the saved environment {kept.label}", kept.python, "save it again from there, or ")
    missing = [wheel for wheel in kept.wheels if not Path(wheel.path).is_file()]
    if missing:
        raise EnvironmentFailed(
            f"the saved environment {kept.label} no longer has its wheel {missing[0].file} ({missing[0].path}). Save "
            "it again with %sgpu_env save."
        )
    lines = kept.requirements
    if asked.torch_mine:
        lines += tuple(pin for pin in kept.needed if key_of(pin) != SGPU_MAGIC)
    fields = {"label": kept.label, "wheels": kept.wheels, "platform": kept.platform, "conda": kept.conda}
    return _completed(replace(asked, **fields), lines)


def _completed(asked: Environment, lines: tuple[str, ...]) -> Ordered:
    """Add these requirements to the environment, without the packages that a node provides."""
    requirements: list[str] = []
    needed: list[str] = []
    notes: list[str] = []
    bounds = _bounds()
    for line in lines:
        name, version = key_of(line), version_of(line)
        if is_from_node(name, torch_mine=asked.torch_mine):
            needed.append(line.partition(" --hash")[0])
        elif version and name in bounds and not bounds[name].specifier.contains(version, prereleases=True):
            needed.append(f"{name}=={version}")
            notes.append(f"{name} {version} is too old for sgpu-magic, which needs {bounds[name]}: the node's is used")
        else:
            requirements.append(line)
    parts = [*requirements, f"resolve={asked.resolve}", *(wheel.sha256 for wheel in asked.wheels)]
    environment = replace(asked, requirements=tuple(requirements), needed=tuple(needed))
    return Ordered(_described(environment, parts, f"cp{own_python().replace('.', '')}"), tuple(notes))


def _bounds() -> dict[str, Requirement]:
    """Return sgpu-magic's requirements on a rank, by name."""
    # sgpu-magic has no metadata when it runs from its source tree
    with contextlib.suppress(metadata.PackageNotFoundError):
        found = (Requirement(line) for line in metadata.requires(SGPU_MAGIC) or [] if "extra ==" not in line)
        return {normalised(one.name): one for one in found if normalised(one.name) in _RANKS_NEED}
    return {}


def _check_python(what: str, python: str, first: str) -> None:
    """Refuse another minor version of Python: pickled functions and binary packages do not work across versions."""
    if python and python != own_python():
        raise EnvironmentFailed(
            text_of(
                f"{what} is for Python {python}, and the notebook runs Python {own_python()}. Functions that a "
                f"notebook sends load only in the same minor version: {first}start the notebook with a kernel of "
                f"Python {python}, or leave ",
                OptionName("env-version"),
                " out (`",
                OptionName("env-version", "none"),
                "`).",
            )
        )


def _unknown(settings: Settings, name: str) -> Text:
    kept = named_environments.saved_names(settings)
    there = f"Available are the base environments {' and '.join(BASE_NAMES)}, `{NONE}` for the notebook's own packages"
    there += f", and saved ones: {', '.join(kept)}" if kept else ", and none is saved yet (%sgpu_env save NAME)"
    is_file = "/" in name or name.endswith((".txt", ".toml"))
    what = f"there is no such file ({os.path.abspath(name)[:300]})" if is_file else "there is no such environment"
    return text_of(
        OptionName("env-version"), f" is {name[:200]!r}, and {what}. {there}; a requirements file's path works too."
    )
