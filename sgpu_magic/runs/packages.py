"""The packages of this process's Python: looked at in the background, told to the pool, ordered for its nodes.

Nothing here is on the way of a submission but `digest_for`, which reads the clock and a few `stat` calls. A run that
comes before the packages are known goes without their digest; the pool hears it afterwards.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import traceback
from collections.abc import Callable

from sgpu_magic.client.pool import Pool
from sgpu_magic.config import load_settings
from sgpu_magic.environment import known_mismatches
from sgpu_magic.environment import snapshot as snapshots
from sgpu_magic.environment.distributions import Snapshot
from sgpu_magic.environment.lock import Lock
from sgpu_magic.environment.ordering import Ordered, order_of
from sgpu_magic.protocol.environment import Environment
from sgpu_magic.protocol.messages import KeepEnvironment
from sgpu_magic.runs.locks import WHEELS, Ask, lock_of_order, lock_of_snapshot

REQUIREMENTS = "requirements.txt"
PYLOCK = "pylock.toml"

# nothing may compete with a run that was just submitted, nor wait for ever in a notebook that is never quiet
_QUIET_S = 0.3
_MOST_PATIENCE_S = 3.0
# the lock file takes a core for a second
_LOCK_QUIET_S = 2.0
_POOL_PATIENCE_S = 30.0
_MOST_LATE_RUNS = 1000


class Packages:
    """What a pool is told of this process's packages. Methods may be called by any thread.

    Args:
        pool: The pool.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._touched_at = 0.0
        self._working = False
        self._closed = threading.Event()
        # run ids that were submitted while nothing was known
        self._late: list[str] = []
        # environments that nodes were told to build, whose files the pool shall have
        self._ordered: dict[str, Environment] = {}
        # digests that it shall have files of
        self._wanted: set[str] = set()
        # what the pool of this connection was told: digest, and whether with a lock file
        self._told: dict[str, bool] = {}
        self._told_to: object = None
        # there will be no lock file
        self._no_lock: set[str] = set()

    def begin(self) -> None:
        """Take the snapshot in the background, unless it is there and holds."""
        if snapshots.kept_snapshot() is None:
            self._work()

    def digest_for(self, run_id: str) -> str:
        """The digest of what is installed here, for a run that is about to be submitted; "" while it is not known.

        The run's directory gets its files in either case. Never waits.
        """
        self._touched_at = time.monotonic()
        snapshot = snapshots.kept_snapshot()
        if snapshot is None:
            with self._lock:
                self._late.append(run_id)
                del self._late[:-_MOST_LATE_RUNS]
            self._work()
            return ""
        self._want(snapshot.digest)
        return snapshot.digest

    def snapshot(self) -> Snapshot:
        """What is installed now; some 20 ms when that has changed."""
        return snapshots.take_snapshot()

    def environment(self, *, torch_mine: bool = False, allow_build: bool = False) -> Ordered:
        """What a node has to build to have what is installed here. Builds wheels and asks the package index first.

        Raises:
            EnvironmentFailed: A project can't be built, or what is in no index can't be repacked.
        """
        # what builds wheels is only loaded where packages travel
        from sgpu_magic.environment.index import index_variables
        from sgpu_magic.environment.projects import build_project
        from sgpu_magic.environment.repacking import repack

        settings = load_settings()
        snapshot = snapshots.take_snapshot()
        wheels = settings.state_path / WHEELS
        variables = index_variables(settings.index_url)
        return order_of(
            snapshot,
            lock_of_snapshot(snapshot, Ask.NOW) or Lock(),
            torch_mine=torch_mine,
            allow_build=allow_build,
            build=functools.partial(build_project, root=wheels, variables=variables),
            repack=functools.partial(repack, root=wheels),
        )

    def keep(self, environment: Environment) -> None:
        """The pool shall have the files of an environment that a node was told to build. Never waits."""
        self._touched_at = time.monotonic()
        self._ordered.setdefault(environment.digest, environment)
        self._want(environment.digest)

    def close(self) -> None:
        """Nothing is told any more."""
        self._closed.set()

    # ------------------------------------------------------------ in the background

    def _want(self, digest: str) -> None:
        if digest not in self._wanted or not self._is_told(digest):
            self._wanted.add(digest)
            self._work()

    def _is_told(self, digest: str) -> bool:
        """Whether this connection's pool has all that there will be of it."""
        link = self._pool.connected
        told = self._told.get(digest) if link is not None and link is self._told_to else None
        return told is not None and (told or digest in self._no_lock)

    def _work(self) -> None:
        with self._lock:
            if self._working or self._closed.is_set():
                return
            self._working = True
        threading.Thread(target=self._work_and_end, name="sgpu-packages", daemon=True).start()

    def _work_and_end(self) -> None:
        try:
            while self._wait_for_quiet(_QUIET_S):
                snapshot = snapshots.take_snapshot()
                if snapshots.kept_snapshot() is None:
                    # installed this very moment, and perhaps not whole yet
                    continue
                self._tell_all(snapshot)
                known_mismatches.look(snapshot)
                with self._lock:
                    if not self._has_work():
                        # in one step: who has work from now on starts the next thread
                        self._working = False
                        return
        except Exception:  # noqa: BLE001  a thread's top: the notebook works without, its log says why, once
            traceback.print_exc(file=sys.__stderr__)
            self._closed.set()

    def _has_work(self) -> bool:
        if snapshots.kept_snapshot() is None:
            # installed while the last one was told
            return True
        return bool(self._late) or any(not self._is_told(digest) for digest in self._wanted)

    def _tell_all(self, snapshot: Snapshot) -> None:
        with self._lock:
            late, self._late = self._late, []
        if late:
            self._wanted.add(snapshot.digest)
        if not self._wanted or not self._has_pool():
            # nobody has asked, or there is nobody to tell
            self._wanted.clear()
            return
        for digest in list(self._wanted):
            runs = tuple(late) if digest == snapshot.digest else ()
            environment = self._ordered.get(digest)
            if runs or not self._is_told(digest):
                if environment is not None:
                    self._tell_ordered(environment)
                elif digest == snapshot.digest:
                    self._tell_own(snapshot, runs)
                else:
                    # what was installed then is gone
                    self._wanted.discard(digest)

    def _tell_ordered(self, environment: Environment) -> None:
        # what writes these texts is only loaded where they are wanted
        from sgpu_magic.environment.requirements import environment_requirements

        self._tell_files(
            environment.digest,
            lambda lock: environment_requirements(environment, lock),
            functools.partial(lock_of_order, environment),
            (),
        )

    def _tell_own(self, snapshot: Snapshot, runs: tuple[str, ...]) -> None:
        from sgpu_magic.environment.requirements import snapshot_requirements

        self._tell_files(
            snapshot.digest,
            lambda lock: snapshot_requirements(snapshot, lock),
            functools.partial(lock_of_snapshot, snapshot),
            runs,
        )

    def _tell_files(
        self,
        digest: str,
        requirements: Callable[[Lock | None], str],
        lock_of: Callable[[Ask], Lock | None],
        runs: tuple[str, ...],
    ) -> None:
        """Tell `requirements.txt` at once, and again with the lock file when that is made."""
        lock = lock_of(Ask.KEPT)
        if lock is None:
            self._tell(digest, {REQUIREMENTS: requirements(None)}, runs, whole=False)
            if not self._wait_for_quiet(_LOCK_QUIET_S):
                return
            lock = lock_of(Ask.GENTLY)
        if lock is None or not lock.pylock:
            self._no_lock.add(digest)
        if lock is not None:
            pylock = {PYLOCK: lock.pylock} if lock.pylock else {}
            self._tell(digest, {REQUIREMENTS: requirements(lock)} | pylock, runs, whole=bool(pylock))

    def _tell(self, digest: str, files: dict[str, str], runs: tuple[str, ...], *, whole: bool) -> None:
        link = self._pool.connected
        if link is not self._told_to:
            self._told_to = link
            self._told.clear()
        self._pool.tell(KeepEnvironment(digest=digest, files=tuple(sorted(files.items())), runs=runs))
        self._told[digest] = whole

    def _has_pool(self) -> bool:
        """Wait for the pool: a run that is being submitted has it started."""
        return _until(lambda: self._pool.connected is not None, _POOL_PATIENCE_S, self._closed)

    def _wait_for_quiet(self, quiet_s: float) -> bool:
        """Wait until nothing was submitted for a while; False when this is closed."""
        begun = time.monotonic()

        def is_quiet() -> bool:
            now = time.monotonic()
            return now - max(self._touched_at, begun) >= quiet_s or now - begun >= quiet_s + _MOST_PATIENCE_S

        _until(is_quiet, quiet_s + _MOST_PATIENCE_S + 1, self._closed)
        return not self._closed.is_set()


def _until(condition: Callable[[], bool], seconds: float, closed: threading.Event) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline or closed.wait(0.05):
            return False
    return True


_all: dict[Pool, Packages] = {}
_all_lock = threading.Lock()


def of(pool: Pool) -> Packages:
    """What the pool is told of this process's packages: one object for each pool."""
    found = _all.get(pool)
    if found is None:
        with _all_lock:
            found = _all.setdefault(pool, Packages(pool))
    return found


def close(pool: Pool) -> None:
    """The pool is told nothing any more."""
    found = _all.pop(pool, None)
    if found is not None:
        found.close()
