"""Lock files of environments, each made once per machine with uv."""

from __future__ import annotations

import enum
import sys
import time

import msgspec

from sgpu_magic.config import Settings, load_settings
from sgpu_magic.packages.distributions import Snapshot
from sgpu_magic.packages.lock import Lock, keep_lock, kept_lock, lock_order, make_lock
from sgpu_magic.wire.attachments import Environment

# below the state directory
WHEELS = "wheels"
_LOCKS = "locks"
_WHEELS_STAY_S = 60 * 24 * 3600.0
# after a failure, the index is not asked again for this long: a dead network would delay each run
_FAILED_STAYS_S = 600.0
_failed: dict[str, tuple[float, Lock]] = {}


class Ask(enum.Enum):
    """How a lock file is requested."""

    # only an existing one
    KEPT = enum.auto()
    # made if needed, at low priority in the background
    GENTLY = enum.auto()
    # made if needed, while the caller waits
    NOW = enum.auto()


class Described(msgspec.Struct, frozen=True):
    """An environment whose description files are sent to a pool.

    Args:
        made_of: A snapshot of this process's packages, or an environment that a node builds.
    """

    made_of: Snapshot | Environment

    @property
    def digest(self) -> str:
        return self.made_of.digest

    def requirements(self, lock: Lock | None) -> str:
        """Return the text of `requirements.txt`, with the details of the lock file."""
        # imported here: only needed to write these texts
        from sgpu_magic.packages.requirement_files import environment_requirements, snapshot_requirements

        if isinstance(self.made_of, Environment):
            return environment_requirements(self.made_of, lock)
        return snapshot_requirements(self.made_of, lock)

    def lock_of(self, ask: Ask) -> Lock | None:
        """Return the environment's lock file; None if there is none, or the settings disable lock files."""
        settings = load_settings()
        if not settings.lock_environments:
            return None
        root = settings.state_path / _LOCKS
        key = f"{self.digest}-order" if isinstance(self.made_of, Environment) else self.digest
        lock = kept_lock(root, key)
        if lock is None and ask is not Ask.KEPT:
            failed_at, lock = _failed.get(key, (-_FAILED_STAYS_S, None))
            if lock is not None and time.monotonic() - failed_at < _FAILED_STAYS_S:
                return lock
            lock = self._make_lock(settings, gently=ask is Ask.GENTLY)
            if lock.problem:
                _failed[key] = (time.monotonic(), lock)
            else:
                keep_lock(root, key, lock)
        return lock

    def _make_lock(self, settings: Settings, *, gently: bool) -> Lock:
        # imported here: a kernel does not need these at its start
        from sgpu_magic.packages.uv_command import index_variables
        from sgpu_magic.packages.wheels import remove_old_wheels

        variables = index_variables(settings.index_url)
        if isinstance(self.made_of, Environment):
            return lock_order(self.made_of, sys.executable, variables, gently=gently)
        wheels = settings.state_path / WHEELS
        remove_old_wheels(wheels, time.time() - _WHEELS_STAY_S)
        return make_lock(self.made_of, wheels, variables, gently=gently)
