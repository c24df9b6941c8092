"""The number of examples that property tests try, and the rows of a table that `make test` runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

WHOLE = "WHOLE_TESTS"
"""The environment variable by which `make test-all` requests all examples."""

_SHARE = 5


def examples(whole: int) -> int:
    """Return `whole`, or a fifth of it in `make test`, where each run tries different ones."""
    return whole if WHOLE in os.environ else max(1, whole // _SHARE)


def first_rows(rows: Sequence[tuple[Any, ...]], count: int) -> list[Any]:
    """Return the rows of a `parametrize`, all but the first `count` of them marked slow."""
    kept = [pytest.param(*row) for row in rows[:count]]
    return kept + [pytest.param(*row, marks=pytest.mark.slow) for row in rows[count:]]
