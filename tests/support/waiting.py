"""Waiting for a condition with a deadline: no test sleeps."""

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
        condition: Asked again and again.
        deadline_s: Seconds after which the test fails on a machine of its own; where others want the processors too,
            as many times later as there are processes for each.
        what: What is waited for; a callable is asked for the text at the end.
        poll_s: Seconds between two questions.
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
