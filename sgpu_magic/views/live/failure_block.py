"""The first failure of a run as the live view draws it."""

from __future__ import annotations

from collections.abc import Sequence

from sgpu_magic.views.failure_form import FormLine, failure_form
from sgpu_magic.views.live.picture import FailureBlock, FailureLine, MemoryBlock, MemoryCard, MemoryTensor
from sgpu_magic.views.memory import RANK_HEADS, TITLE, memory_table
from sgpu_magic.views.view import RunView
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


def failure_block(view: RunView, failure: Failure | None) -> FailureBlock | None:
    """Return how a failure is drawn, None without one.

    Args:
        view: The run.
        failure: Its `first_failure`.
    """
    if failure is None:
        return None
    form = failure_form(view, failure, _MAX_EXCERPT_CHARS, _MAX_WHOLE_CHARS)
    return FailureBlock(
        rank=failure.rank, lines=_cut(form.lines), whole=_cut(form.whole), memory=_memory(view, failure)
    )


def _memory(view: RunView, failure: Failure) -> MemoryBlock | None:
    table = memory_table(view, failure)
    if table is None:
        return None
    return MemoryBlock(
        title=TITLE,
        heads=RANK_HEADS,
        rows=tuple(
            MemoryCard(rank=row.rank, cells=row.cells, shares=row.shares, culprit=row.is_culprit) for row in table.rows
        ),
        more=table.more,
        largest=table.largest,
        tensors=tuple(MemoryTensor(name=tensor.name, cells=tensor.cells) for tensor in table.tensors),
    )


def _cut(lines: Sequence[FormLine]) -> tuple[FailureLine, ...]:
    return tuple(FailureLine(text=line.text[:_MAX_LINE_CHARS], kind=line.kind) for line in lines)
