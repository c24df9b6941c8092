"""A run comes back to the notebook: shown to its end, then names, a result, or the culprit's exception.

A cell that is interrupted waits for its ranks to stop, but not for long:

A run of its own       its ranks are gone soon, whatever they do: 2.5 s are waited
A cell in a session    its ranks stay and have to come back: 2.8 s are waited. A second interrupt within 5 s of the
                       first kills those that do not stop, also when the next cell waits for them by then
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from sgpu_magic.client.result import RunResult
from sgpu_magic.client.run import Run
from sgpu_magic.errors import NodeLost, RunCancelled, SgpuError
from sgpu_magic.runs.follow.run_loop import HISTORY_PATIENCE_S, Ending, Followed, follow
from sgpu_magic.runs.notebook import RestartWatch
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.remote_error import run_exception
from sgpu_magic.views.run_notes import unstopped_note
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.record import short
from sgpu_magic.wire.run import RunSpec
from sgpu_magic.wire.states import RunKind, RunState

# nothing more comes of a run that goes on: its kept events have all been sent
_CAUGHT_UP_S = 0.3
# an interrupted cell is free after this whatever the ranks do (promise: 3 s)
_PATIENCE_S = 2.5
# the agent says after 2 s which ranks of a session do not stop
_SESSION_PATIENCE_S = 2.8
# killed ranks are gone in a moment
_KILL_PATIENCE_S = 1.0
# a second interrupt so soon means the same ranks
_AGAIN_S = 5.0
_REASON = "it was interrupted"
_AGAIN = "it was interrupted again"


def bring_back(
    followed: Followed,
    namespace: dict[str, Any],
    restarts: RestartWatch | None,
    interrupts: Interrupts | None = None,
    into: dict[str, Any] | None = None,
) -> RunResult | None:
    """Show a run that this cell has submitted until it ends; set the names of `--out`; return its result.

    Args:
        followed: The run.
        namespace: The notebook's.
        restarts: Tells an interrupt that is the beginning of a restart; None when runs end with their kernel.
        interrupts: The session's that it runs in; None for ranks of its own.
        into: Takes the names of `--out` in the namespace's place.

    Returns:
        None when the run was detached meanwhile.

    Raises:
        RunCancelled: It was cancelled.
        NodeLost: What it ran on died.
        Exception: What the culprit rank raised, by its own type where that exists here.
    """
    run = followed.run
    ending: Ending | None
    try:
        ending = follow(followed, until_detached=True)
        if ending is None:
            leave(followed)
            return None
    except KeyboardInterrupt:
        try:
            if not run.spec.session and restarts is not None and restarts.is_asked():
                leave(followed)
                return None
            _cancel(run)
        except KeyboardInterrupt:
            # the stop button was pressed twice in one moment
            _cancel(run)
        ending = _after_interrupt(followed, interrupts)
        if restarts is not None and restarts.asked.is_set():
            # a restart interrupts first; who reads the output afterwards has another kernel
            run_id = short(run.run_id)
            followed.view.remark(f"the kernel was restarted; %sgpu_attach {run_id} shows run {run_id} again")
    followed.publisher.tick(time.monotonic(), final=True)
    if ending is None:
        raise RunCancelled(_not_yet_stopped(run), run_id=run.run_id)
    return deliver(run, followed.view, *ending, namespace, into)


def watch(followed: Followed, state: RunState, namespace: dict[str, Any]) -> RunResult | None:
    """Show a run from its beginning as if its cell had run here. An interrupt only stops the watching.

    Args:
        followed: The run.
        state: Its state when it was attached to.
        namespace: The notebook's.

    Returns:
        None when it was interrupted.

    Raises:
        Exception: As `bring_back`.
    """
    run = followed.run
    try:
        ending = follow(followed, has_ended=state.is_final)
    except KeyboardInterrupt:
        followed.view.leave(f"stopped watching; run {short(run.run_id)} goes on")
        followed.publisher.tick(time.monotonic(), final=True)
        return None
    followed.publisher.tick(time.monotonic(), final=True)
    return deliver(run, followed.view, *ending, namespace) if ending is not None else None


def show(followed: Followed, state: RunState, stopped: threading.Event) -> None:
    """Show a run until it ends and bring nothing back; for a thread of its own.

    Args:
        followed: The run.
        state: Its state when it was attached to.
        stopped: Ends the showing.
    """
    try:
        ending = follow(followed, has_ended=state.is_final, stopped=stopped)
    except SgpuError as error:
        followed.view.leave(error.message)
        ending = None
    if ending is None and not followed.view.left:
        _stop_watching(followed)
    followed.publisher.tick(time.monotonic(), final=True)


def replay(followed: Followed, state: RunState) -> None:
    """Show once what a run has done until now; arguments as for `show`."""
    if state.is_final:
        follow(followed, has_ended=True)
    else:
        until = time.monotonic() + HISTORY_PATIENCE_S
        while time.monotonic() < until and followed.take(_CAUGHT_UP_S) is not None:
            pass
        if not followed.view.is_final:
            _stop_watching(followed)
    followed.publisher.tick(time.monotonic(), final=True)


def leave(followed: Followed) -> None:
    """The run goes on without this notebook: say so, and let go of its memory."""
    followed.pool.run_left(followed.run.run_id)
    followed.view.leave(goes_on(followed.run.spec))
    followed.publisher.tick(time.monotonic(), final=True)


def goes_on(spec: RunSpec) -> str:
    """Return how a detached run is come back to."""
    run = short(spec.run_id)
    brings = f" and brings {', '.join(output.name for output in spec.outputs)}" if spec.outputs else ""
    return f"run {run} goes on without this notebook · %sgpu_attach {run} shows it{brings}, sgpu cancel {run} ends it"


def _stop_watching(followed: Followed) -> None:
    run = short(followed.run.run_id)
    followed.view.leave(f"run {run} goes on; %sgpu_status {run} and %sgpu_attach {run} show it again")


# ---------------------------------------------------------------- a cell that was interrupted


class Interrupts:
    """Remembers the cell of a session that was interrupted last, while its ranks go on."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._at = 0.0
        self._killed = False

    def interrupted(self, run: Run) -> None:
        """Its cell is about to be free; whether its ranks stop is not known yet."""
        self._run, self._at = run, time.monotonic()

    def stopped(self, run: Run) -> None:
        """Its ranks have stopped."""
        if self._run is run:
            self._run = None

    def kill_before(self) -> None:
        """Another cell, which waits for those ranks, is interrupted: kill them if that comes soon enough."""
        run, self._run = self._run, None
        if run is not None and time.monotonic() - self._at <= _AGAIN_S:
            self.kill(run)

    def kill(self, run: Run) -> None:
        """Kill its ranks that have not stopped."""
        self._killed = True
        run.cancel(_AGAIN, kill=True)

    def has_killed(self) -> bool:
        """Whether ranks were killed since this was asked last."""
        killed, self._killed = self._killed, False
        return killed


def _cancel(run: Run) -> None:
    """Cancel, also when the stop button is pressed again meanwhile: the run would go on with nobody there."""
    while True:
        try:
            run.cancel(_REASON)
            return
        except KeyboardInterrupt:
            continue


def _after_interrupt(followed: Followed, interrupts: Interrupts | None) -> Ending | None:
    """Wait for a cancelled run's end; None when it does not come soon.

    Args:
        followed: The run.
        interrupts: The session's that it runs in; None for ranks of its own.
    """
    if interrupts is None:
        try:
            return _wait(followed, time.monotonic() + _PATIENCE_S)
        except KeyboardInterrupt:
            return None
    run = followed.run
    deadline = time.monotonic() + _SESSION_PATIENCE_S
    if followed.view.warm:
        interrupts.interrupted(run)
    else:
        # it waits, perhaps for the ranks that the interrupt before this one has not stopped
        interrupts.kill_before()
    try:
        ending = _wait(followed, deadline)
    except KeyboardInterrupt:
        interrupts.kill(run)
        try:
            ending = _wait(followed, max(deadline, time.monotonic() + _KILL_PATIENCE_S))
        except KeyboardInterrupt:
            ending = None
    if ending is not None and not ending[0].unstopped:
        interrupts.stopped(run)
    return ending


def _not_yet_stopped(run: Run) -> str:
    """Return what to say of a run whose end has not come in time."""
    if not run.spec.in_session:
        return f"run {short(run.run_id)} is being stopped; it holds its devices until its ranks are gone."
    return (
        f"run {short(run.run_id)} is being stopped; its session has not said yet that its ranks have. The next cell "
        "waits for them, and a second interrupt within 5 s kills those that do not stop: their variables are lost."
    )


def _wait(followed: Followed, until: float) -> Ending | None:
    """Wait for the end of a run that was cancelled; a pool service that is gone is not looked for here."""
    asked = threading.Event()

    def lost(_: Followed) -> None:
        if not asked.is_set():
            asked.set()
            followed.pool.cancel_in_background(followed.run, _REASON)

    return follow(followed, until=until, lost=lost)


# ---------------------------------------------------------------- what it means


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
        note = unstopped_note(ended.unstopped) if ended.unstopped else ""
        still = f" {note[:1].upper()}{note[1:]}." if note else ""
        raise RunCancelled(f"run {short(run.run_id)} was cancelled: {ended.reason}.{still}", run_id=run.run_id)
    failure = ended.failure
    if failure is None:
        raise NodeLost(f"run {short(run.run_id)} ended without saying why.", run_id=run.run_id)
    exception = run.load_exception(failure.exception, frames, namespace)
    raise run_exception(view, ended, failure, exception, namespace) from None


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
