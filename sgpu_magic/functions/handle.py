"""`Run`: a run that goes on while the program does something else."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from sgpu_magic.client.result import mlflow_run_id
from sgpu_magic.client.run import Run as PoolRun
from sgpu_magic.errors import RunCancelled, UsageError
from sgpu_magic.runs.follow import outcome, run_loop
from sgpu_magic.runs.follow.run_loop import Ending, Followed
from sgpu_magic.runs.submit.submit import let_go
from sgpu_magic.runs.workplace import Workplace, workplace
from sgpu_magic.views.fold import RunView
from sgpu_magic.wire.events import Event, RunEnded
from sgpu_magic.wire.record import short
from sgpu_magic.wire.states import RunState

R = TypeVar("R")
_RUN = re.compile(r"[0-9a-f]{1,8}")
_EVENT_S = 0.25


class FramesLeftOut:
    """Around a call into this package: what it raises begins with the caller's frame, however often it is raised."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            error.__traceback__ = None


frames_left_out = FramesLeftOut()


class Run(Future[list[R]], Generic[R]):
    """A run of a function, or any other run that was picked up: a future of the list of its results, by rank.

    `train.distributed.submit(...)` makes one, `Run.from_id("7f3a")` picks one up. It is a
    `concurrent.futures.Future`, so `wait`, `as_completed`, `add_done_callback` and `asyncio.wrap_future` take it, and
    it can be awaited. Letting it go does not cancel the run; the end of the process that started it does, unless the
    run is detached.

    Attributes:
        run_id: The run's id, 8 digits. Its first four are enough wherever they are unique.
        name: The run's name.
        directory: The run's directory: logs, `cell.py`, `_air.py`, `run.json`.
    """

    def __init__(
        self, place: Workplace, run: PoolRun, state: RunState, settle: Callable[[RunView], None] | None = None
    ) -> None:
        """Not to be called: `submit` and `from_id` make them.

        Args:
            place: This process's.
            run: Submitted or attached to.
            state: Its state now.
            settle: Called when it is over.
        """
        super().__init__()
        self.run_id = run.run_id
        self.name = run.spec.name
        self.directory: Path = run.directory
        self._place = place
        self._followed: Followed = place.unseen(run)
        self._attached_state = state
        self._settle = settle
        place.follower.add(self._followed, self._end, has_ended=state.is_final)

    @classmethod
    def from_id(cls, run_id: str) -> Run[Any]:
        """Pick a run up: one of another process, of an earlier one, or one that has ended.

        A run that was picked up does not end with this process.

        Args:
            run_id: The first digits of its id, as `%sgpu_status` lists it.

        Raises:
            UsageError: That is no id.
            RunUnknown: There is no such run, or more than one.
        """
        if _RUN.fullmatch(run_id.lower()) is None:
            raise UsageError(f"{run_id[:40]!r} is no run: give the first digits of its id (0-9, a-f).")
        place = workplace()
        run, state = place.attach(run_id.lower())
        return cls(place, run, state)

    # ------------------------------------------------------------ how it stands

    @property
    def state(self) -> RunState:
        """Where it stands now: `RunState.QUEUED`, `RUNNING`, `SUCCEEDED` ..."""
        view = self._followed.view
        # until its first events are folded, what the pool has said counts
        return view.state if view.version else self._attached_state

    @property
    def mlflow_run_id(self) -> str:
        """The run's id in MLflow; "" until it is there, and where it is not tracked.

        To ask makes it an MLflow run, which `track = "auto"` does not make of every run: ask again a second later.
        """
        tracked = self._followed.view.tracked
        found = tracked.mlflow_run_id if tracked is not None else mlflow_run_id(self.directory)
        if not found and self._followed.run.ask_tracked is not None:
            self._followed.run.ask_tracked()
        return found

    def running(self) -> bool:
        """Whether it has its devices and has not ended."""
        return not self.done() and self.state is not RunState.QUEUED

    def cancel(self, reason: str = "Run.cancel() was called") -> bool:
        """Ask the pool to stop it. It has been cancelled when `cancelled()` is true, in a second or so.

        Args:
            reason: Shown in the run's view.

        Returns:
            False when it had ended already.
        """
        if self.done():
            return False
        self._followed.run.cancel(reason)
        return True

    def detach(self) -> None:
        """Let it go on when this process ends; `Run.from_id` picks it up again, with its results.

        Raises:
            RunUnknown: It does not go on any more.
        """
        pool = self._place.pool_of(self._followed.run)
        pool.detach(self.run_id)
        pool.run_left(self.run_id)
        self._place.detached.add(self.run_id)

    # ------------------------------------------------------------ what comes of it

    def result(self, timeout: float | None = None) -> list[R]:
        """Wait for its end and return what the ranks returned, by rank.

        Args:
            timeout: Longest time to wait in seconds; the run goes on afterwards. None waits as long as it takes.

        Raises:
            TimeoutError: It has not ended in that time.
            CancelledError: It was cancelled.
            Exception: What the culprit rank raised, as from `train.distributed()`.
        """
        with frames_left_out:
            return super().result(timeout)

    def logs(self, rank: int | None = None) -> str:
        """Return what its ranks have printed so far.

        Args:
            rank: One rank's text as it is. None is all of them, one after the other, each line with its rank.

        Raises:
            IndexError: It has no such rank.
        """
        ranks = self._followed.run.spec.rank_numbers
        if rank is not None:
            if rank not in ranks:
                raise IndexError(f"run {short(self.run_id)} has ranks {ranks[0]} to {ranks[-1]}, not {rank}")
            return self._log(rank)
        return "".join(f"[{number}] {line}\n" for number in ranks for line in self._log(number).splitlines())

    def events(self) -> Iterator[Event]:
        """Iterate over what has happened, from the run's first event to its last, as it happens.

        Each `Event` has `seq`, `at` (seconds since the epoch) and `body`, one of the records of
        `sgpu_magic.wire.events`: `StateChanged`, `OutputWritten`, `RankFailed`, `RunEnded` ...

        Raises:
            RunUnknown: The pool has forgotten it.
        """
        run, state = self._place.pool_of(self._followed.run).attach(self.run_id)
        followed = self._place.unseen(run)
        heard_at = time.monotonic()
        try:
            while True:
                item = run.next_event(_EVENT_S)
                if item is not None:
                    heard_at = time.monotonic()
                    yield item[0]
                    if isinstance(item[0].body, RunEnded):
                        return
                elif run.link_lost:
                    while (item := run.next_event(0)) is not None:
                        yield item[0]
                    if run_loop.find_again(followed) is not None:
                        return
                elif state.is_final and time.monotonic() - heard_at > run_loop.HISTORY_PATIENCE_S:
                    return
        finally:
            run.close()

    def show(self, ui: str = "auto") -> None:
        """Show it as `%sgpu_status RUN` does: its live view in a notebook; else its lines, until it ends.

        Args:
            ui: `"auto"`, `"widget"`, `"text"` or `"none"`.
        """
        place = self._place
        run, state = place.pool_of(self._followed.run).attach(self.run_id)
        if place.is_notebook:
            place.open_view(run, state, ui)
            return
        followed = place.followed(run, ui, error_follows=False)
        try:
            outcome.show(followed, state, threading.Event())
        except KeyboardInterrupt:
            # only the watching is over
            outcome.replay(followed, RunState.RUNNING)
        finally:
            run.close()

    def __await__(self) -> Generator[Any, None, list[R]]:
        """Wait for its end without blocking the event loop. Cancelling the task cancels the run.

        Raises:
            asyncio.CancelledError: The run was cancelled.
            Exception: As `result`.
        """
        return self._awaited().__await__()

    def __repr__(self) -> str:
        return f"<Run {short(self.run_id)} {self.name}: {self.state.value}>"

    def _ipython_display_(self) -> None:
        """A cell's last line that is a run shows the run."""
        if self._place.is_notebook:
            self.show()
        else:
            print(repr(self))  # noqa: T201  what a terminal shows for a value

    # ------------------------------------------------------------ within

    async def _awaited(self) -> list[R]:
        loop = asyncio.get_running_loop()
        over = loop.create_future()

        def tell(_: Future[list[R]]) -> None:
            # the loop may have been closed meanwhile
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: over.done() or over.set_result(None))

        self.add_done_callback(tell)
        try:
            await over
        except asyncio.CancelledError:
            self.cancel("its task was cancelled")
            raise
        if self.cancelled():
            raise asyncio.CancelledError(self._why)
        return self.result(0)

    _why = ""

    def _end(self, ending: Ending | None) -> None:
        """Called by the follower's thread."""
        if ending is None:
            self._be_cancelled(f"run {short(self.run_id)} is followed no further")
            return
        run, place = self._followed.run, self._place
        error: BaseException | None = None
        values: list[object] = []
        try:
            values = outcome.deliver(run, self._followed.view, *ending, place.namespace).values
        except BaseException as raised:  # noqa: BLE001  whatever it is, it belongs to who asks for the result
            error = raised
        try:
            # whoever waits goes on at once, perhaps with the next call: all has to be in order before
            if self._settle is not None:
                self._settle(self._followed.view)
            if run.owned:
                let_go(place.pool_of(run), run)
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
        # those who wait for several futures are told by this
        self.set_running_or_notify_cancel()

    def _log(self, rank: int) -> str:
        if self._followed.run.mirror is not None:
            self._followed.run.mirror.follow(f"rank-{rank}.log")
        try:
            return (self.directory / f"rank-{rank}.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""
