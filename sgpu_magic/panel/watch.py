"""Pools that somebody looks at: each asked by one thread, once a second at most, for all who look.

A pool that answers slowly is asked less often. The thread ends with the last who looks.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from sgpu_magic.config import Settings, load_settings
from sgpu_magic.panel.poll_pool import Looker, NoLook, Seen, looker_of
from sgpu_magic.panel.pool_list import PoolList
from sgpu_magic.panel.schema import PanelTold, PoolPicture, PoolTold, RunRow, RunsTold

INTERVAL_S = 1.0
"""A pool is asked so often at most."""
FAILED = "The pool can't be looked at: something went wrong in sgpu-magic, and the server's log says what."
POLLED_S = 6.0
"""A page that asks and does not listen counts as looking for so long."""
# a pool that answers slowly spends a quarter of its time on us at most
_REST = 3.0
_LONGEST_REST_S = 10.0
_LOOK_TIMEOUT_S = 30.0
_JOIN_S = 2.0

Tell = Callable[[PanelTold], None]
"""Is told what is new, in any thread; it must not block."""


class PoolWatcher:
    """Looks at one pool as long as somebody listens, and tells what has changed. Methods may be called by any thread.

    Args:
        name: The pool's name, "" for the settings' own.
        looker: Makes what looks, in the watcher's thread; again after a problem.
        interval_s: Seconds between two looks.
    """

    def __init__(self, name: str, looker: Callable[[], Looker], interval_s: float = INTERVAL_S) -> None:
        self._name = name
        self._looker = looker
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._first = threading.Event()
        self._wake = threading.Event()
        self._listeners: dict[object, Tell] = {}
        self._polled_until = float("-inf")
        self._over = False
        self._hurried = False
        self._seen: Seen | None = None
        self._thread = threading.Thread(target=self._work, name=f"sgpu-panel-{name}", daemon=True)

    @property
    def is_over(self) -> bool:
        """It looks no more."""
        with self._lock:
            return self._over

    def add(self, key: object, tell: Tell) -> bool:
        """Tell somebody everything, and then what changes; False when it is too late for this watcher."""
        with self._lock:
            if self._over:
                return False
            self._listeners[key] = tell
            if self._seen is not None:
                _tell_whole(tell, self._seen)
                # who looks again at what was not there wants to know now
                self._hurried = self._seen.picture.state != "up"
                self._wake.set()
            self._begin()
            return True

    def remove(self, key: object) -> None:
        """Somebody does not look any more."""
        with self._lock:
            self._listeners.pop(key, None)
        self._wake.set()

    def poll(self) -> bool:
        """Somebody looks now, and may again in a moment; False as in `add`."""
        with self._lock:
            if self._over:
                return False
            self._polled_until = time.monotonic() + POLLED_S
            self._begin()
            return True

    def seen(self, timeout_s: float = _LOOK_TIMEOUT_S) -> Seen | None:
        """Return what was seen last, waiting for the first look; None when that did not come."""
        self._first.wait(timeout_s)
        with self._lock:
            return self._seen

    def look_soon(self) -> None:
        """Something was asked of the pool: look now."""
        with self._lock:
            self._hurried = True
        self._wake.set()

    def stop(self) -> None:
        """Nobody is told any more; the thread ends after the look it is at."""
        with self._lock:
            self._over = True
            self._listeners.clear()
        self._wake.set()

    def join(self, timeout_s: float = _JOIN_S) -> None:
        """Wait for the thread's end."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    # ------------------------------------------------------------ the thread

    def _begin(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def _work(self) -> None:
        looker: Looker | None = None
        try:
            while self._goes_on():
                began = time.monotonic()
                try:
                    if looker is not None and looker.is_outdated:
                        looker.close()
                        looker = None
                    if looker is None:
                        looker = self._looker()
                    seen = looker.look()
                except Exception:
                    # a thread's top: the page is told, and the next look is a fresh one
                    logging.getLogger("sgpu_magic").exception("the panel's look at the pool failed")
                    if looker is not None:
                        looker.close()
                    looker, seen = None, self._failed()
                self._take(seen)
                self._rest(began, time.monotonic() - began)
        finally:
            with self._lock:
                self._over = True
            self._first.set()
            if looker is not None:
                looker.close()

    def _failed(self) -> Seen:
        """What is told when the look itself fails; the runs that were listed stay."""
        picture = NoLook(self._name, FAILED, "retry").look().picture
        return Seen(picture, {} if self._seen is None else self._seen.rows)

    def _goes_on(self) -> bool:
        with self._lock:
            if not self._listeners and time.monotonic() >= self._polled_until:
                # from now on others look with a watcher of their own
                self._over = True
            return not self._over

    def _rest(self, began: float, took_s: float) -> None:
        """Wait for the next look: until it is time, or somebody wants it at once, or nobody wants it any more."""
        until = began + max(self._interval_s, took_s + min(_LONGEST_REST_S, _REST * took_s))
        while (left := until - time.monotonic()) > 0 and self._goes_on():
            # who only polls does not say that he has gone
            self._wake.wait(min(left, self._interval_s))
            self._wake.clear()
            with self._lock:
                hurried, self._hurried = self._hurried, False
            if hurried:
                return

    def _take(self, seen: Seen) -> None:
        """Tell everybody what has changed."""
        with self._lock:
            before, self._seen = self._seen, seen
            for tell in self._listeners.values():
                if before is None:
                    _tell_whole(tell, seen)
                    continue
                if not _is_same(before.picture, seen.picture):
                    tell(PoolTold(picture=seen.picture))
                runs = changes(seen.picture.pool, before.rows, seen.rows)
                if runs is not None:
                    tell(runs)
        self._first.set()


def whole(seen: Seen) -> tuple[PoolTold, RunsTold]:
    """Return all that was seen, for somebody who knows nothing yet."""
    rows = tuple(seen.rows.values())
    return PoolTold(picture=seen.picture), RunsTold(pool=seen.picture.pool, whole=True, changed=rows, gone=())


def changes(pool: str, before: Mapping[str, RunRow], after: Mapping[str, RunRow]) -> RunsTold | None:
    """Return the runs that differ, None when none does."""
    # rows of runs that did not change are the same objects
    changed = tuple(row for run_id, row in after.items() if row is not (old := before.get(run_id)) and row != old)
    gone = tuple(run_id for run_id in before if run_id not in after)
    return RunsTold(pool=pool, whole=False, changed=changed, gone=gone) if changed or gone else None


def _tell_whole(tell: Tell, seen: Seen) -> None:
    for told in whole(seen):
        tell(told)


def _is_same(before: PoolPicture, after: PoolPicture) -> bool:
    # the clock alone is no news
    return msgspec.structs.replace(before, now=after.now) == after


class Watchers:
    """The pools that are watched in this process: one watcher each. Methods may be called by any thread.

    Args:
        read_settings: Reads the settings.
        interval_s: Seconds between two looks.

    Attributes:
        pools: The list of all of them.
    """

    def __init__(self, read_settings: Callable[[], Settings] = load_settings, interval_s: float = INTERVAL_S) -> None:
        self.read_settings = read_settings
        self.pools = PoolList(read_settings)
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._watchers: dict[str, PoolWatcher] = {}

    def watch(self, pool: str, key: object, tell: Tell) -> PoolWatcher:
        """Tell somebody about a pool until `remove(key)`.

        Args:
            pool: Its name, "" for the settings' own.
            key: Stands for who looks.
            tell: Is told.
        """
        while True:
            watcher = self._watcher(pool)
            if watcher.add(key, tell):
                return watcher

    def look(self, pool: str) -> Seen | None:
        """Return what a pool is like now, for who does not listen; None when it can't be found out in time."""
        while True:
            watcher = self._watcher(pool)
            if watcher.poll():
                return watcher.seen()

    def look_soon(self) -> None:
        """Something was asked of a pool: look at those that are watched now."""
        with self._lock:
            watchers = list(self._watchers.values())
        self.pools.look_soon()
        for watcher in watchers:
            watcher.look_soon()

    def close(self) -> None:
        """Look at nothing any more."""
        with self._lock:
            watchers, self._watchers = list(self._watchers.values()), {}
        self.pools.close()
        for watcher in watchers:
            watcher.stop()
        for watcher in watchers:
            watcher.join()

    def _watcher(self, pool: str) -> PoolWatcher:
        with self._lock:
            watcher = self._watchers.get(pool)
            if watcher is None or watcher.is_over:
                looker = functools.partial(looker_of, pool, self.read_settings)
                watcher = self._watchers[pool] = PoolWatcher(pool, looker, self._interval_s)
            return watcher
