"""The distributions of the running interpreter, kept as long as its site directories do not change.

Also how two such sets differ, and which packages a running kernel has loaded in another version.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType

from sgpu_magic.packages.distributions import (
    Distribution,
    Snapshot,
    normalised,
    own_platform,
    own_python,
    read_distribution,
)

Key = tuple[tuple[str, int], ...]

# an installer makes a directory first and fills it then: what is read so soon after a change may not be all of it
_SETTLED_NS = 2_000_000_000
_SITE_FOLDERS = ("site-packages", "dist-packages")
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Kept:
    """A snapshot and what it depends on.

    Args:
        key: Entries of `sys.path` and times of change.
        others: Entries beside the site directories that have distributions, such as `pip install --target` makes.
        snapshot: What was found.
        is_whole: No installer was at work while it was read, as far as the times of change tell.
    """

    key: Key
    others: frozenset[str]
    snapshot: Snapshot
    is_whole: bool


_kept: _Kept | None = None
_first: Snapshot | None = None


def take_snapshot() -> Snapshot:
    """What is installed for this interpreter now. May be called by any thread.

    The same object as before is returned in some microseconds while `sys.path` and the times of change of the site
    directories are the same: every installer adds or removes a directory there. Else some 20 ms for 100 distributions.
    """
    snapshot = kept_snapshot()
    if snapshot is not None:
        return snapshot
    global _kept, _first
    with _lock:
        snapshot = kept_snapshot()
        if snapshot is None:
            # before the first look: what changes meanwhile is looked at again by the next caller
            others = _others(sys.path)
            key = _site_key(others)
            age_ns = time.time_ns() - max(changed for _, changed in (*key, ("", 0)))
            snapshot = read_snapshot(sys.path)
            # a time to come is another machine's clock
            _kept = _Kept(key, others, snapshot, is_whole=not 0 <= age_ns < _SETTLED_NS)
            _first = _first or snapshot
        return snapshot


def first_snapshot() -> Snapshot | None:
    """The first that was taken in this process, None before that."""
    return _first


def kept_snapshot() -> Snapshot | None:
    """The snapshot if one was taken and still holds. Never waits."""
    kept = _kept
    return kept.snapshot if kept is not None and kept.is_whole and kept.key == _site_key(kept.others) else None


def read_snapshot(path: list[str]) -> Snapshot:
    """Read what is installed in the entries of `path`, in their order."""
    first: dict[str, Distribution] = {}
    shadowed: list[Distribution] = []
    conda_names = _conda_names()
    for entry in _entries(path):
        for distribution in sorted(_in_entry(entry, conda_names), key=_preference):
            before = first.setdefault(distribution.key, distribution)
            if before is not distribution:
                shadowed.append(distribution)
    return Snapshot(
        distributions=tuple(sorted(first.values(), key=lambda found: found.key)),
        shadowed=tuple(shadowed),
        python=own_python(),
        tag=_interpreter_tag(),
        platform=own_platform(),
        executable=sys.executable,
    )


def _site_key(others: frozenset[str]) -> Key:
    """Costs a `stat` for each directory with distributions."""
    return tuple(
        (entry, _changed_ns(entry) if entry.endswith(_SITE_FOLDERS) or entry in others else 0) for entry in sys.path
    )


def _others(path: list[str]) -> frozenset[str]:
    """Entries that have distributions and are no site directories.

    The notebook's own folder changes with each of its savings, and what is installed there in an editable way changes
    a site directory too.
    """
    here = {"", _current_directory()}
    return frozenset(
        entry for entry in path if entry not in here and not entry.endswith(_SITE_FOLDERS) and _infos(entry)
    )


def _current_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        # removed under the notebook's feet
        return ""


def _changed_ns(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return -1


def _entries(path: list[str]) -> Iterator[str]:
    """Entries where distributions may lie, each once. `""` is the directory of the moment.

    What lies within a package is a part of that package: `import ray` puts ray/thirdparty_files on the path.
    """
    seen = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    for entry in path:
        try:
            real = os.path.realpath(entry or _current_directory())
        except OSError:
            continue
        is_vendored = os.path.isfile(os.path.join(os.path.dirname(real), "__init__.py"))
        if real not in seen and os.path.isdir(real) and not is_vendored:
            seen.add(real)
            yield real


def _in_entry(entry: str, conda_names: dict[str, str]) -> Iterator[Distribution]:
    for name in _infos(entry):
        found = read_distribution(f"{entry}/{name}", entry, conda_names)
        if found is not None:
            yield found


def _infos(entry: str) -> list[str]:
    try:
        names = os.listdir(entry)
    except OSError:
        return []
    # pip gives what it is about to remove a name with a tilde
    return [name for name in names if name.endswith((".dist-info", ".egg-info")) and not name.startswith("~")]


def _preference(distribution: Distribution) -> tuple[bool, bool, str]:
    """Of two that lie in one directory the one with a whole installation record is there."""
    return (distribution.location.endswith(".egg-info"), not distribution.record, distribution.location)


def _conda_names() -> dict[str, str]:
    """conda's packages and their versions, by its files' names: `numpy-1.26.4-py311h64a7726_0.json`."""
    try:
        files = os.listdir(f"{sys.prefix}/conda-meta")
    except OSError:
        return {}
    parts = (name.removesuffix(".json").rsplit("-", 2) for name in files if name.endswith(".json"))
    return {normalised(part[0]): part[1] for part in parts if len(part) == 3}


def _interpreter_tag() -> str:
    short = {"cpython": "cp", "pypy": "pp"}.get(sys.implementation.name, sys.implementation.name)
    return f"{short}{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"


# ---------------------------------------------------------------- how two of them differ, and what is loaded


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
            loaded = _loaded_version(distribution.module_names, modules)
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
    """Wall-clock time at which this process began."""
    # only who asks for this needs it
    import psutil

    return psutil.Process().create_time()


def _installed_at(distribution: Distribution) -> float:
    try:
        return os.stat(distribution.location).st_mtime
    except OSError:
        return 0.0


def _loaded_version(names: Iterable[str], modules: Mapping[str, ModuleType]) -> str:
    for name in names:
        # not `getattr`: a module may answer by importing something
        version = vars(modules[name]).get("__version__") if name in modules else None
        if isinstance(version, str):
            return version
    return ""
