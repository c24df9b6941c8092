"""The list of all pools, with how each is now: all are asked at once, as long as somebody looks at the list."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True, slots=True)
class _Listed:
    """What the user's files say."""

    entries: tuple[PoolEntry, ...] = ()
    settings: Settings = field(default_factory=Settings)


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
        listed = self._read()
        with self._lock:
            self._polled_until = time.monotonic() + _POLLED_S
            self._begin(listed)
            return self._drawn(listed)

    def add(self, key: object, tell: Tell) -> None:
        """Tell somebody the list, and then each change of it."""
        listed = self._read()
        with self._lock:
            self._listeners[key] = tell
            self._told = self._drawn(listed)
            tell(self._told)
            self._begin(listed)

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

    def _begin(self, listed: _Listed) -> None:
        """Start it, where there are other pools than this machine's own; the lock is held."""
        if self._thread is None and not self._closed and listed.entries:
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
        listed = self._read()
        with self._lock:
            self._answers = answers
            told = self._drawn(listed)
            if told != self._told:
                self._told = told
                for tell in self._listeners.values():
                    tell(told)

    # ------------------------------------------------------------ both

    def _read(self) -> _Listed:
        """Read the files, without the lock: a disk that hangs holds up nobody else."""
        listed = _Listed()
        # the pool's own picture says what is wrong with the list or the settings
        with contextlib.suppress(SgpuError):
            listed = replace(listed, entries=read_pools())
        with contextlib.suppress(SgpuError):
            listed = replace(listed, settings=self._read_settings())
        return listed

    def _drawn(self, listed: _Listed) -> PoolsTold:
        entries, settings = listed.entries, listed.settings
        statuses = {name: answer.status for name, answer in self._answers.items() if not answer.problem}
        silent = frozenset(name for name, answer in self._answers.items() if answer.problem)
        rates = {entry.name: rates_of(settings, entry) for entry in entries}
        return PoolsTold(pools=pool_choices(default_pool(settings.pool, entries), entries, statuses, silent, rates))
