"""The lifetime of a session: it waits for devices, connects and ends, and callers can wait for that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from html import escape
from typing import Any, Self

from msgspec.structs import replace

from sgpu_magic.client.pool import Pool
from sgpu_magic.errors import SessionError
from sgpu_magic.formatting import count_of, format_ranks
from sgpu_magic.options.values import Duration, duration_s
from sgpu_magic.runs.follow import outcome
from sgpu_magic.runs.follow.run_loop import Subscription
from sgpu_magic.runs.kernel_context import KernelContext
from sgpu_magic.runs.notebook import cell_number
from sgpu_magic.runs.notices import Background
from sgpu_magic.runs.submit.target import ResolvedTarget
from sgpu_magic.views.run_notes import SessionState, finishing_text
from sgpu_magic.wire.base import RunState, short
from sgpu_magic.wire.devices import Placement

_CLOSE_PATIENCE_S = 10.0
# a dead pool service is replaced within about 1 s
_ADOPTION_PATIENCE_S = 20.0


class SessionLifecycle:
    """A session from its submission to its end, followed by a background thread.

    Args:
        context: The kernel's context.
        followed: The session's own run.

    Attributes:
        spec: The specification that was submitted.
        name: The session's name.
        run_id: The id of the session's own run, for `sgpu logs` and `%sgpu_status`.
        ranks: Number of ranks.
        variables: Environment variables set on the ranks, in addition to this process's environment.
    """

    def __init__(self, context: KernelContext, followed: Subscription, variables: Mapping[str, str]) -> None:
        spec = followed.run.spec
        self.context = context
        self.spec = spec
        self.name = spec.name
        self.run_id = spec.run_id
        self.placement: Placement = spec.placement
        self.ranks = spec.placement.ranks
        self.variables = dict(variables)
        self.shown_in: object = None
        self.end_reported = False
        self._view = followed.view
        self._run = followed.run
        self._moved = threading.Condition()
        # for coroutines: resolved when the session is connected or has ended
        self._decided = Future[None]()
        followed = replace(followed, on_event=self._on_event)
        self._follower = Background("sgpu-session", lambda stopped: outcome.show(followed, RunState.QUEUED, stopped))

    # ------------------------------------------------------------ properties

    @property
    def pool(self) -> Pool:
        """The pool that the session runs in."""
        return self.context.pool_of(self._run)

    def lends(self, ranks: int | None) -> ResolvedTarget:
        """Return the place for `ranks` new processes on the session's devices; None means one per rank."""
        return ResolvedTarget(self.pool, replace(self.placement, ranks=ranks or self.ranks))

    @property
    def device_type(self) -> str:
        """The type of the session's devices: the requested type while it waits, then the granted one."""
        lease = self._view.lease
        return lease.device_type if lease is not None else self.placement.device_type

    @property
    def state(self) -> str:
        """The session's state, in words."""
        view = self._view
        match view.state:
            case RunState.QUEUED:
                return f"waits for devices: {view.waiting_for}" if view.waiting_for else "waits for devices"
            case RunState.PREPARING | RunState.STARTING:
                return "starting"
            case RunState.RUNNING:
                dead = self.dead
                return f"connected, {format_ranks(dead)} dead" if dead else "connected"
            case RunState.CANCELLING:
                finishing = finishing_text(self._view.finishing)
                return f"ending: {finishing}" if finishing else "ending"
            case _:
                return f"ended: {self.ending}"

    @property
    def is_connected(self) -> bool:
        """Whether the session's ranks are ready."""
        return self._view.state is RunState.RUNNING

    @property
    def is_idle(self) -> bool:
        """Whether the session's ranks are ready and no cell is running on them."""
        return self.is_connected and not self._reported_state.running

    @property
    def has_ended(self) -> bool:
        """Whether the session has ended."""
        return self._view.state.is_final or bool(self._view.left)

    @property
    def ending(self) -> str:
        """Who ended the session and why; `""` while it has not ended."""
        if (ended := self._view.ended) is None:
            return self._view.left
        if ended.failure is not None:
            return ended.failure.message.rstrip(".")
        return (ended.reason or "no reason was given").rstrip(".")

    @property
    def dead(self) -> tuple[int, ...]:
        """The ranks that are dead and need a restart."""
        return self._reported_state.dead

    @property
    def cells(self) -> int:
        """Number of cells that have run in the session so far, including running ones."""
        return self._reported_state.cells

    @property
    def run_state(self) -> RunState:
        """The state of the session's own run."""
        return self._view.state

    def wait_for_the_dead(self, timeout_s: float) -> tuple[int, ...]:
        """Wait until a rank is known to be dead and return the dead ranks; empty after `timeout_s` seconds."""
        with self._moved:
            self._moved.wait_for(lambda: self.dead or self.has_ended, timeout_s)
        return self.dead

    @property
    def _reported_state(self) -> SessionState:
        return self._view.session or SessionState()

    def __repr__(self) -> str:
        kind = self.device_type if self.device_type != "any" else "devices of any type"
        count = count_of(self.ranks, "rank")
        return f"<Session {self.name}: {count} on {kind}, {self.state}, run {short(self.run_id)}>"

    def _ipython_display_(self) -> None:
        """Show nothing if the session's view is already below the cell; otherwise show it like any value."""
        shown, self.shown_in = self.shown_in, None
        if shown is None or shown != cell_number(self.context.shell):
            # IPython then uses the other representations
            raise NotImplementedError

    def _repr_html_(self) -> str:
        return f"<code>{escape(repr(self))}</code>"

    # ------------------------------------------------------------ waiting

    def wait(self, timeout: Duration | None = None) -> Self:
        """Wait until the session's ranks are ready.

        Args:
            timeout: Maximum time to wait: seconds, a text such as `"5m"` or a `timedelta`. Default: no limit.

        Raises:
            SessionError: The session has ended.
            TimeoutError: The session is not connected within `timeout`; it continues.
        """
        seconds = None if timeout is None else duration_s("timeout", timeout)
        with self._moved:
            if not self._moved.wait_for(self._is_decided, seconds):
                raise TimeoutError(
                    f"session {self.name} is not connected after {seconds:g} s: {self.state}. It keeps trying: wait "
                    "again, or close() it."
                )
        return self.checked()

    def __await__(self) -> Generator[Any, None, Self]:
        return self._connected().__await__()

    async def _connected(self) -> Self:
        if not self._is_decided():
            await asyncio.shield(asyncio.wrap_future(self._decided))
        return self.checked()

    def checked(self) -> Self:
        """Return the session itself if it can run a cell, now or once its ranks are ready.

        Raises:
            SessionError: The session has ended or is ending.
        """
        if self.has_ended or self._view.state is RunState.CANCELLING:
            why = f": {self.ending}" if self.ending else ""
            raise SessionError(
                f"session {self.name} has ended{why}. Its ranks' variables are lost. Start another with %sgpu_connect "
                "or sgpu_magic.connect(...)."
            )
        if self._run.link.lost.is_set():
            # its pool service died; the next one takes the session over
            with self._moved:
                self._moved.wait_for(lambda: self.has_ended or not self._run.link.lost.is_set(), _ADOPTION_PATIENCE_S)
        return self

    def _is_decided(self) -> bool:
        return self.is_connected or self.has_ended

    def _on_event(self) -> None:
        """Wake waiters after an event. Runs in the follower's thread."""
        with self._moved:
            self._moved.notify_all()
        if self._is_decided() and not self._decided.done():
            self._decided.set_result(None)

    # ------------------------------------------------------------ ending

    def close(self) -> None:
        """End the session: cancel running cells, stop the ranks and free the devices.

        The ranks first finish what cells have started, such as threads (the setting `finish_timeout_s`). An interrupt
        ends the waiting, not the ranks' work.
        """
        self.end("it was disconnected")
        while not self.wait_for_end(_CLOSE_PATIENCE_S) and self._view.finishing:
            pass
        self._release()

    def end(self, reason: str) -> None:
        """Request the session's end without waiting for it."""
        if not self.has_ended:
            self._run.cancel(reason)

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait until the session has ended; return False if it has not after `timeout_s` seconds."""
        with self._moved:
            return self._moved.wait_for(lambda: self.has_ended, timeout_s)

    def _release(self) -> None:
        self.end_reported = True
        self._follower.stop()
        if self.has_ended:
            self.pool.run_over(self.run_id)
        self._run.close()

    def __enter__(self) -> Self:
        try:
            return self.wait()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        try:
            return await self._connected()
        except BaseException:
            self.end("it was disconnected")
            raise

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)
