"""Waiting for a condition with a deadline: no test sleeps."""

from __future__ import annotations

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
        deadline_s: Seconds after which the test fails.
        what: What is waited for; a callable is asked for the text at the end.
        poll_s: Seconds between two questions.
    """
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s:g} s: {what() if callable(what) else what}")
        time.sleep(poll_s)
