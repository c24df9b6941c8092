"""The environments that a node has built, one folder each, and their locks.

    <root>/<name>/venv, base, environment.json, last-used, size
    <root>/.building-<name>     being built, or left by a killed build
    <root>/.removing-<name>     being removed, or left by a killed removal
    <root>/locks/<name>

A complete folder is moved into place by a rename. Users of an environment hold its lock shared; builds and removals
hold it exclusively. So two pools of one user build it once, and an environment in use is never removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.files.atomic_file import read_json
from sgpu_magic.files.disk_usage import evict, folder_bytes
from sgpu_magic.files.locks import LOCK_FILE, HeldLock, locked, take_lock
from sgpu_magic.wire.attachments import Environment
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.decoding import JsonDecoder
from sgpu_magic.wire.option_text import Text

_DESCRIPTION = "environment.json"
_LAST_USED = "last-used"
_SIZE = "size"
_BUILDING, _REMOVING = ".building-", ".removing-"
_NAME = re.compile(r"[0-9A-Za-z_]{8,80}-[0-9a-f]{8}")


class Built(Record, frozen=True, kw_only=True):
    """A built environment.

    Args:
        prefix: Path of its virtual environment.
        executable: Path of its Python.
        sys_path: The full `sys.path` of that Python: standard library, own packages, base layer.
        digest: Digest of the `Environment` that it was built from.
        packages: Number of installed packages.
    """

    prefix: str
    executable: str
    sys_path: tuple[str, ...]
    digest: str
    packages: int


def read_built(folder: Path) -> Built | None:
    """Return the description of the environment in a folder, None if it can't be read."""
    return read_json(folder / _DESCRIPTION, Built)


class BuiltEnvironments:
    """The folder of all environments on a node.

    Args:
        root: The folder; created on first use.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, name: str) -> Path:
        """Return the path of an environment's folder, which need not exist.

        Raises:
            ValueError: This is not a valid name of an environment's folder.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of an environment's folder")
        return self.root / name

    def open(self, name: str) -> tuple[Built, HeldLock] | None:
        """Return the environment and a shared lock on it; None if it does not exist or is being built."""
        folder = self.folder(name)
        if not folder.is_dir():
            return None
        held = take_lock(self._lock_file(name), shared=True, wait=False, flags=LOCK_FILE)
        if held is None:
            return None
        with contextlib.suppress(OSError):
            if (built := read_built(folder)) is not None:
                self.touch(name)
                return built, held
        held.close()
        return None

    def is_whole(self, name: str) -> bool:
        """Whether the environment exists. Reliable only while holding its lock."""
        return (self.folder(name) / _DESCRIPTION).is_file()

    def claim(self, name: str) -> HeldLock | None:
        """Take the exclusive lock for building or removing it; None while it is in use or being built."""
        return take_lock(self._lock_file(name), wait=False, flags=LOCK_FILE)

    def begin(self, name: str) -> Path:
        """Create an empty folder to build in, and remove leftovers of killed builds. Requires the claim."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._remove_leftovers()
        folder = self.root / f"{_BUILDING}{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        return folder

    def finish(self, name: str, building: Path, built: Built) -> None:
        """Move a finished build into place. Requires the claim."""
        (building / _DESCRIPTION).write_bytes(msgspec.json.encode(built))
        (building / _LAST_USED).touch()
        # an existing folder is unreadable, or it would have been used
        shutil.rmtree(self.folder(name), ignore_errors=True)
        os.replace(building, self.folder(name))

    def abandon(self, name: str) -> None:
        """Remove what a failed build has left, and the lock file. Requires the claim, which must be released next."""
        # a file that can't be removed is left for the next build to remove
        shutil.rmtree(self.root / f"{_BUILDING}{name}", ignore_errors=True)
        if not self.is_whole(name):
            self._lock_file(name).unlink(missing_ok=True)

    def touch(self, name: str) -> None:
        """Mark the environment as used now."""
        (self.folder(name) / _LAST_USED).touch()

    def measure(self, name: str) -> None:
        """Measure the size of its files in bytes and record it."""
        folder = self.folder(name)
        (folder / _SIZE).write_text(str(folder_bytes(folder)))

    def make_room(self, budget_bytes: int) -> None:
        """Remove the least recently used environments until the rest fits the budget. Keeps those in use."""
        sizes = {name: self.size(name) for name in self.names()}
        all_here = [
            # one whose last use is unknown is removed last
            (self.last_used(name) or time.time(), folder_bytes(self.folder(name)) if size is None else size, name)
            for name, size in sizes.items()
        ]
        evict(all_here, budget_bytes, self.remove)

    def remove(self, name: str) -> bool:
        """Remove the environment. Returns False if it is in use."""
        with locked(self._lock_file(name), wait=False, flags=LOCK_FILE) as mine:
            if mine:
                going = self.root / f"{_REMOVING}{name}"
                shutil.rmtree(going, ignore_errors=True)
                with contextlib.suppress(FileNotFoundError):
                    os.replace(self.folder(name), going)
                    shutil.rmtree(going, ignore_errors=True)
                self._lock_file(name).unlink(missing_ok=True)
            return mine

    def names(self) -> list[str]:
        """Return the folder names of all environments."""
        return [entry.name for entry in self.root.glob("*") if _NAME.fullmatch(entry.name)]

    def last_used(self, name: str) -> float:
        """Return the wall-clock time of its last use; 0 if that was not recorded."""
        with contextlib.suppress(OSError):
            return (self.folder(name) / _LAST_USED).stat().st_mtime
        return 0.0

    def size(self, name: str) -> int | None:
        """Return the size of its files in bytes as recorded; None before they are measured, some time after a build."""
        try:
            return int((self.folder(name) / _SIZE).read_text())
        except (OSError, ValueError):
            return None

    # ------------------------------------------------------------ internals

    def _lock_file(self, name: str) -> Path:
        folder = self.root / "locks"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder / name

    def _remove_leftovers(self) -> None:
        for entry in os.listdir(self.root):
            for prefix in (_BUILDING, _REMOVING):
                name = entry.removeprefix(prefix)
                if entry.startswith(prefix) and _NAME.fullmatch(name):
                    with locked(self._lock_file(name), wait=False, flags=LOCK_FILE) as mine:
                        if mine:
                            shutil.rmtree(self.root / entry, ignore_errors=True)
                            self.abandon(name)


# ---------------------------------------------------------------- whether a build is needed


def needs_build(settings: Settings, environment: Environment) -> bool:
    """Whether a node must build the environment. False if it can run the kernel's own Python."""
    return not environment.own or settings.environments != "auto"


# ---------------------------------------------------------------- messages between agent and build process


class BuildOrder(Record, frozen=True, kw_only=True):
    """Request to build an environment. Never written to disk: index URLs and requirements may contain credentials.

    Args:
        environment: The environment.
        root: The node's folder of environments.
        name: Folder name of the environment.
        limit_bytes: Maximum download size of an environment.
        budget_bytes: Maximum total size of all environments.
        index_url: The setting `index_url`; "" uses uv's or pip's configuration.
    """

    environment: Environment
    root: str
    name: str
    limit_bytes: int
    budget_bytes: int
    index_url: str = ""


class BuildMoved(Record, frozen=True, tag="moved", kw_only=True):
    """Progress of a build.

    Args:
        step: `waiting`, `resolving`, `downloading` or `installing`.
        done: Number of installed packages.
        packages: Total number of packages.
    """

    step: str
    done: int = 0
    packages: int = 0


class BuildReady(Record, frozen=True, tag="ready", kw_only=True):
    """The environment is usable. It is compiled and measured afterwards.

    Args:
        built: Whether this process built it; otherwise it already existed or another process built it.
    """

    built: bool


class BuildRefused(Record, frozen=True, tag="refused", kw_only=True):
    """The environment can't be built, and nothing is left behind. `message` gives cause and remedy."""

    message: Text


BuildNews = BuildMoved | BuildReady | BuildRefused

encode = msgspec.json.Encoder().encode
decode_order = JsonDecoder(BuildOrder).decode
decode_update = JsonDecoder[BuildNews](BuildNews).decode
