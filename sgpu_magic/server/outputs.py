"""The outputs of a finished run's cell, built without its kernel and without unpickling anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sgpu_magic.client.result import RunResult
from sgpu_magic.errors import RunCancelled
from sgpu_magic.views.bundle import caption_bundle, mime_bundle
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.output import Caption, ShownDisplay, TextSegment, segments
from sgpu_magic.views.remote_error import run_exception
from sgpu_magic.views.run_notes import last_part
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.rank_events import Failure
from sgpu_magic.wire.record import short
from sgpu_magic.wire.states import FailureKind, RunKind, RunState

Output = dict[str, object]


def cell_outputs(view: RunView, directory: Path, *, returns: bool = True) -> list[Output]:
    """Return the outputs of a run's cell in the notebook format, as its kernel would have left them.

    Args:
        view: The run; it has ended, or no process can be working on it any more.
        directory: The run's directory.
        returns: Include the cell's value or error; False for a detached run, whose cell gets neither.
    """
    parts = segments(view)
    outputs: list[Output] = []
    for at, part in enumerate(parts):
        if not isinstance(part, TextSegment):
            outputs.append(_rich(view, part))
            continue
        bundle = mime_bundle(view, part, at == 0, at == len(parts) - 1)
        if bundle["text/html"]:
            outputs.append(_display(bundle, {}))
    # the cell that connected a session ended long ago
    if returns and view.ended is not None and view.session is None:
        outputs += _last_word(view, view.ended, directory)
    return outputs


def rich_outputs(view: RunView) -> list[Output]:
    """Return what the ranks have displayed so far, to be shown below a live view."""
    return [_rich(view, part) for part in segments(view) if not isinstance(part, TextSegment)]


def _rich(view: RunView, part: Caption | ShownDisplay) -> Output:
    if isinstance(part, Caption):
        return _display(caption_bundle(part), {})
    return _display(view.models.static(part.item.rank, part.item.bundle), part.item.metadata)


def _display(data: dict[str, object], metadata: dict[str, object]) -> Output:
    return {"output_type": "display_data", "data": data, "metadata": metadata}


def _last_word(view: RunView, ended: RunEnded, directory: Path) -> Sequence[Output]:
    """Return the cell's value or its error."""
    if ended.state is RunState.SUCCEEDED:
        if view.spec.kind is not RunKind.CELL:
            # a function's value is used by the cell's own code
            return ()
        # only the values' texts are needed
        result = RunResult(view.spec, ended, [None] * len(ended.results), directory)
        value: Output = {"output_type": "execute_result", "data": {"text/plain": repr(result)}, "metadata": {}}
        return (value | {"execution_count": view.spec.cell.execution_count},)
    if ended.state is RunState.CANCELLED:
        error = RunCancelled(f"run {short(view.run_id)} was cancelled: {ended.reason}.", run_id=view.run_id)
        return (_error("RunCancelled", error),)
    if ended.failure is not None:
        return (_failure(view, ended, ended.failure),)
    return ()


def _failure(view: RunView, ended: RunEnded, failure: Failure) -> Output:
    error = run_exception(view, ended, failure)
    if failure.kind is FailureKind.USER_CODE:
        return _error(last_part(failure.type_name) or type(error).__name__, error, failure.message)
    return _error(type(error).__name__, error)


def _error(name: str, error: BaseException, value: str | None = None) -> Output:
    draw: Callable[[], list[str]] | None = getattr(error, "_render_traceback_", None)
    lines = draw() if draw is not None else [f"{name}: {error}"]
    return {
        "output_type": "error",
        "ename": name,
        "evalue": str(error) if value is None else value,
        "traceback": lines,
    }
