"""The packages of this process's Python: looked at in the background, told to the pool, ordered for its nodes.

Nothing here is on the way of a submission but `digest_for`, which reads the clock and a few `stat` calls. A run that
comes before the packages are known goes without their digest; the pool hears it afterwards, at the latest when this
process ends.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from sgpu_magic.client.pool import Pool
from sgpu_magic.config import load_settings
from sgpu_magic.packages import snapshot as snapshots
from sgpu_magic.packages.distributions import Snapshot
from sgpu_magic.packages.lock import Lock
from sgpu_magic.packages.travel_checks import look_for_mismatches
from sgpu_magic.runs.environment_locks import WHEELS, Ask, Described
from sgpu_magic.wire.attachments import Environment
from sgpu_magic.wire.client import KeepEnvironment

if TYPE_CHECKING:
    from sgpu_magic.packages.order import Ordered

REQUIREMENTS = "requirements.txt"
PYLOCK = "pylock.toml"

# nothing may compete with a run that was just submitted, nor wait for ever in a notebook that is never quiet
_QUIET_S = 0.3
_MOST_PATIENCE_S = 3.0
# the lock file takes a core for a second
_LOCK_QUIET_S = 2.0
_POOL_PATIENCE_S = 30.0
# a process that ends may wait so long for the packages of its runs to be told
_LAST_LOOK_S = 2.0
_MOST_LATE_RUNS = 1000


class Packages:
    """What a pool is told of this process's packages. Methods may be called by any thread.

    One thread looks at the packages and tells the pool at once, another one makes lock files. Each is there while it
    has work.

    Args:
        pool: The pool.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._touched_at = 0.0
        self._looker: threading.Thread | None = None
        self._locker: threading.Thread | None = None
        # this process is about to end: nothing is worth waiting for any more
        self._hurries = threading.Event()
        self._closed = threading.Event()
        # run ids that were submitted while nothing was known
        self._late: list[str] = []
        # by digest: what the pool has to be told, and what it wants a lock file of
        self._wanted: dict[str, Described] = {}
        self._unlocked: dict[str, Described] = {}
        # what the pool of this connection was told
        self._told: set[str] = set()
        self._told_to: object = None
        # what went wrong last: the log says it once
        self._fault = ""

    def begin(self) -> None:
        """Take the snapshot in the background, unless it is there and holds."""
        if snapshots.kept_snapshot() is None:
            self._look()

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
            self._look()
            return ""
        return snapshot.digest

    def taken(self, digest: str, environment: Environment | None) -> None:
        """A run was taken: its pool shall have the files that describe its packages. Never waits.

        Args:
            digest: The run's, "" when its packages were not known.
            environment: What its node was told to build, None for what is installed here.
        """
        self._touched_at = time.monotonic()
        if not digest or self._is_told(digest):
            return
        snapshot = snapshots.kept_snapshot()
        if environment is not None:
            self._want(Described(environment))
        elif snapshot is not None and snapshot.digest == digest:
            self._want(Described(snapshot))

    def environment(self, *, torch_mine: bool = False, allow_build: bool = False) -> Ordered:
        """What a node has to build to have what is installed here. Builds wheels and asks the package index first.

        Raises:
            EnvironmentFailed: A project can't be built, or what is in no index can't be repacked.
        """
        # what builds wheels is only loaded where packages travel
        from sgpu_magic.packages.order import order_of
        from sgpu_magic.packages.uv_command import index_variables
        from sgpu_magic.packages.wheels import build_project, repack

        settings = load_settings()
        snapshot = snapshots.take_snapshot()
        wheels = settings.state_path / WHEELS
        variables = index_variables(settings.index_url)
        return order_of(
            snapshot,
            Described(snapshot).lock_of(Ask.NOW) or Lock(),
            torch_mine=torch_mine,
            allow_build=allow_build,
            build=functools.partial(build_project, root=wheels, variables=variables),
            repack=functools.partial(repack, root=wheels),
        )

    def close(self) -> None:
        """Tell what is still owed to a run, then nothing any more.

        A script may end before anybody has looked at its packages. Waits for that, 0.1 s as a rule and 2 s at most.
        """
        self._hurries.set()
        # who interrupts this does not want to wait
        with contextlib.suppress(KeyboardInterrupt), self._moved:
            self._moved.wait_for(lambda: not self._owes() or not _is_alive(self._looker), _LAST_LOOK_S)
        self._closed.set()

    # ------------------------------------------------------------ in the background

    def _want(self, described: Described) -> None:
        if not self._is_told(described.digest):
            with self._lock:
                self._wanted[described.digest] = described
            self._look()

    def _is_told(self, digest: str) -> bool:
        """Whether this connection's pool has its files, or will have them when they are made."""
        link = self._pool.connected
        return link is not None and link is self._told_to and digest in self._told

    def _owes(self) -> bool:
        """Whether a run's directory would be without its files if nothing more were told."""
        return bool(self._late or self._wanted)

    def _look(self) -> None:
        with self._lock:
            if self._looker is None and not self._closed.is_set():
                self._looker = self._started(self._look_and_tell, "sgpu-packages")

    def _started(self, work: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
        thread.start()
        return thread

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  a thread's top: this run's files are missing, the next run tries again
            if self._fault != repr(error):
                self._fault = repr(error)
                traceback.print_exc(file=sys.__stderr__)
            with self._moved:
                if threading.current_thread() is self._looker:
                    self._looker = None
                    self._late, self._wanted = [], {}
                else:
                    self._locker = None
                    self._unlocked = {}
                self._moved.notify_all()

    def _look_and_tell(self) -> None:
        while self._wait_for_quiet(_QUIET_S):
            snapshot = snapshots.take_snapshot()
            if snapshots.kept_snapshot() is None and not self._hurries.is_set():
                # installed this very moment, and perhaps not whole yet; who can't wait for that tells what is there
                continue
            self._tell_owed(snapshot)
            if not self._hurries.is_set():
                look_for_mismatches(snapshot)
            with self._moved:
                # installed while the last one was told
                is_outdated = snapshots.kept_snapshot() is None and not self._hurries.is_set()
                if not self._owes() and not is_outdated:
                    # in one step: who has work from now on starts the next thread
                    self._looker = None
                    return

    def _tell_owed(self, snapshot: Snapshot) -> None:
        """Tell what runs wait for."""
        with self._lock:
            late = tuple(self._late)
            wanted = dict(self._wanted)
        if late:
            wanted[snapshot.digest] = Described(snapshot)
        has_pool = bool(wanted) and self._has_pool()
        for digest, described in wanted.items():
            if has_pool:
                self._tell(described, late if digest == snapshot.digest else ())
        with self._moved:
            # without a pool there is nobody to tell
            self._late = [run_id for run_id in self._late if run_id not in late]
            self._wanted = {digest: each for digest, each in self._wanted.items() if digest not in wanted}
            self._moved.notify_all()

    def _tell(self, described: Described, runs: tuple[str, ...]) -> None:
        """Tell `requirements.txt` at once, and again with the lock file when that is made."""
        lock = described.lock_of(Ask.KEPT)
        self._send(described, lock, runs)
        if lock is None:
            with self._lock:
                self._unlocked[described.digest] = described
                if self._locker is None and not self._hurries.is_set():
                    self._locker = self._started(self._make_locks, "sgpu-locks")

    def _make_locks(self) -> None:
        while self._wait_for_quiet(_LOCK_QUIET_S) and not self._hurries.is_set():
            with self._lock:
                described = self._unlocked.pop(next(iter(self._unlocked)))
            lock = described.lock_of(Ask.GENTLY)
            if lock is not None and not self._closed.is_set():
                self._send(described, lock, ())
            with self._lock:
                if not self._unlocked:
                    self._locker = None
                    return

    def _send(self, described: Described, lock: Lock | None, runs: tuple[str, ...]) -> None:
        files = {REQUIREMENTS: described.requirements(lock)}
        if lock is not None and lock.pylock:
            files[PYLOCK] = lock.pylock
        link = self._pool.connected
        self._pool.tell(KeepEnvironment(digest=described.digest, files=tuple(sorted(files.items())), runs=runs))
        with self._lock:
            if link is not self._told_to:
                self._told_to = link
                self._told.clear()
            self._told.add(described.digest)

    def _has_pool(self) -> bool:
        """Wait for the pool: a run that is being submitted has it started."""
        _until(lambda: self._pool.connected is not None or self._hurries.is_set(), _POOL_PATIENCE_S, self._closed)
        return self._pool.connected is not None

    def _wait_for_quiet(self, quiet_s: float) -> bool:
        """Wait until nothing was submitted for a while, or this process is about to end; False when this is closed."""
        begun = time.monotonic()

        def is_quiet() -> bool:
            now = time.monotonic()
            return now - max(self._touched_at, begun) >= quiet_s or self._hurries.is_set()

        _until(is_quiet, quiet_s + _MOST_PATIENCE_S, self._closed)
        return not self._closed.is_set()


def _is_alive(thread: threading.Thread | None) -> bool:
    # none is in a process that was forked
    return thread is not None and thread.is_alive()


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
