"""The libraries of published base environments, which ship with this package as `data/*.toml`."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from sgpu_magic.packages.distributions import normalised

BASE_NAMES = ("4", "ai-4")
"""The names of those that there are."""


@dataclass(frozen=True, slots=True)
class BaseList:
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
