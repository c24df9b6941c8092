"""A cell that was interrupted waits for its ranks to stop, but not for long; a kernel that is restarted says so.

A run of its own       its ranks are gone soon, whatever they do: 2.5 s are waited
A cell in a session    its ranks stay and have to come back: 2.8 s are waited. A second interrupt within 5 s of the
                       first kills those that do not stop, also when the next cell waits for them by then
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

from sgpu_magic.client.pools import Pools
from sgpu_magic.client.run import Run
from sgpu_magic.runs.follow.run_loop import Ending, Followed, follow
from sgpu_magic.wire.ids import short

# an interrupted cell is free after this whatever the ranks do (promise: 3 s)
_PATIENCE_S = 2.5
# the agent says after 2 s which ranks of a session do not stop
_SESSION_PATIENCE_S = 2.8
# killed ranks are gone in a moment
_KILL_PATIENCE_S = 1.0
# a second interrupt so soon means the same ranks
_AGAIN_S = 5.0
_DETACH_TIMEOUT_S = 1.0
# a front end's restart interrupts first and asks for the shutdown next
_RESTART_PATIENCE_S = 0.3
_SHUTDOWN = "shutdown_request"
_REASON = "it was interrupted"
_AGAIN = "it was interrupted again"


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


def cancel(run: Run) -> None:
    """Cancel, also when the stop button is pressed again meanwhile: the run would go on with nobody there."""
    while True:
        try:
            run.cancel(_REASON)
            return
        except KeyboardInterrupt:
            continue


def after_interrupt(followed: Followed, interrupts: Interrupts | None) -> Ending | None:
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


def not_yet_stopped(run: Run) -> str:
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


# ---------------------------------------------------------------- a kernel's restart


def watch_restarts(kernel: Any, pools: Pools, *, detaches: bool) -> RestartWatch | None:
    """Return a watch over the kernel's restarts, None where there is no kernel or it does not tell."""
    if _SHUTDOWN not in getattr(kernel, "control_handlers", {}):
        return None
    return RestartWatch(kernel, pools, detaches=detaches)


class RestartWatch:
    """Stands before the kernel's own handling of a shutdown request.

    Args:
        kernel: The ipykernel.
        pools: Have the runs.
        detaches: Detach them before the kernel ends.

    Attributes:
        asked: Set when a restart has been asked for.
        before: Called when one has been asked for, in the thread of the control channel; takes a moment at most.
    """

    def __init__(self, kernel: Any, pools: Pools, *, detaches: bool) -> None:
        self.detaches = detaches
        self.asked = threading.Event()
        self.before: Callable[[], None] | None = None
        self._kernel = kernel
        self._pools = pools
        self._original = kernel.control_handlers[_SHUTDOWN]
        kernel.control_handlers[_SHUTDOWN] = self._shut_down

    def remove(self) -> None:
        """Give the kernel its own handler back."""
        if self._kernel.control_handlers.get(_SHUTDOWN) == self._shut_down:
            self._kernel.control_handlers[_SHUTDOWN] = self._original

    def is_asked(self) -> bool:
        """Whether an interrupt is the beginning of a restart that detaches its runs; waits a moment for that."""
        try:
            return self.detaches and self.asked.wait(_RESTART_PATIENCE_S)
        except KeyboardInterrupt:
            return False

    async def _shut_down(self, stream: Any, ident: Any, parent: Any) -> None:
        """Runs in the thread of the control channel, while the main thread follows a run or does something else."""
        if parent["content"].get("restart"):
            self.asked.set()
            if self.before is not None:
                self.before()
            if self.detaches:
                self._pools.detach_all(_DETACH_TIMEOUT_S)
        handled = self._original(stream, ident, parent)
        if inspect.isawaitable(handled):
            await handled
