"""How two sets of packages differ, and which packages a running kernel has loaded in another version."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from sgpu_magic.packages.distributions import Distribution, Snapshot

_IMPORTED_AT = time.time()


@dataclass(frozen=True, slots=True)
class Change:
    """One package that is not the same in both.

    Args:
        name: Normalised.
        before: Its version in the first, "" where that lacks it.
        now: Its version in the second, "" where that lacks it.
    """

    name: str
    before: str
    now: str

    @property
    def words(self) -> str:
        """`numpy 2.0.0 -> 2.1.3`, `rich 13.9 installed`, `rich 13.9 removed`."""
        if not self.before:
            return f"{self.name} {self.now} installed"
        return f"{self.name} {self.before} removed" if not self.now else f"{self.name} {self.before} -> {self.now}"


@dataclass(frozen=True, slots=True)
class Stale:
    """A package that the kernel has loaded in another version than is installed.

    Args:
        name: Normalised.
        loaded: The version that is loaded.
        installed: The version that is installed; "" when it was removed.
    """

    name: str
    loaded: str
    installed: str

    @property
    def words(self) -> str:
        if not self.installed:
            return f"{self.name} {self.loaded} is loaded and was removed: restart the kernel to do without it"
        return f"restart the kernel to use {self.name} {self.installed}, {self.loaded} is loaded"


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[Change, ...]:
    """Compare versions by normalised name."""
    return tuple(
        Change(name, before.get(name, ""), now.get(name, ""))
        for name in sorted({*before, *now})
        if before.get(name, "") != now.get(name, "")
    )


def versions(snapshot: Snapshot) -> dict[str, str]:
    """The snapshot's versions by normalised name."""
    return {found.key: found.version for found in snapshot.distributions}


def stale_modules(
    first: Snapshot, now: Snapshot, modules: Mapping[str, ModuleType], started_at: float
) -> tuple[Stale, ...]:
    """Find packages whose modules this process loaded before another version was installed.

    Args:
        first: What was installed when this process looked first.
        now: What is installed now.
        modules: The loaded ones, as `sys.modules`.
        started_at: Wall-clock time at which this process began: what was installed later may have been loaded
            before.
    """
    found: dict[str, Stale] = {}
    after = versions(now)
    for distribution in now.distributions:
        if _installed_at(distribution) > started_at:
            loaded = _loaded_version(_module_names(distribution), modules)
            if loaded and loaded != distribution.version:
                found[distribution.key] = Stale(distribution.key, loaded, distribution.version)
    for change in changes(versions(first), after):
        before = first.get(change.name)
        # of one that is gone only the usual name of its module is left
        names = [change.name.replace("-", "_")]
        if before is not None and not change.now and _loaded_version(names, modules) == change.before:
            found[change.name] = Stale(change.name, change.before, "")
    return tuple(found[name] for name in sorted(found))


def process_began_at() -> float:
    """Wall-clock time at which this process began; that of its first import of this where the system does not tell."""
    try:
        # the program's name stands in parentheses and may have spaces; the 22nd field is in ticks since the boot
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    except (OSError, StopIteration):
        return _IMPORTED_AT
    return int(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")


def _installed_at(distribution: Distribution) -> float:
    try:
        return os.stat(distribution.location).st_mtime
    except OSError:
        return 0.0


def _module_names(distribution: Distribution) -> Iterable[str]:
    """The top-level modules of a distribution: what its metadata list, else its name's usual spelling."""
    try:
        listed = (Path(distribution.location) / "top_level.txt").read_text("utf-8", errors="replace").split()
    except OSError:
        listed = []
    return listed or [distribution.key.replace("-", "_")]


def _loaded_version(names: Iterable[str], modules: Mapping[str, ModuleType]) -> str:
    for name in names:
        # not `getattr`: a module may answer by importing something
        version = vars(modules[name]).get("__version__") if name in modules else None
        if isinstance(version, str):
            return version
    return ""
