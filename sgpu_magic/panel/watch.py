"""Pools that somebody looks at: each asked by one thread, once a second at most, for all who look; the list of pools.

A pool that answers slowly is asked less often. The thread ends with the last who looks.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from sgpu_magic.config import Settings, load_settings
from sgpu_magic.panel.poll_pool import ListLook, Looker, NoLook, Seen, looker_of
from sgpu_magic.panel.schema import PanelTold, PoolsTold, PoolTold, RunRow, RunsTold

INTERVAL_S, LIST_INTERVAL_S = 1.0, 10.0
"""So often at most a pool is asked that somebody has chosen, and those of the list."""
FAILED = "The pool can't be looked at: something went wrong in sgpu-magic, and the server's log says what."
POLLED_S, _LIST_POLLED_S = 6.0, 30.0
"""A page that asks and does not listen counts as looking for so long."""
# a pool that answers slowly spends a quarter of its time on us at most
_REST = 3.0
_LONGEST_REST_S = 10.0
_LOOK_TIMEOUT_S = 30.0
_JOIN_S = 2.0

Tell = Callable[[PanelTold], None]
"""Is told what is new, in any thread; it must not block."""


S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)


class Look(Protocol[S_co]):
    """What looks. Owned by a watcher's thread."""

    @property
    def is_outdated(self) -> bool: ...
    def look(self) -> S_co: ...
    def close(self) -> None: ...


class Watcher(ABC, Generic[S]):
    """Looks as long as somebody listens, and tells what has changed. Methods may be called by any thread.

    Args:
        name: The thread's.
        looker: Makes what looks, in the watcher's thread; again after a problem.
        interval_s: Seconds between two looks.
        polled_s: A page that asks and does not listen counts as looking for so long.
    """

    def __init__(self, name: str, looker: Callable[[], Look[S]], interval_s: float, polled_s: float) -> None:
        self._looker = looker
        self._interval_s = interval_s
        self._polled_s = polled_s
        self._lock = threading.Lock()
        self._first = threading.Event()
        self._wake = threading.Event()
        self._listeners: dict[object, Tell] = {}
        self._polled_until = float("-inf")
        self._over = False
        self._hurried = False
        self._seen: S | None = None
        self._thread = threading.Thread(target=self._work, name=f"sgpu-panel-{name}", daemon=True)

    @abstractmethod
    def _news(self, before: S | None, seen: S) -> Sequence[PanelTold]:
        """Return what is told to who knows `before`; None is nothing."""

    @abstractmethod
    def _failed(self) -> S:
        """Return what is told when the look itself fails."""

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
                for told in self._news(None, self._seen):
                    tell(told)
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
            self._polled_until = time.monotonic() + self._polled_s
            self._begin()
            return True

    def seen(self, timeout_s: float = _LOOK_TIMEOUT_S) -> S | None:
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
        looker: Look[S] | None = None
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

    def _take(self, seen: S) -> None:
        """Tell everybody what has changed."""
        with self._lock:
            news, self._seen = self._news(self._seen, seen), seen
            for tell in self._listeners.values():
                for told in news:
                    tell(told)
        self._first.set()


class PoolWatcher(Watcher[Seen]):
    """Looks at one pool.

    Args:
        name: The pool's name, "" for the settings' own.
        looker: As `Watcher`'s.
        interval_s: Seconds between two looks.
    """

    def __init__(self, name: str, looker: Callable[[], Looker], interval_s: float = INTERVAL_S) -> None:
        super().__init__(name, looker, interval_s, POLLED_S)
        self._name = name

    def add(self, key: object, tell: Tell) -> bool:
        added, seen = super().add(key, tell), self._seen
        if seen is not None and seen.picture.state != "up":
            # who looks again at what was not there wants to know now
            self.look_soon()
        return added

    def _news(self, before: Seen | None, seen: Seen) -> Sequence[PanelTold]:
        if before is None:
            return whole(seen)
        runs = changes(seen.picture.pool, before.rows, seen.rows)
        # the clock alone is no news
        is_same = msgspec.structs.replace(before.picture, now=seen.picture.now) == seen.picture
        return [*([] if is_same else [PoolTold(picture=seen.picture)]), *([] if runs is None else [runs])]

    def _failed(self) -> Seen:
        """The runs that were listed stay."""
        picture = NoLook(self._name, FAILED, "retry").look().picture
        return Seen(picture, {} if self._seen is None else self._seen.rows)


class ListWatcher(Watcher[PoolsTold]):
    """Looks at the list of pools, and asks all of them at once how each is now.

    Args:
        read_settings: Reads the settings.
    """

    def __init__(self, read_settings: Callable[[], Settings]) -> None:
        self._look = ListLook(read_settings)
        super().__init__("pools", lambda: self._look, LIST_INTERVAL_S, _LIST_POLLED_S)

    def add(self, key: object, tell: Tell) -> bool:
        """As `Watcher.add`: what the files list now is told at once."""
        self._take(self._look.drawn())
        return super().add(key, tell)

    def seen(self, timeout_s: float = 0.0) -> PoolsTold:
        """Return what the files list now; waits for no pool."""
        return self._look.drawn()

    def _news(self, before: PoolsTold | None, seen: PoolsTold) -> Sequence[PanelTold]:
        return [] if before == seen else [seen]

    def _failed(self) -> PoolsTold:
        return self._seen or PoolsTold(pools=())


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


class Watchers:
    """The pools that are watched in this process: one watcher each. Methods may be called by any thread.

    Args:
        read_settings: Reads the settings.
        interval_s: Seconds between two looks.
    """

    def __init__(self, read_settings: Callable[[], Settings] = load_settings, interval_s: float = INTERVAL_S) -> None:
        self.read_settings = read_settings
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._watchers: dict[str, PoolWatcher] = {}
        self._list = ListWatcher(read_settings)

    def watch(self, pool: str, key: object, tell: Tell) -> PoolWatcher:
        """Tell somebody about a pool until `remove(key)`.

        Args:
            pool: Its name, "" for the settings' own.
            key: Stands for who looks.
            tell: Is told.
        """
        while not (watcher := self._watcher(pool)).add(key, tell):
            pass
        return watcher

    def watch_list(self, key: object, tell: Tell) -> ListWatcher:
        """Tell somebody the list of pools until `remove(key)`."""
        while not (watcher := self._list_watcher()).add(key, tell):
            pass
        return watcher

    def look_at_list(self) -> PoolsTold:
        """Return the list of pools with what is known; asks nobody, but has them asked."""
        while not (watcher := self._list_watcher()).poll():
            pass
        return watcher.seen()

    def look(self, pool: str) -> Seen | None:
        """Return what a pool is like now, for who does not listen; None when it can't be found out in time."""
        while not (watcher := self._watcher(pool)).poll():
            pass
        return watcher.seen()

    def look_soon(self) -> None:
        """Something was asked of a pool: look at those that are watched now."""
        for watcher in self._all():
            watcher.look_soon()

    def close(self) -> None:
        """Look at nothing any more."""
        watchers = self._all()
        for watcher in watchers:
            watcher.stop()
        for watcher in watchers:
            watcher.join()

    def _all(self) -> list[PoolWatcher | ListWatcher]:
        with self._lock:
            return [*self._watchers.values(), self._list]

    def _list_watcher(self) -> ListWatcher:
        with self._lock:
            if self._list.is_over:
                self._list = ListWatcher(self.read_settings)
            return self._list

    def _watcher(self, pool: str) -> PoolWatcher:
        with self._lock:
            watcher = self._watchers.get(pool)
            if watcher is None or watcher.is_over:
                looker = functools.partial(looker_of, pool, self.read_settings)
                watcher = self._watchers[pool] = PoolWatcher(pool, looker, self._interval_s)
            return watcher
