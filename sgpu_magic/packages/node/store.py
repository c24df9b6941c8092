"""The environments that a node has built, each in a folder of its own, and who uses them.

    <root>/<name>/venv, base, environment.json, last-used, size
    <root>/.building-<name>     being built, or left by a build that was killed
    <root>/.removing-<name>     being removed, or left by a removal that was killed
    <root>/locks/<name>

A folder appears whole, by a rename. Its lock is held shared by whoever uses it and exclusively by whoever builds or
removes it, so two pools of one user build it once, and nobody removes what is in use.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.files.kept_folders import LOCK_FILE, HeldLock, evict, locked, take_lock
from sgpu_magic.system.byte_sizes import folder_bytes
from sgpu_magic.wire.attachments import Environment
from sgpu_magic.wire.record import Record

_DESCRIPTION = "environment.json"
_LAST_USED = "last-used"
_SIZE = "size"
_BUILDING, _REMOVING = ".building-", ".removing-"
_NAME = re.compile(r"[0-9A-Za-z_]{8,80}-[0-9a-f]{8}")


class Built(Record, frozen=True, kw_only=True):
    """An environment that is there.

    Args:
        prefix: Its virtual environment.
        executable: Its Python.
        sys_path: That Python's whole `sys.path`: standard library, own packages, base layer.
        digest: Of the `Environment` that it was built from.
        packages: How many were installed.
    """

    prefix: str
    executable: str
    sys_path: tuple[str, ...]
    digest: str
    packages: int


def read_built(folder: Path) -> Built | None:
    """What lies in an environment's folder; None when it can't be read."""
    try:
        return msgspec.json.decode((folder / _DESCRIPTION).read_bytes(), type=Built)
    except (OSError, msgspec.DecodeError):
        return None


class Store:
    """The folder with all of them.

    Args:
        root: The folder; made when something is to be kept there.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, name: str) -> Path:
        """Where the environment is, or will be.

        Raises:
            ValueError: The name is none of an environment.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of an environment's folder")
        return self.root / name

    def open(self, name: str) -> tuple[Built, HeldLock] | None:
        """The environment, held until the lock is closed; None when it is not there, or somebody builds it."""
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
        """Whether it is there. Only who holds its lock can rely on it."""
        return (self.folder(name) / _DESCRIPTION).is_file()

    def claim(self, name: str) -> HeldLock | None:
        """The right to build or to remove it; None while somebody builds or uses it."""
        return take_lock(self._lock_file(name), wait=False, flags=LOCK_FILE)

    def begin(self, name: str) -> Path:
        """An empty folder to build in. What killed builds have left is removed. Needs the claim."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._remove_leftovers()
        folder = self.root / f"{_BUILDING}{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        return folder

    def finish(self, name: str, building: Path, built: Built) -> None:
        """Let what was built appear. Needs the claim."""
        (building / _DESCRIPTION).write_bytes(msgspec.json.encode(built))
        (building / _LAST_USED).touch()
        # one that can't be read, or it would have been taken
        shutil.rmtree(self.folder(name), ignore_errors=True)
        os.replace(building, self.folder(name))

    def abandon(self, name: str) -> None:
        """Nothing came of the build. Needs the claim, which is to be given back next."""
        if not self.is_whole(name):
            self._lock_file(name).unlink(missing_ok=True)

    def touch(self, name: str) -> None:
        """It is used now."""
        (self.folder(name) / _LAST_USED).touch()

    def measure(self, name: str) -> int:
        """Count the bytes of its files and write the sum down."""
        folder = self.folder(name)
        size = folder_bytes(folder)
        (folder / _SIZE).write_text(str(size))
        return size

    def make_room(self, budget_bytes: int) -> None:
        """Remove the least recently used ones until all have no more than the budget. Never one that is in use."""
        all_here = [(self._last_used(name), self._known_size(name), name) for name in self.names()]
        evict(all_here, budget_bytes, self.remove)

    def remove(self, name: str) -> bool:
        """Remove it unless it is in use."""
        with self._claimed(name) as mine:
            if mine:
                going = self.root / f"{_REMOVING}{name}"
                shutil.rmtree(going, ignore_errors=True)
                with contextlib.suppress(FileNotFoundError):
                    os.replace(self.folder(name), going)
                    shutil.rmtree(going, ignore_errors=True)
                self._lock_file(name).unlink(missing_ok=True)
            return mine

    def names(self) -> list[str]:
        """All that are there."""
        try:
            return [entry for entry in os.listdir(self.root) if _NAME.fullmatch(entry)]
        except FileNotFoundError:
            return []

    # ------------------------------------------------------------ within

    def _lock_file(self, name: str) -> Path:
        folder = self.root / "locks"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder / name

    def _claimed(self, name: str) -> AbstractContextManager[bool]:
        """Hold the claim for the block; yields whether it could be had."""
        return locked(self._lock_file(name), wait=False, flags=LOCK_FILE)

    def _remove_leftovers(self) -> None:
        for entry in os.listdir(self.root):
            for prefix in (_BUILDING, _REMOVING):
                name = entry.removeprefix(prefix)
                if entry.startswith(prefix) and _NAME.fullmatch(name):
                    with self._claimed(name) as mine:
                        if mine:
                            shutil.rmtree(self.root / entry, ignore_errors=True)
                            self.abandon(name)

    def _last_used(self, name: str) -> float:
        try:
            return (self.folder(name) / _LAST_USED).stat().st_mtime
        except OSError:
            return time.time()

    def _known_size(self, name: str) -> int:
        try:
            return int((self.folder(name) / _SIZE).read_text())
        except (OSError, ValueError):
            return folder_bytes(self.folder(name))


# ---------------------------------------------------------------- an order to build one


def needs_build(settings: Settings, environment: Environment) -> bool:
    """True unless the kernel's own Python serves: it is at hand on this node, and its own packages are wanted."""
    return not environment.own or settings.environments != "auto"


# ---------------------------------------------------------------- what agent and building process tell each other


class BuildOrder(Record, frozen=True, kw_only=True):
    """Build this. Held in memory only: an index's URL and a requirement may have credentials in them.

    Args:
        environment: What.
        root: Where the node keeps its environments.
        name: The folder's, there.
        limit_bytes: The largest environment that is built.
        budget_bytes: What all environments may have together.
        index_url: The setting; "" is uv's and pip's own choice.
    """

    environment: Environment
    root: str
    name: str
    limit_bytes: int
    budget_bytes: int
    index_url: str = ""


class BuildMoved(Record, frozen=True, tag="moved", kw_only=True):
    """What is done now.

    Args:
        step: `waiting`, `resolving`, `downloading`, `installing`.
        done: Packages that are installed.
        packages: Packages in all.
    """

    step: str
    done: int = 0
    packages: int = 0


class BuildReady(Record, frozen=True, tag="ready", kw_only=True):
    """The environment can be used; it is compiled and measured behind this.

    Args:
        built: It was built here; else another process was first.
    """

    built: bool


class BuildRefused(Record, frozen=True, tag="refused", kw_only=True):
    """It can't be had; nothing of it is left. `message` is a paragraph with cause and remedy."""

    message: str


BuildNews = BuildMoved | BuildReady | BuildRefused

encode = msgspec.json.Encoder().encode
decode_order = msgspec.json.Decoder(BuildOrder).decode
decode_news = msgspec.json.Decoder[BuildNews](BuildNews).decode
