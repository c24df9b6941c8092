"""Environments with a name: the published base environments, and those saved on this machine by `%sgpu_env save`.

The library lists of the base environments ship with this package as `data/*.toml`.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from datetime import date
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sgpu_magic.config import Settings, private_dir
from sgpu_magic.errors import UsageError
from sgpu_magic.files.atomic_file import link_or_copy
from sgpu_magic.packages.distributions import normalised
from sgpu_magic.wire.attachments import Environment, Wheel
from sgpu_magic.wire.decoding import decode_json, decode_toml
from sgpu_magic.wire.option_text import OptionName, text_of

BASE_NAMES = ("4", "ai-4")
"""Names of the base environments."""

# <state>/saved-environments/<name>/environment.json, requirements.txt, wheels
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
_DESCRIPTION = "environment.json"
_NOT_NAMES = (*BASE_NAMES, "none")
_FILE_ENDINGS = (".txt", ".toml", ".in")


class BaseList(msgspec.Struct, frozen=True):
    """One base environment, as its documentation page lists it.

    Args:
        name: Its name for `--env-version`.
        title: Its title.
        page: Title of the page.
        page_date: Date of the newest entry on that page.
        python: Python version, `3.12.3`.
        cuda: CUDA toolkit version.
        requirements_file: Name of the requirements file on the page.
        libraries: Number of libraries on the page.
        public: Libraries that a package index has, version by name.
        wheels: Public libraries without a wheel for this Python: the nearest version that has one, "" for none.
        system: Libraries installed by the operating system's package manager, version by name.
        private: Libraries that no index has, version by name.
    """

    name: str
    title: str
    page: str
    page_date: date
    python: str
    cuda: str
    requirements_file: str
    libraries: int
    public: Mapping[str, str]
    wheels: Mapping[str, str]
    system: Mapping[str, str]
    private: Mapping[str, str]

    @property
    def python_minor(self) -> str:
        """Python version without the patch number, `3.12`."""
        return self.python.rpartition(".")[0]

    @property
    def left_out(self) -> dict[str, str]:
        """Libraries that can't be installed from an index, version by name."""
        return {**self.system, **self.private}

    def pins(self, *, allow_build: bool) -> tuple[str, ...]:
        """Return installable pins of the public libraries.

        Args:
            allow_build: Allow building from source: exactly the page's versions. Otherwise a version that has a wheel
                replaces one without.
        """
        versions = {**self.public, **({} if allow_build else self.wheels)}
        return tuple(f"{normalised(name)}=={version}" for name, version in versions.items() if version)


@functools.cache
def base_list(name: str) -> BaseList:
    """Read the list of a base environment, one of `BASE_NAMES`."""
    text = (Path(__file__).parent / "data" / f"{name}.toml").read_text("utf-8")
    return BaseList(**decode_toml(text))


# ---------------------------------------------------------------- saved environments


def saved_path(settings: Settings) -> Path:
    """Return the directory of the saved environments."""
    return settings.state_path / "saved-environments"


def check_name(name: str) -> str:
    """Return the name if an environment can be saved under it.

    Raises:
        UsageError: The name is reserved, or is not valid as a directory name.
    """
    if _NAME.fullmatch(name) is None or name.endswith(_FILE_ENDINGS):
        raise UsageError(
            f"{name[:80]!r} is not a valid environment name: use letters, digits, `.`, `-` and `_`, start with a "
            "letter or digit, and don't end with a file extension."
        )
    if name in _NOT_NAMES:
        raise UsageError(
            text_of(
                f"{name!r} already names another environment for ", OptionName("env-version"), ". Choose another name."
            )
        )
    return name


def save(settings: Settings, name: str, environment: Environment) -> Path:
    """Save an environment under a name, replacing an existing one.

    Args:
        settings: Gives the directory.
        name: The name.
        environment: The environment. Its wheels are saved with it.

    Raises:
        UsageError: The name is not valid.
        OSError: The environment can't be written.
    """
    # imports `packaging`, which takes 20 ms and is not needed to list names
    from sgpu_magic.packages.requirement_files import environment_requirements

    root = private_dir(saved_path(settings))
    target = root / check_name(name)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=root, ignore_cleanup_errors=True) as temporary:
        making = Path(temporary)
        (making / "wheels").mkdir()
        wheels: list[Wheel] = []
        for wheel in environment.wheels:
            file = Path(wheel.path)
            link_or_copy(file, making / "wheels" / file.name)
            wheels.append(replace(wheel, path=str(target / "wheels" / file.name)))
        kept = replace(environment, label=name, own=False, wheels=tuple(wheels))
        (making / _DESCRIPTION).write_bytes(msgspec.json.encode(kept))
        (making / "requirements.txt").write_text(environment_requirements(kept, None))
        if target.exists():
            # a rename can't replace a directory that is not empty
            before = making.with_name(f"{making.name}-before")
            os.rename(target, before)
            shutil.rmtree(before, ignore_errors=True)
        os.rename(making, target)
    return target


def load(settings: Settings, name: str) -> Environment | None:
    """Return the environment saved under a name, None if there is none.

    Raises:
        UsageError: The saved environment can't be read.
    """
    if _NAME.fullmatch(name) is None:
        return None
    file = saved_path(settings) / name / _DESCRIPTION
    try:
        return decode_json(file.read_bytes(), type=Environment)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"the saved environment {name} can't be read: {error}. Save it again.") from error


def saved_names(settings: Settings) -> list[str]:
    """Return the names of the saved environments, sorted."""
    return sorted(file.parent.name for file in saved_path(settings).glob(f"*/{_DESCRIPTION}"))


def remove(settings: Settings, name: str) -> bool:
    """Delete a saved environment. Returns False if there is none of that name."""
    if name not in saved_names(settings):
        return False
    shutil.rmtree(saved_path(settings) / name)
    return True
