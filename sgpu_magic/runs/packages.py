"""Snapshots this process's packages in the background and reports them to the pool and its nodes.

A submission only calls `digest_for`, which reads the clock and makes a few `stat` calls. A run that is submitted before
the packages are known has no digest; the pool receives it later, at the latest when this process ends.
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
from sgpu_magic.packages.distributions import InstalledPackages
from sgpu_magic.packages.lock import Lock
from sgpu_magic.packages.travel import start_mismatch_check
from sgpu_magic.runs.environments import WHEELS, Described, lock_of, requirements_of
from sgpu_magic.wire.attachments import Environment
from sgpu_magic.wire.client import KeepEnvironment

if TYPE_CHECKING:
    from sgpu_magic.packages.environment_request import Ordered

REQUIREMENTS = "requirements.txt"
PYLOCK = "pylock.toml"

# do not compete with a run that was just submitted, but do not wait forever in a busy notebook either
_QUIET_S = 0.3
_MOST_PATIENCE_S = 3.0
# making a lock file takes one core for about 1 s
_LOCK_QUIET_S = 2.0
_POOL_PATIENCE_S = 30.0
# how long an exiting process waits to report the packages of its runs
_LAST_LOOK_S = 2.0
_MOST_LATE_RUNS = 1000


class Packages:
    """Reports this process's packages to a pool. Thread-safe.

    One thread takes snapshots and reports them at once, another makes lock files. Each exists only while it has work.

    Args:
        pool: The pool.
        quiet_s: Time without a submitted run before a snapshot is taken.
    """

    def __init__(self, pool: Pool, quiet_s: float = _QUIET_S) -> None:
        self._pool = pool
        self._quiet_s = quiet_s
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._touched_at = 0.0
        self._thread: threading.Thread | None = None
        self._locker: threading.Thread | None = None
        # set when this process is about to exit: stop waiting
        self._hurries = threading.Event()
        self._closed = threading.Event()
        # ids of runs that were submitted before the packages were known
        self._late: list[str] = []
        # by digest: environments to report, and those without a lock file yet
        self._wanted: dict[str, Described] = {}
        self._unlocked: dict[str, Described] = {}
        # digests that were reported over the current link
        self._described: set[str] = set()
        self._described_to: object = None
        # the last error, so that it is printed once
        self._fault = ""

    def begin(self) -> None:
        """Take a snapshot in the background, unless there is a valid one."""
        if snapshots.kept_snapshot() is None:
            self._check()

    def digest_for(self, run_id: str) -> str:
        """Return the digest of the installed packages for a run about to be submitted; "" if not known yet.

        The run's directory receives its files in either case. Never waits.
        """
        self._touched_at = time.monotonic()
        if (snapshot := snapshots.kept_snapshot()) is None:
            with self._lock:
                self._late.append(run_id)
                del self._late[:-_MOST_LATE_RUNS]
            self._check()
            return ""
        return snapshot.digest

    def send_descriptions(self, digest: str, environment: Environment | None) -> None:
        """Send the pool the description files of an accepted run's packages, in the background. Never waits.

        Args:
            digest: The digest of the run's packages; "" if they were not known.
            environment: The environment that its node builds; None for this process's packages.
        """
        self._touched_at = time.monotonic()
        if not digest or self._is_described(digest):
            return
        snapshot = snapshots.kept_snapshot()
        if environment is not None:
            self._want(environment)
        elif snapshot is not None and snapshot.digest == digest:
            self._want(snapshot)

    def environment(self, *, torch_mine: bool = False, allow_build: bool = False) -> Ordered:
        """Return the environment that a node builds to have this process's packages; builds wheels, queries the index.

        Raises:
            EnvironmentFailed: A project can't be built, or a package that is in no index can't be repacked.
        """
        # imported here: only needed for pools on other machines
        from sgpu_magic.packages.environment_request import order_of
        from sgpu_magic.packages.uv_command import index_variables
        from sgpu_magic.packages.wheels import build_project, repack

        settings = load_settings()
        snapshot = snapshots.take_snapshot()
        wheels = settings.state_path / WHEELS
        variables = index_variables(settings.index_url)
        return order_of(
            snapshot,
            lock_of(snapshot) or Lock(),
            torch_mine=torch_mine,
            allow_build=allow_build,
            build=functools.partial(build_project, root=wheels, variables=variables),
            repack=functools.partial(repack, root=wheels),
        )

    def close(self) -> None:
        """Report the packages of runs that still lack them, then stop.

        A script may end before its packages are known. This waits for them, usually 0.1 s and at most 2 s.
        """
        self._hurries.set()
        # an interrupt ends the waiting
        with contextlib.suppress(KeyboardInterrupt), self._moved:
            # threads do not survive a fork
            self._moved.wait_for(
                lambda: not self._has_pending() or self._thread is None or not self._thread.is_alive(), _LAST_LOOK_S
            )
        self._closed.set()

    # ------------------------------------------------------------ in the background

    def _want(self, described: Described) -> None:
        if not self._is_described(described.digest):
            with self._lock:
                self._wanted[described.digest] = described
            self._check()

    def _is_described(self, digest: str) -> bool:
        """Whether the pool of the current link has the digest's files, or gets them when they are made."""
        link = self._pool.connected
        return link is not None and link is self._described_to and digest in self._described

    def _has_pending(self) -> bool:
        """Whether a run's directory still lacks its files."""
        return bool(self._late or self._wanted)

    def _check(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = self._started(self._check_and_report, "sgpu-packages")

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
                if threading.current_thread() is self._thread:
                    self._thread = None
                    self._late, self._wanted = [], {}
                else:
                    self._locker = None
                    self._unlocked = {}
                self._moved.notify_all()

    def _check_and_report(self) -> None:
        while self._wait_for_quiet(self._quiet_s):
            snapshot = snapshots.take_snapshot()
            if snapshots.kept_snapshot() is None and not self._hurries.is_set():
                # an installation is under way and perhaps incomplete; an exiting process reports what is there
                continue
            self._report_owed(snapshot)
            if not self._hurries.is_set():
                start_mismatch_check(snapshot)
            with self._moved:
                # packages were installed while the last snapshot was reported
                is_outdated = snapshots.kept_snapshot() is None and not self._hurries.is_set()
                if not self._has_pending() and not is_outdated:
                    # under the lock: later work starts a new thread
                    self._thread = None
                    return

    def _report_owed(self, snapshot: InstalledPackages) -> None:
        """Report the packages that runs still lack."""
        with self._lock:
            late = tuple(self._late)
            wanted = dict(self._wanted)
        if late:
            wanted[snapshot.digest] = snapshot
        if wanted:
            # the submission of a run starts the pool
            self._wait(lambda: self._pool.connected is not None or self._hurries.is_set(), _POOL_PATIENCE_S)
        has_pool = self._pool.connected is not None
        for digest, described in wanted.items():
            if has_pool:
                self._report(described, late if digest == snapshot.digest else ())
        with self._moved:
            # without a pool they are dropped
            self._late = [run_id for run_id in self._late if run_id not in late]
            self._wanted = {digest: each for digest, each in self._wanted.items() if digest not in wanted}
            self._moved.notify_all()

    def _report(self, described: Described, runs: tuple[str, ...]) -> None:
        """Send `requirements.txt` at once, and again with the lock file when that is made."""
        lock = lock_of(described, make=False)
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
            if (lock := lock_of(described, gently=True)) is not None and not self._closed.is_set():
                self._send(described, lock, ())
            with self._lock:
                if not self._unlocked:
                    self._locker = None
                    return

    def _send(self, described: Described, lock: Lock | None, runs: tuple[str, ...]) -> None:
        files = {REQUIREMENTS: requirements_of(described, lock)}
        if lock is not None and lock.pylock:
            files[PYLOCK] = lock.pylock
        link = self._pool.connected
        self._pool.notify(KeepEnvironment(digest=described.digest, files=tuple(sorted(files.items())), runs=runs))
        with self._lock:
            if link is not self._described_to:
                self._described_to = link
                self._described.clear()
            self._described.add(described.digest)

    def _wait_for_quiet(self, quiet_s: float) -> bool:
        """Wait until no run was submitted for `quiet_s`, or this process is about to exit; False if closed."""
        begun = time.monotonic()

        def is_quiet() -> bool:
            return time.monotonic() - max(self._touched_at, begun) >= quiet_s or self._hurries.is_set()

        self._wait(is_quiet, quiet_s + _MOST_PATIENCE_S)
        return not self._closed.is_set()

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until the condition holds, the time is over, or this object is closed."""
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline and not self._closed.is_set():
            self._closed.wait(0.05)


_all: dict[Pool, Packages] = {}


def packages_of(pool: Pool) -> Packages:
    """Return the pool's `Packages`, one object per pool. Thread-safe."""
    return _all.get(pool) or _all.setdefault(pool, Packages(pool))


def close(pool: Pool) -> None:
    """Close and remove the pool's `Packages`."""
    if (found := _all.pop(pool, None)) is not None:
        found.close()
