"""Environments that have a name: published bases, and those that `%sgpu_env save` has kept on this machine.

The libraries of the published ones ship with this package as `data/*.toml`.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from datetime import date
from pathlib import Path

import msgspec

from sgpu_magic.config import Settings, private_dir
from sgpu_magic.errors import UsageError
from sgpu_magic.files.run_directory import link_or_copy
from sgpu_magic.packages.distributions import normalised
from sgpu_magic.wire.attachments import Environment

BASE_NAMES = ("4", "ai-4")
"""The names of those that there are."""


class BaseList(msgspec.Struct, frozen=True):
    """One base environment, as its page lists it.

    Args:
        name: What `--env-version` calls it.
        title: Its title.
        page: The page that it is taken from.
        page_date: The newest entry on that page.
        python: Python's version, `3.12.3`.
        cuda: The CUDA toolkit's version.
        requirements_file: What the page calls its requirements file.
        libraries: How many libraries the page lists.
        public: Versions by name, of those that a package index has.
        wheels: Of those without a wheel for this Python: the nearest version that has one, "" for none.
        system: What the operating system's own installer brings.
        private: What no index has.
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
        """`3.12`."""
        return self.python.rpartition(".")[0]

    @property
    def left_out(self) -> dict[str, str]:
        """What can't be installed from an index, by name."""
        return {**self.system, **self.private}

    @property
    def exact_pins(self) -> tuple[str, ...]:
        """The public libraries in the page's own versions."""
        return tuple(f"{normalised(name)}=={version}" for name, version in self.public.items())

    def pins(self, *, allow_build: bool) -> tuple[str, ...]:
        """The public libraries as they can be installed.

        Args:
            allow_build: Sources may be built; else a version that has a wheel takes the place of one that has none.
        """
        if allow_build:
            return self.exact_pins
        versions = {**self.public, **self.wheels}
        return tuple(f"{normalised(name)}=={version}" for name, version in versions.items() if version)


@functools.cache
def base_list(name: str) -> BaseList:
    """Read one of `BASE_NAMES`."""
    text = (Path(__file__).parent / "data" / f"{name}.toml").read_text("utf-8")
    return BaseList(**tomllib.loads(text))


# ---------------------------------------------------------------- saved ones

# <state>/saved-environments/<name>/environment.json, requirements.txt, wheels
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
_DESCRIPTION = "environment.json"
_NOT_NAMES = (*BASE_NAMES, "none")
_FILE_ENDINGS = (".txt", ".toml", ".in")


def saved_path(settings: Settings) -> Path:
    """Where they are kept."""
    return settings.state_path / "saved-environments"


def check_name(name: str) -> str:
    """Return the name if one can be kept under it.

    Raises:
        UsageError: It means something else, or can't be a folder's name.
    """
    if _NAME.fullmatch(name) is None or name.endswith(_FILE_ENDINGS):
        raise UsageError(
            f"{name[:80]!r} can't be an environment's name: take letters, digits, `.`, `-` and `_`, a letter or digit "
            "first, and not the ending of a file."
        )
    if name in _NOT_NAMES:
        raise UsageError(f"{name!r} is what --env-version calls another environment. Take another name.")
    return name


def save(settings: Settings, name: str, environment: Environment) -> Path:
    """Keep an environment under a name, in the place of one that was kept under it.

    Args:
        settings: Where.
        name: The name.
        environment: The environment; its wheels are kept with it.

    Raises:
        UsageError: The name is none.
        OSError: It can't be written.
    """
    # `packaging` takes 20 ms, and who only looks for names need not wait for it
    from sgpu_magic.packages.requirement_files import environment_requirements

    root = private_dir(saved_path(settings))
    target = root / check_name(name)
    making = Path(tempfile.mkdtemp(prefix=".saving-", dir=root))
    try:
        wheels = tuple(
            msgspec.structs.replace(wheel, path=str(target / "wheels" / _keep(Path(wheel.path), making / "wheels")))
            for wheel in environment.wheels
        )
        kept = msgspec.structs.replace(environment, label=name, own=False, wheels=wheels)
        (making / _DESCRIPTION).write_bytes(msgspec.json.encode(kept))
        (making / "requirements.txt").write_text(environment_requirements(kept, None))
        if target.exists():
            # a folder with something in it can't be replaced by a rename
            before = making.with_name(f"{making.name}-before")
            os.rename(target, before)
            shutil.rmtree(before, ignore_errors=True)
        os.rename(making, target)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return target


def load(settings: Settings, name: str) -> Environment | None:
    """Return what is kept under a name; None when nothing is.

    Raises:
        UsageError: It can't be read any more.
    """
    if _NAME.fullmatch(name) is None:
        return None
    file = saved_path(settings) / name / _DESCRIPTION
    try:
        return msgspec.json.decode(file.read_bytes(), type=Environment)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"the saved environment {name} can't be read: {error}. Save it again.") from error


def saved_names(settings: Settings) -> list[str]:
    """The names under which something is kept, sorted."""
    try:
        names = os.listdir(saved_path(settings))
    except OSError:
        return []
    return sorted(name for name in names if (saved_path(settings) / name / _DESCRIPTION).is_file())


def remove(settings: Settings, name: str) -> bool:
    """Forget one; False when there is none of that name."""
    if name not in saved_names(settings):
        return False
    shutil.rmtree(saved_path(settings) / name)
    return True


def _keep(wheel: Path, folder: Path) -> str:
    """Have a wheel in a folder, by a second name of the same file where that is possible."""
    folder.mkdir(exist_ok=True)
    link_or_copy(wheel, folder / wheel.name)
    return wheel.name
