"""Lock files of environments: made once on this machine, each by a call of uv."""

from __future__ import annotations

import enum
import functools
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sgpu_magic.config import Settings, load_settings
from sgpu_magic.packages.distributions import Snapshot
from sgpu_magic.packages.lock import Lock, keep_lock, kept_lock
from sgpu_magic.wire.attachments import Environment

# below the state directory
WHEELS = "wheels"
_LOCKS = "locks"
_WHEELS_STAY_S = 60 * 24 * 3600.0
# a network that swallows everything is not asked again with each run
_FAILED_STAYS_S = 600.0
_failed: dict[str, tuple[float, Lock]] = {}


class Ask(enum.Enum):
    """How a lock is wanted."""

    # only if it is there
    KEPT = enum.auto()
    # made if need be, while the notebook does something else
    GENTLY = enum.auto()
    # made if need be: somebody waits
    NOW = enum.auto()


def lock_of_snapshot(snapshot: Snapshot, ask: Ask) -> Lock | None:
    """The lock of what is installed here; None where it is not there, or the settings want none."""

    def make(settings: Settings, variables: Mapping[str, str]) -> Lock:
        # uv is called, its output read, TOML checked: nothing that a kernel needs at its start
        from sgpu_magic.packages.lock import make_lock
        from sgpu_magic.packages.wheels import remove_old_wheels

        wheels = settings.state_path / WHEELS
        remove_old_wheels(wheels, time.time() - _WHEELS_STAY_S)
        return make_lock(snapshot, wheels, variables, gently=ask is Ask.GENTLY)

    return _locked(snapshot.digest, ask, make)


def lock_of_order(environment: Environment, ask: Ask) -> Lock | None:
    """The lock of what a node was told to build; None where it is not there, or the settings want none."""

    def make(settings: Settings, variables: Mapping[str, str]) -> Lock:
        from sgpu_magic.packages.lock import lock_order

        return lock_order(environment, sys.executable, variables, gently=ask is Ask.GENTLY)

    return _locked(f"{environment.digest}-order", ask, make)


def _locked(key: str, ask: Ask, make: Callable[[Settings, Mapping[str, str]], Lock]) -> Lock | None:
    settings = load_settings()
    if not settings.lock_environments:
        return None
    root = settings.state_path / _LOCKS
    lock = kept_lock(root, key)
    if lock is None and ask is not Ask.KEPT:
        failed_at, lock = _failed.get(key, (-_FAILED_STAYS_S, None))
        if lock is not None and time.monotonic() - failed_at < _FAILED_STAYS_S:
            return lock
        from sgpu_magic.packages.uv_command import index_variables

        lock = make(settings, index_variables(settings.index_url))
        if lock.problem:
            _failed[key] = (time.monotonic(), lock)
        else:
            keep_lock(root, key, lock)
    return lock


@dataclass(frozen=True, slots=True)
class Described:
    """An environment whose files a pool shall have.

    Args:
        digest: Its digest.
        requirements: Writes `requirements.txt`, with what a lock file has found out.
        lock_of: Its lock file.
    """

    digest: str
    requirements: Callable[[Lock | None], str]
    lock_of: Callable[[Ask], Lock | None]


def installed_here(snapshot: Snapshot) -> Described:
    """What is installed here."""

    def requirements(lock: Lock | None) -> str:
        # what writes these texts is only loaded where they are wanted
        from sgpu_magic.packages.requirement_files import snapshot_requirements

        return snapshot_requirements(snapshot, lock)

    return Described(snapshot.digest, requirements, functools.partial(lock_of_snapshot, snapshot))


def built_for(environment: Environment) -> Described:
    """What a node was told to build."""

    def requirements(lock: Lock | None) -> str:
        from sgpu_magic.packages.requirement_files import environment_requirements

        return environment_requirements(environment, lock)

    return Described(environment.digest, requirements, functools.partial(lock_of_order, environment))
