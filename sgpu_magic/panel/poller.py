"""Watches pools while pages show them: one thread polls each pool, at most once a second, for all pages.

Another thread polls the list of pools. A pool that answers slowly is polled less often. A thread ends when its last
page leaves; the next page starts another one.
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
from sgpu_magic.panel.poll_pool import ListPoller, NoPoller, Poller, PollResult, poller_of
from sgpu_magic.panel.schema import PoolsUpdate, PoolUpdate, RunRow, RunsUpdate, StateUpdate

# minimum interval between polls of a watched pool, and between polls of all pools in the list
INTERVAL_S, LIST_INTERVAL_S = 1.0, 10.0
FAILED = "The pool's state can't be read: an internal error in sgpu-magic. The server's log has the details."
POLLED_S, _LIST_POLLED_S = 6.0, 30.0
"""How long a poll by a page without updates keeps a watcher alive: of one pool, and of the list."""
# a pool that answers slowly spends at most a quarter of its time answering
_REST = 3.0
_LONGEST_REST_S = 10.0
_LOOK_TIMEOUT_S = 30.0
_JOIN_S = 2.0

OnUpdate = Callable[[StateUpdate], None]
"""Called with each update, in any thread; it must not block."""

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)


class PollSource(Protocol[S_co]):
    """The object that polls. Owned by a watcher's thread."""

    @property
    def is_outdated(self) -> bool: ...
    def poll(self) -> S_co: ...
    def close(self) -> None: ...


class Watcher(ABC, Generic[S]):
    """Polls as long as it has listeners, and sends them changes. Thread-safe.

    Args:
        name: Suffix of the thread's name.
        new_poller: Creates the object that polls, in the watcher's thread; called again after an error.
        interval_s: Seconds between two polls.
        polled_s: How long a call of `poll` keeps the watcher alive.
    """

    def __init__(self, name: str, new_poller: Callable[[], PollSource[S]], interval_s: float, polled_s: float) -> None:
        self._new_poller = new_poller
        self._interval_s = interval_s
        self._polled_s = polled_s
        self._lock = threading.Lock()
        self._first = threading.Event()
        self._wake = threading.Event()
        self._listeners: dict[object, OnUpdate] = {}
        self._polled_until = float("-inf")
        self._hurried = False
        self._seen: S | None = None
        self._name = name
        # the last thread, and whether it is still polling
        self._thread: threading.Thread | None = None
        self._polls = False

    @abstractmethod
    def _updates(self, before: S | None, seen: S) -> Sequence[StateUpdate]:
        """Return the updates for a listener that has `before`, None for a new listener."""

    @abstractmethod
    def _failed(self) -> S:
        """Return the state to report when polling raises an exception."""

    def add(self, key: object, on_update: OnUpdate) -> None:
        """Add a listener, which gets the whole state and then updates."""
        with self._lock:
            self._listeners[key] = on_update
            self._begin()
            if self._seen is not None:
                for item in self._updates(None, self._seen):
                    on_update(item)

    def remove(self, key: object) -> None:
        """Remove a listener."""
        with self._lock:
            self._listeners.pop(key, None)
        self._wake.set()

    def poll(self) -> None:
        """Keep polling for a page without updates."""
        with self._lock:
            self._polled_until = time.monotonic() + self._polled_s
            self._begin()

    def latest(self, timeout_s: float = _LOOK_TIMEOUT_S) -> S | None:
        """Return the latest state, waiting for the first poll; None when that took too long."""
        self._first.wait(timeout_s)
        with self._lock:
            return self._seen

    def poll_soon(self) -> None:
        """Poll now, as after a command to the pool."""
        self._hurried = True
        self._wake.set()

    def stop(self) -> None:
        """Remove all listeners; the thread ends after its current poll."""
        with self._lock:
            self._listeners.clear()
            self._polled_until = float("-inf")
        self._wake.set()

    def join(self, timeout_s: float = _JOIN_S) -> None:
        """Wait for the thread to end."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    # ------------------------------------------------------------ the thread

    def _begin(self) -> None:
        """Start a thread unless one is polling. What an earlier one has seen is outdated."""
        if not self._polls:
            self._polls, self._seen = True, None
            self._first.clear()
            self._thread = threading.Thread(target=self._work, name=f"sgpu-panel-{self._name}", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        poller: PollSource[S] | None = None
        try:
            while self._is_watched():
                began = time.monotonic()
                try:
                    if poller is not None and poller.is_outdated:
                        poller.close()
                        poller = None
                    if poller is None:
                        poller = self._new_poller()
                    seen = poller.poll()
                except Exception:
                    # top of a thread: report it to the pages and start over with the next poll
                    logging.getLogger("sgpu_magic").exception("the panel could not poll the pool")
                    if poller is not None:
                        poller.close()
                    poller, seen = None, self._failed()
                self._apply(seen)
                self._rest(began, time.monotonic() - began)
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._polls = False
                    self._first.set()
            if poller is not None:
                poller.close()

    def _is_watched(self) -> bool:
        with self._lock:
            is_last = self._thread is threading.current_thread()
            if is_last and not self._listeners and time.monotonic() >= self._polled_until:
                # the next page starts another thread
                self._polls = False
            return is_last and self._polls

    def _rest(self, began: float, took_s: float) -> None:
        """Wait until the next poll is due or requested, or no listener is left."""
        until = began + max(self._interval_s, took_s + min(_LONGEST_REST_S, _REST * took_s))
        while (left := until - time.monotonic()) > 0 and self._is_watched():
            # wake up regularly, as the end of a page that polls is not signalled
            self._wake.wait(min(left, self._interval_s))
            self._wake.clear()
            if self._hurried:
                self._hurried = False
                return

    def _apply(self, seen: S) -> None:
        """Send all listeners what has changed."""
        with self._lock:
            updates, self._seen = self._updates(self._seen, seen), seen
            for on_update in self._listeners.values():
                for item in updates:
                    on_update(item)
        self._first.set()


class PoolWatcher(Watcher[PollResult]):
    """Polls one pool.

    Args:
        name: The pool's name, "" for the one in the settings.
        new_poller: As in `Watcher`.
        interval_s: Seconds between two polls.
    """

    def __init__(self, name: str, new_poller: Callable[[], Poller], interval_s: float = INTERVAL_S) -> None:
        super().__init__(name, new_poller, interval_s, POLLED_S)

    def add(self, key: object, on_update: OnUpdate) -> None:
        super().add(key, on_update)
        if (seen := self._seen) is not None and seen.snapshot.state != "up":
            # the state may be outdated: poll at once whether the pool is up now
            self.poll_soon()

    def _updates(self, before: PollResult | None, seen: PollResult) -> Sequence[StateUpdate]:
        if before is None:
            return whole(seen)
        runs = changes(seen.snapshot.pool, before.rows, seen.rows)
        # a change of `now` alone is not reported
        is_same = msgspec.structs.replace(before.snapshot, now=seen.snapshot.now) == seen.snapshot
        updates: list[StateUpdate] = []
        if not is_same:
            updates.append(PoolUpdate(snapshot=seen.snapshot))
        if runs is not None:
            updates.append(runs)
        return updates

    def _failed(self) -> PollResult:
        """Keep the runs that were listed."""
        snapshot = NoPoller(self._name, FAILED, "retry").poll().snapshot
        return PollResult(snapshot, {} if self._seen is None else self._seen.rows)


class ListWatcher(Watcher[PoolsUpdate]):
    """Polls all pools of the list in parallel.

    Args:
        read_settings: Reads the settings.
    """

    def __init__(self, read_settings: Callable[[], Settings]) -> None:
        self._poller = ListPoller(read_settings)
        super().__init__("pools", lambda: self._poller, LIST_INTERVAL_S, _LIST_POLLED_S)

    def add(self, key: object, on_update: OnUpdate) -> None:
        """Add a listener as in `Watcher.add`, and read the list of pools again."""
        super().add(key, on_update)
        self._apply(self._poller.update())

    def latest(self, timeout_s: float = 0.0) -> PoolsUpdate:
        """Return the list as the files have it now, without waiting for any pool."""
        return self._poller.update()

    def _updates(self, before: PoolsUpdate | None, seen: PoolsUpdate) -> Sequence[StateUpdate]:
        return [] if before == seen else [seen]

    def _failed(self) -> PoolsUpdate:
        return self._seen or PoolsUpdate(pools=())


def whole(seen: PollResult) -> tuple[PoolUpdate, RunsUpdate]:
    """Return the whole state, for a page that has nothing yet."""
    rows = tuple(seen.rows.values())
    return PoolUpdate(snapshot=seen.snapshot), RunsUpdate(pool=seen.snapshot.pool, whole=True, changed=rows, gone=())


def changes(pool: str, before: Mapping[str, RunRow], after: Mapping[str, RunRow]) -> RunsUpdate | None:
    """Return an update with the runs that differ, None when none does."""
    # rows of runs that did not change are the same objects
    changed = tuple(row for run_id, row in after.items() if row is not (old := before.get(run_id)) and row != old)
    removed = tuple(run_id for run_id in before if run_id not in after)
    return RunsUpdate(pool=pool, whole=False, changed=changed, gone=removed) if changed or removed else None


class Watchers:
    """The watchers of this process, one for each watched pool. Thread-safe.

    Args:
        read_settings: Reads the settings.
        interval_s: Seconds between two polls.
    """

    def __init__(self, read_settings: Callable[[], Settings] = load_settings, interval_s: float = INTERVAL_S) -> None:
        self.read_settings = read_settings
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._watchers: dict[str, PoolWatcher] = {}
        self._list = ListWatcher(read_settings)

    def watch(self, pool: str, key: object, on_update: OnUpdate) -> PoolWatcher:
        """Send updates about a pool until `remove(key)`.

        Args:
            pool: Its name, "" for the one in the settings.
            key: Identifies the listener.
            on_update: Called with each update.
        """
        watcher = self._watcher(pool)
        watcher.add(key, on_update)
        return watcher

    def watch_list(self, key: object, on_update: OnUpdate) -> ListWatcher:
        """Send updates about the list of pools until `remove(key)`."""
        self._list.add(key, on_update)
        return self._list

    def poll_list(self) -> PoolsUpdate:
        """Return the list of pools with their last known states, and have them polled in the background."""
        self._list.poll()
        return self._list.latest()

    def poll(self, pool: str) -> PollResult | None:
        """Return a pool's state for a page without updates; None when the first poll takes too long."""
        watcher = self._watcher(pool)
        watcher.poll()
        return watcher.latest()

    def poll_soon(self) -> None:
        """Poll all watched pools now, as after a command to a pool."""
        for watcher in self._all():
            watcher.poll_soon()

    def close(self) -> None:
        """Stop all watchers."""
        watchers = self._all()
        for watcher in watchers:
            watcher.stop()
        for watcher in watchers:
            watcher.join()

    def _all(self) -> list[PoolWatcher | ListWatcher]:
        with self._lock:
            return [*self._watchers.values(), self._list]

    def _watcher(self, pool: str) -> PoolWatcher:
        with self._lock:
            if pool not in self._watchers:
                new_poller = functools.partial(poller_of, pool, self.read_settings)
                self._watchers[pool] = PoolWatcher(pool, new_poller, self._interval_s)
            return self._watchers[pool]
