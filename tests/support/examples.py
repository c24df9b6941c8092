"""How many examples the property tests try."""

from __future__ import annotations

import os

WHOLE = "WHOLE_TESTS"
"""The environment variable with which `make test-all` asks for all examples."""

_SHARE = 3


def examples(whole: int) -> int:
    """Return `whole`, or a third of it in `make test`: each run tries others."""
    return whole if WHOLE in os.environ else max(1, whole // _SHARE)
