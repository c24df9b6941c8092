"""What the package index said of an environment, kept by its digest so that it is asked once."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import msgspec

from sgpu_magic.config import private_dir
from sgpu_magic.wire.environment import Wheel


class Lock(msgspec.Struct, frozen=True, kw_only=True):
    """A lock file, and what stands in the way of one.

    Args:
        pylock: `pylock.toml` (PEP 751), "" when there is none.
        unpublished: Names of distributions that the index does not have in their version.
        other_builds: Pins of the builds that it has instead, by name: `torch==2.13.0` for `2.13.0+cpu`.
        wheels: What was repacked, by name.
        left_out: Why a distribution is not in the lock file, by name.
        problem: Why there is no lock file.
    """

    pylock: str = ""
    unpublished: frozenset[str] = frozenset()
    other_builds: dict[str, str] = {}
    wheels: dict[str, Wheel] = {}
    left_out: dict[str, str] = {}
    problem: str = ""


def kept_lock(root: Path, digest: str) -> Lock | None:
    """The lock that was made before; None if there is none, or its wheels are gone."""
    try:
        lock = msgspec.json.decode((root / f"{digest}.json").read_bytes(), type=Lock)
    except (OSError, msgspec.DecodeError):
        return None
    return lock if all(os.path.exists(wheel.path) for wheel in lock.wheels.values()) else None


def keep_lock(root: Path, digest: str, lock: Lock) -> None:
    """Keep a lock; without a word when there is no room: it is made again."""
    with contextlib.suppress(OSError):
        private_dir(root)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{digest}-", dir=root)
        try:
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.encode(lock))
            os.replace(temporary, root / f"{digest}.json")
        except OSError:
            os.unlink(temporary)
