"""From a run to its end: fold its events and show them, whatever becomes of the pool service meanwhile."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sgpu_magic.client.pool import Pool
from sgpu_magic.client.result import RunResult
from sgpu_magic.client.run import Run
from sgpu_magic.errors import (
    CapacityError,
    KeyRefused,
    PoolError,
    PoolVersionError,
    RunCancelled,
    RunUnknown,
    SgpuError,
)
from sgpu_magic.runs.follow.outcome import deliver
from sgpu_magic.runs.follow.restart import RestartWatch
from sgpu_magic.runs.follow.stop import Ending, Interrupts, after_interrupt, cancel, last_words, not_yet_stopped
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.publisher import Publisher
from sgpu_magic.views.units import format_span
from sgpu_magic.wire.events import Detached, Event, RunEnded
from sgpu_magic.wire.failures import Failure
from sgpu_magic.wire.ids import short
from sgpu_magic.wire.run import RunSpec
from sgpu_magic.wire.states import FailureKind, RunState

_TICK_S = 0.05
# nothing comes: only the clock moves, and every wake-up is taken from the ranks
_IDLE_TICK_S = 0.25
_LIVELY_S = 0.5
# a pool service that died is looked for, or started, for so long
_FIND_PATIENCE_S = 20.0
_FIND_PAUSE_S = 0.1
# a front end's restart interrupts first and asks for the shutdown next
_RESTART_PATIENCE_S = 0.3
# the kept events of a run that has ended come at once
HISTORY_PATIENCE_S = 5.0
# nothing more comes of a run that goes on: its kept events have all been sent
_CAUGHT_UP_S = 0.3
_BATCH = 64


@dataclass(frozen=True, slots=True)
class Followed:
    """A run, where it is shown, and who has it.

    Args:
        run: The run.
        view: Folded from its events.
        publisher: Shows the view.
        pool: Finds the run's next pool service when one dies.
        heard: Called after each event.
    """

    run: Run
    view: RunView
    publisher: Publisher
    pool: Pool
    heard: Callable[[], None] | None = None

    def look_at_link(self) -> None:
        """Show that the pool, on another machine, is not heard any more, or is heard again."""
        silent_s = self.run.silent_s
        if silent_s or self.view.silence:
            # told anew when it has lasted twice as long
            told_s = 10 * 2 ** int(math.log2(max(silent_s, 10.0) / 10))
            sentence = (
                f"the link to {self.run.pool_title} has been silent for more than {format_span(told_s)}; the run goes "
                "on there, and the view catches up when the link is back"
            )
            self.view.not_heard(sentence if silent_s else "")

    def apply(self, event: Event, frames: Sequence[bytes]) -> None:
        """Fold an event into what is shown."""
        self.view.apply(event, frames)
        if isinstance(event.body, RunEnded):
            self.pool.heard_end(event.run_id, event.body.state, event.at)
        self.publisher.applied(event)
        if self.heard is not None:
            self.heard()


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
        ending = _follow(followed, until_detached=True)
        if ending is None:
            leave(followed)
            return None
    except KeyboardInterrupt:
        try:
            if not run.spec.session and restarts is not None and restarts.detaches and _is_restart(restarts):
                leave(followed)
                return None
            cancel(run)
        except KeyboardInterrupt:
            # the stop button was pressed twice in one moment
            cancel(run)
        ending = after_interrupt(followed, interrupts)
        if restarts is not None and restarts.asked.is_set():
            # a restart interrupts first; who reads the output afterwards has another kernel
            run_id = short(run.run_id)
            followed.view.remark(f"the kernel was restarted; %sgpu_attach {run_id} shows run {run_id} again")
    followed.publisher.tick(time.monotonic(), final=True)
    if ending is None:
        raise RunCancelled(not_yet_stopped(run), run_id=run.run_id)
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
        ending = _follow(followed, until_detached=False, has_ended=state.is_final)
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
        ending = _follow(followed, until_detached=False, has_ended=state.is_final, stopped=stopped)
    except SgpuError as error:
        followed.view.leave(error.message)
        ending = None
    if ending is None and not followed.view.left:
        _stop_watching(followed)
    followed.publisher.tick(time.monotonic(), final=True)


def replay(followed: Followed, state: RunState) -> None:
    """Show once what a run has done until now; arguments as for `show`."""
    if state.is_final:
        _follow(followed, until_detached=False, has_ended=True)
    else:
        until = time.monotonic() + HISTORY_PATIENCE_S
        while time.monotonic() < until and (item := followed.run.next_event(_CAUGHT_UP_S)) is not None:
            followed.apply(*item)
        if not followed.view.is_final:
            _stop_watching(followed)
    followed.publisher.tick(time.monotonic(), final=True)


def advance(followed: Followed) -> Ending | None:
    """Take the events that are there, and go on with the run's next pool service when its own has died.

    For one thread that follows many runs; it waits only while a pool service is looked for.

    Returns:
        The run's last word, None while it goes on.
    """
    run = followed.run
    while (item := run.next_event(0)) is not None:
        followed.apply(*item)
        if isinstance(item[0].body, RunEnded):
            return item[0].body, item[1]
    followed.look_at_link()
    return (last_words(followed) or find_again(followed)) if run.link_lost else None


def without_an_end(followed: Followed) -> Ending:
    """Return the last word of a run that has ended, when its own last word was not kept."""
    run = followed.run
    where = f"is in {run.directory}" if run.mirror is None else f"comes with `sgpu logs {short(run.run_id)}`"
    message = f"its last events were not kept; what its ranks printed {where}"
    return _lost(followed, message, FailureKind.NODE_LOST)


def _stop_watching(followed: Followed) -> None:
    run = short(followed.run.run_id)
    followed.view.leave(f"run {run} goes on; %sgpu_status {run} and %sgpu_attach {run} show it again")


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


def _is_restart(restarts: RestartWatch) -> bool:
    try:
        return restarts.asked.wait(_RESTART_PATIENCE_S)
    except KeyboardInterrupt:
        return False


def _follow(
    followed: Followed, *, until_detached: bool, has_ended: bool = False, stopped: threading.Event | None = None
) -> Ending | None:
    """Return the run's last word, None when it was detached and `until_detached`, or when `stopped` was set."""
    run = followed.run
    heard_at = time.monotonic()
    while stopped is None or not stopped.is_set():
        patience = _TICK_S if time.monotonic() - heard_at < _LIVELY_S else _IDLE_TICK_S
        for turn in range(_BATCH):
            item = run.next_event(0 if turn else patience)
            if item is None:
                break
            heard_at = time.monotonic()
            followed.apply(*item)
            body = item[0].body
            if isinstance(body, RunEnded):
                return body, item[1]
            if until_detached and isinstance(body, Detached):
                return None
        if run.link_lost:
            ending = last_words(followed) or find_again(followed)
            if ending is not None:
                return ending
            heard_at = time.monotonic()
        followed.look_at_link()
        if has_ended and time.monotonic() - heard_at > HISTORY_PATIENCE_S:
            return without_an_end(followed)
        followed.publisher.tick(time.monotonic())
    return None


def find_again(followed: Followed) -> Ending | None:
    """Go on with the next pool service when the run's has died; return the run's end when that is not possible."""
    run = followed.run
    died = f"{run.pool_title} ended while the run was going on"
    deadline = time.monotonic() + _FIND_PATIENCE_S
    while True:
        try:
            followed.pool.find_again(run)
            return None
        except (RunUnknown, PoolVersionError) as error:
            message = f"{died}, and the run with it: {error.message.rstrip('.')}. Run the cell again"
            return _lost(followed, message, FailureKind.NODE_LOST)
        except KeyRefused as error:
            return _lost(
                followed, f"this notebook can't follow the run any more: {error.message}", FailureKind.NODE_LOST
            )
        except PoolError as error:
            if time.monotonic() > deadline:
                message = f"{died}, and no other could be reached: {error.message.rstrip('.')}"
                return _lost(followed, message, FailureKind.NODE_LOST)
        except SgpuError as error:
            # it was still queued, and the next service does not take it
            kind = FailureKind.CAPACITY if isinstance(error, CapacityError) else FailureKind.NODE_LOST
            return _lost(followed, f"{died}; submitted again, it was refused: {error.message}", kind)
        followed.publisher.tick(time.monotonic())
        time.sleep(_FIND_PAUSE_S)


def _lost(followed: Followed, message: str, kind: FailureKind) -> Ending:
    run, view = followed.run, followed.view
    followed.pool.run_left(run.run_id)
    failure = Failure(kind=kind, message=message, at=time.time())
    elapsed = view.elapsed_s()
    ended = RunEnded(state=RunState.FAILED, failure=failure, running_s=elapsed, total_s=elapsed)
    followed.apply(Event(run_id=run.run_id, seq=run.last_seq + 1, at=time.time(), body=ended), ())
    return ended, ()
