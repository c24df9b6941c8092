"""The distributions of the running interpreter, cached until its site directories change.

Also the differences between two snapshots, and packages of which a kernel has loaded another version than installed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from sgpu_magic.packages.distributions import Distribution, InstalledPackages, normalised, read_distribution
from sgpu_magic.packages.environment_digest import own_platform, own_python

Key = tuple[tuple[str, int], ...]

# an installer creates a directory before it fills it: a read this soon after a change may be incomplete
_SETTLED_NS = 2_000_000_000
_SITE_FOLDERS = ("site-packages", "dist-packages")
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _CachedSnapshot:
    """A cached snapshot and its cache key.

    Args:
        key: Entries of `sys.path` and their modification times.
        others: Entries with distributions that are not site directories, as `pip install --target` makes them.
        snapshot: The snapshot.
        is_whole: Whether no installer was running during the read, judged by the modification times.
    """

    key: Key
    others: frozenset[str]
    snapshot: InstalledPackages
    is_whole: bool


_kept: _CachedSnapshot | None = None
_first: InstalledPackages | None = None


def take_snapshot() -> InstalledPackages:
    """Return the distributions installed for this interpreter now. Thread-safe.

    Returns the cached object, within microseconds, while `sys.path` and the modification times of the site directories
    are unchanged: every installer adds or removes a directory there. Otherwise takes about 20 ms for 100 distributions.
    """
    global _kept, _first
    with _lock:
        snapshot = kept_snapshot()
        if snapshot is None:
            # taken before the read: a change during the read is noticed by the next call
            others = _others(sys.path)
            key = _site_key(others)
            age_ns = time.time_ns() - max(changed for _, changed in (*key, ("", 0)))
            snapshot = read_snapshot(sys.path)
            # a time in the future comes from another machine's clock
            _kept = _CachedSnapshot(key, others, snapshot, is_whole=not 0 <= age_ns < _SETTLED_NS)
            _first = _first or snapshot
        return snapshot


def first_snapshot() -> InstalledPackages | None:
    """Return the first snapshot taken in this process, None if there was none yet."""
    return _first


def kept_snapshot() -> InstalledPackages | None:
    """Return the cached snapshot if it is still valid, else None. Never blocks."""
    kept = _kept
    return kept.snapshot if kept is not None and kept.is_whole and kept.key == _site_key(kept.others) else None


def read_snapshot(path: list[str]) -> InstalledPackages:
    """Read the distributions installed in the entries of `path`, in order."""
    first: dict[str, Distribution] = {}
    conda_names = _conda_names()
    for entry in _entries(path):
        there = (read_distribution(f"{entry}/{name}", entry, conda_names) for name in _infos(entry))
        for distribution in sorted(filter(None, there), key=_preference):
            first.setdefault(distribution.key, distribution)
    return InstalledPackages(
        distributions=tuple(sorted(first.values(), key=lambda found: found.key)),
        python=own_python(),
        tag=_interpreter_tag(),
        platform=own_platform(),
        executable=sys.executable,
    )


def _site_key(others: frozenset[str]) -> Key:
    """Return the cache key. Calls `stat` once per directory with distributions."""
    return tuple(
        (entry, _changed_ns(entry) if entry.endswith(_SITE_FOLDERS) or entry in others else 0) for entry in sys.path
    )


def _others(path: list[str]) -> frozenset[str]:
    """Return the entries that have distributions but are not site directories.

    The notebook's own folder is left out: it changes with every save, and an editable install there changes a site
    directory too.
    """
    here = {"", current_directory()}
    return frozenset(
        entry for entry in path if entry not in here and not entry.endswith(_SITE_FOLDERS) and _infos(entry)
    )


def current_directory() -> str:
    """Return this process's working directory, "" if it was removed."""
    with contextlib.suppress(FileNotFoundError):
        return os.getcwd()
    return ""


def _changed_ns(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return -1


def _entries(path: list[str]) -> Iterator[str]:
    """Yield the directories that may contain distributions, each once. `""` is the working directory.

    Skips directories inside a package, which belong to that package: `import ray` adds ray/thirdparty_files.
    """
    seen = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    for entry in path:
        try:
            real = os.path.realpath(entry or current_directory())
        except OSError:
            continue
        is_vendored = os.path.isfile(os.path.join(os.path.dirname(real), "__init__.py"))
        if real not in seen and os.path.isdir(real) and not is_vendored:
            seen.add(real)
            yield real


def _infos(entry: str) -> list[str]:
    with contextlib.suppress(OSError):
        # pip prefixes a directory with a tilde before it removes it
        return [name for name in os.listdir(entry) if name.endswith((".dist-info", ".egg-info")) and name[0] != "~"]
    return []


def _preference(distribution: Distribution) -> tuple[bool, bool, str]:
    """Sort key for two distributions of one name in a directory: the one with a full installation record is first."""
    return (distribution.location.endswith(".egg-info"), not distribution.record, distribution.location)


def _conda_names() -> dict[str, str]:
    """Return versions of conda's packages by name, from file names such as `numpy-1.26.4-py311h64a7726_0.json`."""
    parts = (file.stem.rsplit("-", 2) for file in Path(sys.prefix, "conda-meta").glob("*.json"))
    return {normalised(part[0]): part[1] for part in parts if len(part) == 3}


def _interpreter_tag() -> str:
    short = {"cpython": "cp", "pypy": "pp"}.get(sys.implementation.name, sys.implementation.name)
    return f"{short}{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"


# ---------------------------------------------------------------- differences between snapshots, stale modules


@dataclass(frozen=True, slots=True)
class Change:
    """A package that differs between two snapshots.

    Args:
        name: Normalised name.
        before: Version in the first, "" if missing.
        now: Version in the second, "" if missing.
    """

    name: str
    before: str
    now: str

    @property
    def words(self) -> str:
        """The change as text: `numpy 2.0.0 -> 2.1.3`, `rich 13.9 installed`, `rich 13.9 removed`."""
        if not self.before:
            return f"{self.name} {self.now} installed"
        return f"{self.name} {self.before} removed" if not self.now else f"{self.name} {self.before} -> {self.now}"


@dataclass(frozen=True, slots=True)
class Stale:
    """A package of which the kernel has loaded another version than is installed.

    Args:
        name: Normalised name.
        loaded: The loaded version.
        installed: The installed version; "" if the package was removed.
    """

    name: str
    loaded: str
    installed: str

    @property
    def words(self) -> str:
        if not self.installed:
            text = f"{self.name} {self.loaded} was uninstalled but is still imported"
            return f"{text}; restart the kernel to stop using it"
        return f"restart the kernel to use {self.name} {self.installed}, {self.loaded} is loaded"


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[Change, ...]:
    """Compare two mappings of versions by normalised name."""
    return tuple(
        Change(name, before.get(name, ""), now.get(name, ""))
        for name in sorted({*before, *now})
        if before.get(name, "") != now.get(name, "")
    )


def versions(snapshot: InstalledPackages) -> dict[str, str]:
    """Return the snapshot's versions by normalised name."""
    return {found.key: found.version for found in snapshot.distributions}


def stale_modules(
    first: InstalledPackages, now: InstalledPackages, modules: Mapping[str, ModuleType], started_at: float
) -> tuple[Stale, ...]:
    """Find packages whose modules this process loaded before another version was installed.

    Args:
        first: The first snapshot of this process.
        now: The current snapshot.
        modules: Loaded modules, as in `sys.modules`.
        started_at: Wall-clock time at which this process started. Packages installed later may have been loaded in
            an older version.
    """
    found: dict[str, Stale] = {}
    after = versions(now)
    for distribution in now.distributions:
        if _changed_ns(distribution.location) > started_at * 1e9:
            loaded = loaded_version(distribution.module_names, modules)
            if loaded and loaded != distribution.version:
                found[distribution.key] = Stale(distribution.key, loaded, distribution.version)
    for change in changes(versions(first), after):
        before = first.get(change.name)
        # for a removed package the module's name can only be guessed
        names = [change.name.replace("-", "_")]
        if before is not None and not change.now and loaded_version(names, modules) == change.before:
            found[change.name] = Stale(change.name, change.before, "")
    return tuple(found[name] for name in sorted(found))


def process_began_at() -> float:
    """Return the wall-clock time at which this process started."""
    # imported here: only needed for this
    import psutil

    return psutil.Process().create_time()


def loaded_version(names: Iterable[str], modules: Mapping[str, ModuleType]) -> str:
    """Return the version of the first loaded module that has one, "" if none does."""
    for name in names:
        # an entry may be None, which forbids its import; and asking a lazy module for the version may import something
        version = getattr(modules.get(name), "__dict__", {}).get("__version__")
        if isinstance(version, str):
            return version
    return ""
