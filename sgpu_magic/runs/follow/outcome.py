"""What a run that has ended means to the notebook: names, a result, or the culprit's exception."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sgpu_magic.client.result import RunResult
from sgpu_magic.client.run import Run
from sgpu_magic.errors import NodeLost, RunCancelled
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.remote_error import run_exception
from sgpu_magic.views.run_notes import unstopped_note
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.ids import short
from sgpu_magic.wire.states import RunKind, RunState


def deliver(
    run: Run,
    view: RunView,
    ended: RunEnded,
    frames: Sequence[bytes],
    namespace: dict[str, Any],
    into: dict[str, Any] | None = None,
) -> RunResult:
    """Set the names of `--out` and return the run's result.

    Args:
        run: The run.
        view: Its view.
        ended: Its last word.
        frames: The raw frames that came with that.
        namespace: The notebook's.
        into: Takes the names in the namespace's place.

    Raises:
        RunCancelled: It was cancelled.
        Exception: What the culprit rank raised, by its own type where that exists here.
    """
    if ended.state is RunState.SUCCEEDED:
        return _result(run, ended, frames, namespace, namespace if into is None else into)
    if ended.state is RunState.CANCELLED:
        still = f" {capitalized(unstopped_note(ended.unstopped))}." if ended.unstopped else ""
        raise RunCancelled(f"run {short(run.run_id)} was cancelled: {ended.reason}.{still}", run_id=run.run_id)
    failure = ended.failure
    if failure is None:
        raise NodeLost(f"run {short(run.run_id)} ended without saying why.", run_id=run.run_id)
    exception = run.load_exception(failure.exception, frames, namespace)
    raise run_exception(view, ended, failure, exception, namespace) from None


def capitalized(text: str) -> str:
    """Return `text` as the beginning of a sentence."""
    return text[:1].upper() + text[1:]


def _result(
    run: Run, ended: RunEnded, frames: Sequence[bytes], namespace: dict[str, Any], into: dict[str, Any]
) -> RunResult:
    returned = run.load_results(ended, frames, namespace)
    if run.spec.kind is RunKind.CALL:
        # one value from each rank, and no name that it would be stored under
        values = [next(iter(rank.names.values()), None) for rank in returned]
        return RunResult(run.spec, ended, values, run.directory, run.mirror, run.ask_tracked)
    for output in run.spec.outputs:
        if output.all_ranks:
            into[output.name] = [values.names[output.name] for values in returned]
        else:
            into[output.name] = returned[0].names[output.name]
    values = [rank.value for rank in returned]
    return RunResult(run.spec, ended, values, run.directory, run.mirror, run.ask_tracked)
