# ruff: noqa: T201
"""Say that something takes its time, for the set-up's scripts."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

_LINE_EVERY_S = 10


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Print every ten seconds how long the block has taken, unless stdout is a terminal."""
    if sys.stdout.isatty():
        yield
        return
    ended, begun = threading.Event(), time.monotonic()

    def report() -> None:
        while not ended.wait(_LINE_EVERY_S):
            print(f"{what}: {time.monotonic() - begun:.0f} s so far", flush=True)

    threading.Thread(target=report, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
