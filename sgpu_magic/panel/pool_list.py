"""The list of all pools, with how each is now: all are asked at once, as long as somebody looks at the list."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from sgpu_magic.client.pools_file import PoolEntry, default_pool, read_pools
from sgpu_magic.config import Settings
from sgpu_magic.errors import SgpuError
from sgpu_magic.panel.pool_state import pool_choices, rates_of
from sgpu_magic.panel.schema import PanelTold, PoolsTold

if TYPE_CHECKING:
    from sgpu_magic.client.pools import Asked, Pools

EVERY_S = 10.0
"""Seconds between two looks at pools that nobody has chosen."""
# a page that asks and does not listen counts as looking for so long
_POLLED_S = 30.0
_JOIN_S = 3.0
_NOBODY = float("-inf")

Tell = Callable[[PanelTold], None]


class PoolList:
    """Keeps the list up to date as long as somebody listens. Methods may be called by any thread.

    Args:
        read_settings: Reads the settings.
        every_s: Seconds between two looks.
    """

    def __init__(self, read_settings: Callable[[], Settings], every_s: float = EVERY_S) -> None:
        self._read_settings = read_settings
        self._every_s = every_s
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._listeners: dict[object, Tell] = {}
        self._polled_until = _NOBODY
        self._answers: Mapping[str, Asked] = {}
        self._told: PoolsTold | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def now(self) -> PoolsTold:
        """Return the list with what is known; asks nobody, but has them asked."""
        with self._lock:
            self._polled_until = time.monotonic() + _POLLED_S
            self._begin()
            return self._drawn()

    def add(self, key: object, tell: Tell) -> None:
        """Tell somebody the list, and then each change of it."""
        with self._lock:
            self._listeners[key] = tell
            self._told = self._drawn()
            tell(self._told)
            self._begin()

    def remove(self, key: object) -> None:
        """Somebody does not look any more."""
        with self._lock:
            self._listeners.pop(key, None)
        self._wake.set()

    def look_soon(self) -> None:
        """Something has changed: ask now."""
        self._wake.set()

    def close(self) -> None:
        """Nobody is told any more."""
        with self._lock:
            self._closed = True
            self._listeners.clear()
            thread = self._thread
        self._wake.set()
        if thread is not None:
            thread.join(_JOIN_S)

    # ------------------------------------------------------------ the thread

    def _begin(self) -> None:
        """Start it, where there are other pools than this machine's own; the lock is held."""
        if self._thread is None and not self._closed and self._entries():
            self._thread = threading.Thread(target=self._work, name="sgpu-pools", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        # the client's half is heavy, and few servers are ever asked
        from sgpu_magic.client.pools import Pools

        pools: Pools | None = None
        try:
            while self._goes_on():
                began = time.monotonic()
                try:
                    pools = pools or Pools(self._read_settings())
                    answers = pools.asked(pools.entries(), local=False, recent=1)
                except SgpuError:
                    # the chosen pool's own picture says what is wrong with the settings or the list
                    answers = []
                self._take({answer.name: answer for answer in answers})
                self._wake.wait(max(0.0, began + self._every_s - time.monotonic()))
                self._wake.clear()
        finally:
            if pools is not None:
                pools.close()

    def _goes_on(self) -> bool:
        with self._lock:
            goes_on = not self._closed and bool(self._listeners or time.monotonic() < self._polled_until)
            if not goes_on:
                # the next who looks starts another
                self._thread = None
            return goes_on

    def _take(self, answers: Mapping[str, Asked]) -> None:
        with self._lock:
            self._answers = answers
            told = self._drawn()
            if told != self._told:
                self._told = told
                for tell in self._listeners.values():
                    tell(told)

    # ------------------------------------------------------------ both

    def _entries(self) -> tuple[PoolEntry, ...]:
        try:
            return read_pools()
        except SgpuError:
            return ()

    def _drawn(self) -> PoolsTold:
        entries = self._entries()
        try:
            settings = self._read_settings()
        except SgpuError:
            # the pool's own picture says what is wrong with the settings
            settings = Settings()
        statuses = {name: answer.status for name, answer in self._answers.items() if not answer.problem}
        silent = frozenset(name for name, answer in self._answers.items() if answer.problem)
        rates = {entry.name: rates_of(settings, entry) for entry in entries}
        return PoolsTold(pools=pool_choices(default_pool(settings.pool, entries), entries, statuses, silent, rates))
