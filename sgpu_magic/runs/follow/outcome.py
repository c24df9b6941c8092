"""Shows a run until it ends and delivers its outcome: names, a result, or the exception of the first failed rank.

An interrupted cell waits a limited time for its ranks to stop:

A run with its own ranks  waits up to 2.5 s; the ranks are killed soon after, whatever they do.
A cell in a session       waits up to 2.8 s, as its ranks stay alive and have to stop the cell. A second interrupt
                          within 5 s of the first kills those that have not, even if the next cell already waits for
                          them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Sequence
from typing import Any

from sgpu_magic.client.result import RunResult
from sgpu_magic.client.run import ClientRun
from sgpu_magic.errors import NodeLost, RunCancelled, SgpuError
from sgpu_magic.runs.follow.run_loop import HISTORY_PATIENCE_S, Ending, Subscription, follow
from sgpu_magic.runs.kernel_restarts import RestartWatch
from sgpu_magic.runs.notebook import working_directory
from sgpu_magic.views.remote_error import run_exception
from sgpu_magic.views.run_notes import cancelled_sentence, unstopped_note
from sgpu_magic.wire.base import CancelReason, RunKind, RunState, short
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.run import RunSpec

Names = dict[str, Any]
"""Variables by name."""

# without an event for this long, all stored events of an active run have arrived
_CAUGHT_UP_S = 0.3
# an interrupted cell returns after this, whatever the ranks do (documented limit: 3 s)
_PATIENCE_S = 2.5
# the agent reports after 2 s which ranks of a session have not stopped
_SESSION_PATIENCE_S = 2.8
# killed ranks exit quickly
_KILL_PATIENCE_S = 1.0
# a second interrupt within this time is meant for the same ranks
_AGAIN_S = 5.0
# further interrupts within this time belong to the first
_SAME_PRESS_S = 1.0
_TOO_SOON = (
    "the second interrupt came within a second of the first and was ignored: the ranks are stopping. Interrupt again "
    "to kill those that do not stop; their variables are lost then"
)


def collect(
    followed: Subscription,
    namespace: Names,
    restarts: RestartWatch | None,
    interrupts: Interrupts | None,
    into: Names | None,
) -> RunResult | None:
    """Show a run that this cell submitted until it ends, set the names of `--out`, and return its result.

    Args:
        followed: The run.
        namespace: The notebook's namespace.
        restarts: Detects an interrupt that belongs to a kernel restart; None if there is no kernel.
        interrupts: Interrupts of the session that it runs in; None for a run with its own ranks.
        into: Receives the names of `--out` instead of the namespace.

    Returns:
        The result; None if the run was detached meanwhile.

    Raises:
        RunCancelled: The run was cancelled.
        NodeLost: The machine or process that ran it died.
        Exception: The exception of the rank that failed first, in its own type if that exists here.
    """
    run = followed.run
    ending: Ending | None
    try:
        if (ending := follow(followed, until_detached=True)) is None:
            abandon(followed)
            return None
    except KeyboardInterrupt:
        try:
            if not run.spec.session and restarts is not None and restarts.is_asked():
                abandon(followed)
                return None
            _cancel(run)
        except KeyboardInterrupt:
            # the stop button was pressed twice in quick succession
            _cancel(run)
        ending = _after_interrupt(followed, interrupts)
        if restarts is not None and restarts.asked.is_set():
            # a restart interrupts the cell first; its output is read after the restart
            run_id = short(run.run_id)
            followed.view.remark(f"the kernel was restarted; %sgpu_attach {run_id} shows run {run_id} again")
    followed.publisher.tick(time.monotonic(), final=True)
    if ending is None:
        raise RunCancelled(_not_yet_stopped(run), run_id=run.run_id)
    return deliver(followed, ending, namespace, into)


def watch(followed: Subscription, state: RunState, namespace: dict[str, Any]) -> RunResult | None:
    """Show a run from its beginning, as if its cell had run here. An interrupt stops the watching, not the run.

    Args:
        followed: The run.
        state: The run's state when this process attached to it.
        namespace: The notebook's namespace.

    Returns:
        The result; None after an interrupt.

    Raises:
        Exception: As `collect`.
    """
    ending = None
    try:
        ending = follow(followed, has_ended=state.is_final)
    except KeyboardInterrupt:
        followed.view.stop_following(f"stopped watching; run {short(followed.run.run_id)} continues")
    followed.publisher.tick(time.monotonic(), final=True)
    return deliver(followed, ending, namespace) if ending is not None else None


def show(followed: Subscription, state: RunState, stopped: threading.Event) -> None:
    """Show a run until it ends, without results; runs in its own thread.

    Args:
        followed: The run.
        state: The run's state when this process attached to it.
        stopped: Return when it is set.
    """
    try:
        ending = follow(followed, has_ended=state.is_final, stopped=stopped)
    except SgpuError as error:
        followed.view.stop_following(error.message)
        ending = None
    if ending is None and not followed.view.left:
        _stop_watching(followed)
    followed.publisher.tick(time.monotonic(), final=True)


def replay(followed: Subscription, state: RunState) -> None:
    """Show a run's events so far once; arguments as in `show`."""
    if state.is_final:
        follow(followed, has_ended=True)
    else:
        until = time.monotonic() + HISTORY_PATIENCE_S
        while time.monotonic() < until and followed.next_event(_CAUGHT_UP_S) is not None:
            pass
        if not followed.view.is_final:
            _stop_watching(followed)
    followed.publisher.tick(time.monotonic(), final=True)


def abandon(followed: Subscription) -> None:
    """Show that a run continues without this notebook, and give up its payload memory."""
    followed.pool.give_payload_up(followed.run.run_id)
    followed.view.stop_following(detached_note(followed.run.spec))
    followed.publisher.tick(time.monotonic(), final=True)


def detached_note(spec: RunSpec) -> str:
    """Return the sentence for a detached run, with the commands to attach to it and cancel it."""
    run = short(spec.run_id)
    brings = f" and brings {', '.join(output.name for output in spec.outputs)}" if spec.outputs else ""
    return f"run {run} continues without this notebook · %sgpu_attach {run} shows it{brings}, sgpu cancel {run} ends it"


def _stop_watching(followed: Subscription) -> None:
    run = short(followed.run.run_id)
    followed.view.stop_following(f"run {run} continues; %sgpu_status {run} and %sgpu_attach {run} show it again")


# ---------------------------------------------------------------- interrupted cells


class Interrupts:
    """Remembers the last interrupted cell of a session while its ranks have not stopped."""

    def __init__(self) -> None:
        self._run: ClientRun | None = None
        self._at = 0.0
        self._killed = False

    def interrupted(self, run: ClientRun) -> None:
        """Record an interrupted cell whose ranks may not have stopped yet."""
        self._run, self._at = run, time.monotonic()

    def record_stopped(self, run: ClientRun) -> None:
        """Record that the ranks of an interrupted cell have stopped."""
        if self._run is run:
            self._run = None

    def kill_before(self) -> None:
        """Kill the ranks of the last interrupted cell, within 5 s; called when a cell that waits is interrupted."""
        if self._run is not None and not self.is_too_soon():
            run, self._run = self._run, None
            if time.monotonic() - self._at <= _AGAIN_S:
                self.kill(run)

    def is_too_soon(self) -> bool:
        """Whether the last interrupt is so recent that another one comes from the same press of the stop button."""
        return time.monotonic() - self._at < _SAME_PRESS_S

    def kill(self, run: ClientRun) -> None:
        """Kill the ranks of a run that have not stopped."""
        self._killed = True
        run.cancel(CancelReason.SECOND_INTERRUPT, kill=True)

    def has_killed(self) -> bool:
        """Whether ranks were killed since the last call."""
        killed, self._killed = self._killed, False
        return killed


def _cancel(run: ClientRun) -> None:
    """Cancel a run, even if interrupted again meanwhile; otherwise it would continue unattended."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            run.cancel(CancelReason.INTERRUPT)
            return


def _after_interrupt(followed: Subscription, interrupts: Interrupts | None) -> Ending | None:
    """Wait for a cancelled run's end; None on timeout.

    Args:
        followed: The run.
        interrupts: Interrupts of the session that it runs in; None for a run with its own ranks.
    """
    if interrupts is None:
        with contextlib.suppress(KeyboardInterrupt):
            return _wait(followed, time.monotonic() + _PATIENCE_S)
        return None
    run = followed.run
    deadline = time.monotonic() + _SESSION_PATIENCE_S
    if followed.view.warm is not None:
        interrupts.interrupted(run)
    else:
        # the cell has not started, perhaps because it waits for ranks that an earlier interrupt has not stopped
        interrupts.kill_before()
    ending = None
    while True:
        try:
            ending = _wait(followed, deadline)
        except KeyboardInterrupt:
            if interrupts.is_too_soon():
                # the ranks are about to stop, and killing them would cost the session's variables
                followed.view.remark(_TOO_SOON)
                continue
            interrupts.kill(run)
            with contextlib.suppress(KeyboardInterrupt):
                ending = _wait(followed, max(deadline, time.monotonic() + _KILL_PATIENCE_S))
        break
    if ending is not None and not ending[0].unstopped:
        interrupts.record_stopped(run)
    return ending


def _not_yet_stopped(run: ClientRun) -> str:
    """Return the message for a cancelled run that has not ended in time."""
    if not run.spec.in_session:
        return f"run {short(run.run_id)} is being stopped; it holds its devices until its ranks have exited."
    return (
        f"run {short(run.run_id)} is being stopped; its session has not yet reported that its ranks stopped. The next "
        "cell waits for them, and a second interrupt within 5 s kills those that do not stop: their variables are lost."
    )


def _wait(followed: Subscription, until: float) -> Ending | None:
    """Wait for a cancelled run's end. If its pool service is gone, the run is cancelled in the background."""
    # once, although `follow` calls it again and again
    cancel = functools.cache(lambda: followed.pool.cancel_in_background(followed.run, CancelReason.INTERRUPT))
    return follow(followed, until=until, lost=lambda _: cancel())


# ---------------------------------------------------------------- results and errors


def deliver(followed: Subscription, ending: Ending, namespace: Names, into: Names | None = None) -> RunResult:
    """Set the names of `--out` and return the run's result.

    Args:
        followed: The run.
        ending: Its final event.
        namespace: The notebook's namespace.
        into: Receives the names instead of the namespace.

    Raises:
        RunCancelled: The run was cancelled.
        Exception: The exception of the rank that failed first, in its own type if that exists here.
    """
    received, frames = ending
    run = followed.run
    # the view's copy spells options as the caller does
    ended = followed.view.ended or received
    if ended.state is RunState.SUCCEEDED:
        return _result(followed, ended, frames, namespace, namespace if into is None else into)
    if ended.state is RunState.CANCELLED:
        note = unstopped_note(ended.unstopped) if ended.unstopped else ""
        still = f" {note[:1].upper()}{note[1:]}." if note else ""
        raise RunCancelled(f"{cancelled_sentence(run.run_id, ended.reason)}{still}", run_id=run.run_id)
    if (failure := ended.failure) is None:
        raise NodeLost(f"run {short(run.run_id)} ended without a reason.", run_id=run.run_id)
    exception = run.load_exception(failure.exception, frames, namespace)
    raise run_exception(followed.view, ended, failure, exception, namespace, working_directory()) from None


def _result(
    followed: Subscription, ended: RunEnded, frames: Sequence[bytes], namespace: Names, into: Names
) -> RunResult:
    run = followed.run
    returned = run.load_results(ended, frames, namespace)
    if run.spec.kind is RunKind.CALL:
        # a call returns one value per rank and sets no names
        values = [next(iter(rank.names.values()), None) for rank in returned]
    else:
        values = [rank.value for rank in returned]
        for output in run.spec.outputs:
            found = [rank.names[output.name] for rank in (returned if output.all_ranks else returned[:1])]
            into[output.name] = found if output.all_ranks else found[0]
    draws = followed.publisher.draws_displays
    return RunResult(run.spec, ended, values, run.directory, run.mirror, run.ask_tracked, view_draws=draws)
