"""The first failure of a run as the live view draws it."""

from __future__ import annotations

from msgspec.structs import replace

from sgpu_magic.views.failure_text import failure_block
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.live.picture import FailureBlock, FailureLine
from sgpu_magic.wire.records import Failure
from sgpu_magic.wire.states import RunState

_MAX_EXCERPT_CHARS = 8_000
_MAX_WHOLE_CHARS = 16_000
_MAX_LINE_CHARS = 1_000


def first_failure(view: RunView) -> Failure | None:
    """Return the root cause; while the run is still stopping, the first failure that a rank has told."""
    if view.is_final:
        return view.failure if view.state is not RunState.SUCCEEDED else None
    if view.session is not None:
        # a rank of it may die, and the session goes on
        return None
    told = list(view.rank_failures.values())
    return next((failure for failure in told if not failure.is_consequence), told[0] if told else None)


def drawn_failure(view: RunView, failure: Failure | None) -> FailureBlock | None:
    """Return how a failure is drawn, None without one.

    Args:
        view: The run.
        failure: Its `first_failure`.
    """
    if failure is None:
        return None
    block = failure_block(view, failure, _MAX_EXCERPT_CHARS, _MAX_WHOLE_CHARS)
    return replace(block, lines=_cut(block.lines), whole=_cut(block.whole))


def _cut(lines: tuple[FailureLine, ...]) -> tuple[FailureLine, ...]:
    return tuple(replace(line, text=line.text[:_MAX_LINE_CHARS]) for line in lines)
