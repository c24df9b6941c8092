"""Waiting for a condition with a deadline, instead of sleeping."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

_POLL_S = 0.02


def eventually(
    condition: Callable[[], Any], deadline_s: float = 10.0, what: str | Callable[[], str] = "", poll_s: float = _POLL_S
) -> Any:
    """Return the condition's value once it is true.

    Args:
        condition: Called repeatedly.
        deadline_s: Seconds after which the test fails on an otherwise idle machine; multiplied by the number of
            runnable processes per processor on a busy one.
        what: A description of the condition; a callable that returns it is called at the end.
        poll_s: Seconds between two calls.
    """
    begin = time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        passed_s = time.monotonic() - begin
        if passed_s > deadline_s * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)):
            raise AssertionError(f"not within {passed_s:.1f} s: {what() if callable(what) else what}")
        time.sleep(poll_s)
