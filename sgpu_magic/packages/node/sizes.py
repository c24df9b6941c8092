"""How large an environment will be, by package, before anything is downloaded."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgpu_magic.files.whole_file import write_whole
from sgpu_magic.packages.distributions import normalised
from sgpu_magic.system.byte_sizes import format_bytes

_PIN = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*==\s*([^\s;#,*]+)\s*(?:;.*|#.*|--hash.*)?$")
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes to download by package. What is not known, such as a repository's, is not in it.

    Args:
        sizes: By `name==version`.
    """

    sizes: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    def largest(self) -> str:
        """The largest packages, for people."""
        by_size = sorted(self.sizes.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} ({format_bytes(size)})" for name, size in by_size[:_NAMED])


def pin_of(line: str) -> str:
    """`name==version` of a requirement's line, "" for one that is no exact pin."""
    found = _PIN.match(line)
    return f"{normalised(found.group(1))}=={found.group(2)}" if found else ""


def estimate(
    lines: Iterable[str], known: Mapping[str, int], ask: Callable[[list[str]], str], *, complete: bool
) -> Estimate:
    """Add up what the packages of these lines weigh.

    Args:
        lines: Of a requirements file.
        known: Sizes of earlier estimates, by pin.
        ask: Has uv lock these lines and returns the `pylock.toml`.
        complete: The lines are all that is installed; else uv has to look up what they need.

    Raises:
        UvFailed: As `ask`.
    """
    lines = list(lines)
    if not complete:
        return Estimate(sizes_in(ask(lines)))
    pins = {line: pin_of(line) for line in lines}
    sizes = {pin: known[pin] for pin in pins.values() if pin in known}
    unknown = [line for line, pin in pins.items() if pin and pin not in known]
    if unknown:
        # an index may not tell a size; it need not be asked again
        sizes |= {pins[line]: 0 for line in unknown} | sizes_in(ask(unknown))
    return Estimate(sizes)


def sizes_in(pylock: str) -> dict[str, int]:
    """What a `pylock.toml` says of its packages' sizes: of the wheel where there is one, else of the source."""
    sizes: dict[str, int] = {}
    packages: list[dict[str, Any]] = tomllib.loads(pylock).get("packages", [])
    for package in packages:
        wheels: list[dict[str, Any]] = package.get("wheels", [])
        source: dict[str, Any] = package.get("archive") or package.get("sdist") or {}
        found = [int(file["size"]) for file in (wheels or [source]) if "size" in file]
        if found:
            sizes[f"{normalised(str(package['name']))}=={package.get('version', '')}"] = max(found)
    return sizes


class KnownSizes:
    """Sizes of files that were asked for before, on disk: a rebuild need not ask again.

    Args:
        file: Where.
        tag: Of the Python that they are for.
    """

    _MOST = 20_000

    def __init__(self, file: Path, tag: str) -> None:
        self._file = file
        self._tag = tag
        try:
            self._all: dict[str, int] = json.loads(file.read_bytes())
        except (OSError, ValueError):
            self._all = {}

    def get(self) -> dict[str, int]:
        mark = f"{self._tag} "
        return {name.removeprefix(mark): size for name, size in self._all.items() if name.startswith(mark)}

    def add(self, sizes: Mapping[str, int]) -> None:
        """Keep these too.

        Raises:
            OSError: The file can't be written.
        """
        new = {f"{self._tag} {pin}": size for pin, size in sizes.items()}
        if new.items() <= self._all.items():
            return
        self._all = dict(list((self._all | new).items())[-self._MOST :])
        write_whole(self._file, json.dumps(self._all).encode())
