"""From a submitted run to its result: fold its events, show them, bring back what it returns or raises."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sgpu_magic.client.result import RunResult
from sgpu_magic.client.run import Run
from sgpu_magic.config import Settings
from sgpu_magic.errors import NodeLost, RunCancelled
from sgpu_magic.protocol.events import Event, RunEnded
from sgpu_magic.protocol.ids import short
from sgpu_magic.protocol.states import RunState
from sgpu_magic.render.publisher import Publisher
from sgpu_magic.render.remote_error import remote_exception
from sgpu_magic.render.view import RunView

_TICK_S = 0.05
# nothing comes: only the clock moves, and every wake-up is taken from the ranks
_IDLE_TICK_S = 0.25
_LIVELY_S = 0.5
# an interrupted cell is free after this whatever the ranks do (promise: 3 s)
_CANCEL_PATIENCE_S = 2.5
_BATCH = 64


def bring_back(
    run: Run, view: RunView, publisher: Publisher, namespace: dict[str, Any], settings: Settings
) -> RunResult:
    """Show the run until it ends; set the names of `--out`; return its result.

    Raises:
        RunCancelled: It was cancelled.
        NodeLost: The pool died.
        Exception: What the culprit rank raised, by its own type where that exists here.
    """
    try:
        ended, frames = _follow(run, view, publisher)
    except KeyboardInterrupt:
        run.cancel("it was interrupted")
        ended, frames = _after_interrupt(run, view, publisher)
    publisher.tick(time.monotonic(), final=True)
    if ended is None:
        text = f"run {short(run.run_id)} is being stopped; it holds its devices until its ranks are gone."
        raise RunCancelled(text, run_id=run.run_id)
    if ended.state is RunState.SUCCEEDED:
        return _result(run, ended, frames, namespace, settings)
    if ended.state is RunState.CANCELLED:
        raise RunCancelled(f"run {short(run.run_id)} was cancelled: {ended.reason}.", run_id=run.run_id)
    failure = ended.failure
    if failure is None:
        raise NodeLost(f"run {short(run.run_id)} ended without saying why.", run_id=run.run_id)
    exception = run.load_exception(failure.exception, frames, namespace)
    raise remote_exception(
        failure,
        ended.others,
        run.run_id,
        run.spec.placement.ranks,
        ended.starting_s + ended.running_s,
        exception,
        notebook_names=namespace,
    ) from None


def _follow(run: Run, view: RunView, publisher: Publisher) -> tuple[RunEnded, Sequence[bytes]]:
    lively_until = time.monotonic() + _LIVELY_S
    while True:
        patience = _TICK_S if time.monotonic() < lively_until else _IDLE_TICK_S
        for turn in range(_BATCH):
            item = run.next_event(0 if turn else patience)
            if item is None:
                break
            lively_until = time.monotonic() + _LIVELY_S
            event, frames = item
            view.apply(event, frames)
            if isinstance(event.body, RunEnded):
                return event.body, frames
        if run.link_lost:
            return _last_words(run, view)
        publisher.tick(time.monotonic())


def _last_words(run: Run, view: RunView) -> tuple[RunEnded, Sequence[bytes]]:
    """The pool is gone: what it still said counts."""
    while (item := run.next_event(0)) is not None:
        view.apply(*item)
        if isinstance(item[0].body, RunEnded):
            return item[0].body, item[1]
    from sgpu_magic.protocol.records import Failure
    from sgpu_magic.protocol.states import FailureKind

    message = (
        f"the local pool (process {run.pool_pid}) ended while the run was going on; its ranks were ended with it. "
        "Run the cell again: that starts a new pool"
    )
    failure = Failure(kind=FailureKind.NODE_LOST, message=message, at=time.time())
    ended = RunEnded(state=RunState.FAILED, failure=failure, running_s=view.elapsed_s())
    view.apply(Event(run_id=run.run_id, seq=1 << 60, at=time.time(), body=ended), ())
    return ended, ()


def _after_interrupt(run: Run, view: RunView, publisher: Publisher) -> tuple[RunEnded | None, Sequence[bytes]]:
    """Wait for the ranks to stop, but not for long; a second interrupt does not wait at all."""
    deadline = time.monotonic() + _CANCEL_PATIENCE_S
    try:
        while time.monotonic() < deadline:
            item = run.next_event(_TICK_S)
            if item is not None:
                view.apply(*item)
                if isinstance(item[0].body, RunEnded):
                    return item[0].body, item[1]
            if run.link_lost:
                return _last_words(run, view)
            publisher.tick(time.monotonic())
    except KeyboardInterrupt:
        return None, ()
    return None, ()


def _result(
    run: Run, ended: RunEnded, frames: Sequence[bytes], namespace: dict[str, Any], settings: Settings
) -> RunResult:
    returned = run.load_results(ended, frames, namespace)
    for output in run.spec.outputs:
        if output.all_ranks:
            namespace[output.name] = [values.names[output.name] for values in returned]
        else:
            namespace[output.name] = returned[0].names[output.name]
    directory = settings.runs_path / run.run_id
    return RunResult(run.spec, ended, [values.value for values in returned], directory)
