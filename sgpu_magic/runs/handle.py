"""`Run`: the handle of a run in the background."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from sgpu_magic.client.find_run import check_prefix
from sgpu_magic.client.result import mlflow_run_id
from sgpu_magic.client.run import ClientRun
from sgpu_magic.errors import RunCancelled
from sgpu_magic.runs.follow import outcome, run_loop
from sgpu_magic.runs.follow.run_loop import Ending, OnEnd, Subscription
from sgpu_magic.runs.kernel_context import KernelContext, kernel_context
from sgpu_magic.runs.submit.submit import release
from sgpu_magic.wire.base import RunState, short
from sgpu_magic.wire.events import Event, RunEnded

R = TypeVar("R")
_EVENT_S = 0.25


class FramesLeftOut(contextlib.AbstractContextManager["FramesLeftOut"]):
    """Context manager that removes this package's frames from an exception, however often it is raised."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            error.__traceback__ = None


frames_left_out = FramesLeftOut()


class Run(Future[list[R]], Generic[R]):
    """Handle of a run: a future of the list of its results, by rank.

    `train.distributed.submit(...)` returns one; `Run.from_id("7f3a")` attaches to any run. A `Run` is a
    `concurrent.futures.Future`: pass it to `wait`, `as_completed` or `asyncio.wrap_future`, call its
    `add_done_callback`, or `await` it. Deleting it does not cancel the run. The run is cancelled when the process that
    started it ends, unless it is detached.

    Attributes:
        run_id: The run's id, 8 hexadecimal digits. The first four are enough if they are unique.
        name: The run's name.
        directory: The run's directory: logs, `cell.py`, `_air.py`, `run.json`.
    """

    def __init__(
        self, context: KernelContext, run: ClientRun, state: RunState, on_end: OnEnd | None = None, ui: str = "auto"
    ) -> None:
        """Create a handle. Use `submit` or `from_id` instead.

        Args:
            context: The kernel's context.
            run: The run, submitted or attached to.
            state: Its current state.
            on_end: Called when the run ends.
            ui: How the handle shows the run as a cell's value.
        """
        super().__init__()
        self.run_id = run.run_id
        self.name = run.spec.name
        self.directory: Path = run.directory
        self._context = context
        self._followed: Subscription = context.unseen(run)
        self._attached_state = state
        self._on_end = on_end
        self._ui = ui
        context.follower.add(self._followed, self._end, has_ended=state.is_final)

    @classmethod
    def from_id(cls, run_id: str) -> Run[Any]:
        """Attach to a run of another or an earlier process, or to one that has ended.

        The run is not cancelled when this process ends.

        Args:
            run_id: The first digits of the run's id, as listed by `%sgpu_status`.

        Raises:
            UsageError: `run_id` is not a run id.
            RunUnknown: No run matches, or more than one does.
        """
        prefix = check_prefix(run_id, "")
        context = kernel_context()
        run, state = context.attach(prefix)
        return cls(context, run, state)

    # ------------------------------------------------------------ state

    @property
    def state(self) -> RunState:
        """The current state: `RunState.QUEUED`, `RUNNING`, `SUCCEEDED` ..."""
        view = self._followed.view
        # until the first events are folded, use the state that the pool reported
        return view.state if view.version else self._attached_state

    @property
    def mlflow_run_id(self) -> str:
        """The run's id in MLflow; `""` until MLflow has the run, and if the run is not tracked.

        Reading it creates the MLflow run, which `track = "auto"` does not do for every run: read it again a second
        later.
        """
        tracked = self._followed.view.tracked
        found = tracked.mlflow_run_id if tracked is not None else mlflow_run_id(self.directory)
        if not found and self._followed.run.ask_tracked is not None:
            self._followed.run.ask_tracked()
        return found

    def running(self) -> bool:
        """Return whether the run has its devices and has not ended."""
        return not self.done() and self.state is not RunState.QUEUED

    def cancel(self, reason: str = "Run.cancel() was called") -> bool:
        """Ask the pool to stop the run. It is cancelled once `cancelled()` is true, after about a second.

        Args:
            reason: Shown in the run's view.

        Returns:
            False if the run had already ended.
        """
        if self.done():
            return False
        self._followed.run.cancel(reason)
        return True

    def detach(self) -> None:
        """Keep the run going when this process ends; `Run.from_id` attaches to it again, with its results.

        Raises:
            RunUnknown: The run has already ended.
        """
        pool = self._context.pool_of(self._followed.run)
        pool.detach(self.run_id)
        pool.give_payload_up(self.run_id)
        self._context.detached.add(self.run_id)

    # ------------------------------------------------------------ results

    def result(self, timeout: float | None = None) -> list[R]:
        """Wait for the run to end and return the list of results, by rank.

        Args:
            timeout: Maximum time to wait in seconds; the run continues afterwards. None waits without limit.

        Raises:
            TimeoutError: The run has not ended within `timeout`.
            CancelledError: The run was cancelled.
            Exception: The exception of the rank that failed first, as for `train.distributed()`.
        """
        with frames_left_out:
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the run to end and return the exception that `result` raises, None if it raises none.

        Unlike that of other futures, this method returns the `CancelledError` of a cancelled run.

        Args:
            timeout: As for `result`.

        Raises:
            TimeoutError: The run has not ended within `timeout`.
        """
        try:
            return super().exception(timeout)
        except CancelledError as error:
            return error

    def logs(self, rank: int | None = None) -> str:
        """Return what the ranks have printed so far.

        Args:
            rank: Return this rank's output unchanged. None returns the output of all ranks, one rank after the other,
                each line prefixed with its rank.

        Raises:
            IndexError: The run has no such rank.
        """
        ranks = self._followed.run.spec.rank_numbers
        if rank is not None:
            if rank not in ranks:
                raise IndexError(f"run {short(self.run_id)} has ranks {ranks[0]} to {ranks[-1]}, not {rank}")
            return self._log(rank)
        return "".join(f"[{number}] {line}\n" for number in ranks for line in self._log(number).splitlines())

    def events(self) -> Iterator[Event]:
        """Iterate over the run's events from the first to the last, as they happen.

        Each `Event` has `seq`, `at` (seconds since the epoch) and `body`, one of the records of
        `sgpu_magic.wire.events`: `StateChanged`, `OutputWritten`, `RankFailed`, `RunEnded` ...

        Raises:
            RunUnknown: The pool no longer has the run.
        """
        run, state = self._context.pool_of(self._followed.run).attach(self.run_id)
        followed = self._context.unseen(run)
        received_at = time.monotonic()
        try:
            while True:
                # once the link is lost, all events that came over it are in the queue
                is_lost = run.is_lost
                if (item := run.next_event(0 if is_lost else _EVENT_S)) is not None:
                    received_at = time.monotonic()
                    yield item[0]
                    if isinstance(item[0].body, RunEnded):
                        return
                elif is_lost:
                    if run_loop.find_again(followed) is not None:
                        return
                elif state.is_final and time.monotonic() - received_at > run_loop.HISTORY_PATIENCE_S:
                    return
        finally:
            run.close()

    def show(self, ui: str = "auto") -> None:
        """Show the run as `%sgpu_status RUN` does: its live view in a notebook, otherwise its output until it ends.

        Args:
            ui: `"auto"`, `"widget"`, `"text"` or `"none"`.
        """
        context = self._context
        run, state = context.pool_of(self._followed.run).attach(self.run_id)
        if context.is_notebook:
            context.open_view(run, state, ui)
            return
        followed = context.followed(run, ui, error_follows=False)
        try:
            outcome.show(followed, state, threading.Event())
        except KeyboardInterrupt:
            # the interrupt only stops following the run
            outcome.replay(followed, RunState.RUNNING)
        finally:
            run.close()

    def __await__(self) -> Generator[Any, None, list[R]]:
        """Wait for the run to end without blocking the event loop. Cancelling the task cancels the run.

        Raises:
            asyncio.CancelledError: The run was cancelled.
            Exception: As for `result`.
        """
        return self._awaited().__await__()

    def __repr__(self) -> str:
        return f"<Run {short(self.run_id)} {self.name}: {self.state.value}>"

    def _ipython_display_(self) -> None:
        """Show the run when a cell's last line evaluates to it."""
        if self._context.is_notebook and self._ui != "none":
            self.show(self._ui)
        else:
            print(repr(self))  # noqa: T201  what a terminal shows for a value

    def _display_(self) -> object:
        """Return what marimo shows for the run as a cell's value: its live view."""
        return self._context.widget_of(*self._context.pool_of(self._followed.run).attach(self.run_id))

    # ------------------------------------------------------------ internals

    async def _awaited(self) -> list[R]:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def on_done(_: Future[list[R]]) -> None:
            # the loop may have been closed meanwhile
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: ended.done() or ended.set_result(None))

        self.add_done_callback(on_done)
        try:
            await ended
        except asyncio.CancelledError:
            self.cancel("its task was cancelled")
            raise
        if self.cancelled():
            raise asyncio.CancelledError(self._why)
        return self.result(0)

    _why = ""

    def _end(self, ending: Ending | None) -> None:
        """Set the result or the exception. Runs in the follower's thread."""
        if ending is None:
            self._be_cancelled(f"run {short(self.run_id)} is no longer followed")
            return
        run, context = self._followed.run, self._context
        error: BaseException | None = None
        values: list[object] = []
        try:
            values = outcome.deliver(self._followed, ending, context.namespace).values
        except BaseException as raised:  # noqa: BLE001  whatever it is, it belongs to who asks for the result
            error = raised
        try:
            # clean up before setting the result: waiting callers resume at once, perhaps with the next call
            if self._on_end is not None:
                self._on_end(self._followed.view)
            if run.owned:
                release(context.pool_of(run), run)
            else:
                run.close()
        finally:
            if isinstance(error, RunCancelled):
                self._be_cancelled(error.message)
            elif error is not None:
                self.set_exception(error)
            else:
                self.set_result(cast("list[R]", values))

    def _be_cancelled(self, why: str) -> None:
        self._why = why
        super().cancel()
        # notifies `concurrent.futures.wait` and `as_completed`
        self.set_running_or_notify_cancel()

    def _log(self, rank: int) -> str:
        if self._followed.run.mirror is not None:
            self._followed.run.mirror.follow(f"rank-{rank}.log")
        with contextlib.suppress(FileNotFoundError):
            return (self.directory / f"rank-{rank}.log").read_text(errors="replace")
        return ""
