"""Tells how much of what goes along with a run is at its pool, when that takes long."""

from __future__ import annotations

import time
from collections.abc import Callable

from sgpu_magic.client.link import PoolLink
from sgpu_magic.system.byte_sizes import format_bytes

# what is over within a second needs no word
_FIRST_S = 1.0
_EVERY_S = 1.0


class Sending:
    """One run's way to a pool of another machine; a context, at whose end nothing is told any more.

    Args:
        pool: The pool's name.
        link: To it.
        tell: Called with a sentence about once a second, "" at the end when there was one; None tells nobody.
    """

    def __init__(self, pool: str, link: PoolLink, tell: Callable[[str], None] | None) -> None:
        self._pool = pool
        self._link = link
        self._tell = tell
        self._due = time.monotonic() + _FIRST_S
        self._told = False

    def __enter__(self) -> Sending:
        return self

    def __exit__(self, *_: object) -> None:
        if self._told and self._tell is not None:
            self._tell("")

    def part(self, what: str, total: int) -> Callable[[int], None]:
        """Return what is to be called with the bytes of one part that are at the pool.

        Args:
            what: The part, such as `variables`.
            total: All its bytes.
        """
        return lambda there: self._progress(what, there, total)

    def _progress(self, what: str, there: int, total: int) -> None:
        now = time.monotonic()
        if self._tell is None or now < self._due:
            return
        self._due = now + _EVERY_S
        self._told = True
        silent_s = self._link.silent_s
        silent = f"; the link has been silent for {silent_s:.0f} s, it goes on when that is back" if silent_s else ""
        self._tell(f"sending {what} to {self._pool}: {format_bytes(there)} of {format_bytes(total)} are there{silent}")
