"""Runs a sweep: one run per item, as many at a time as the pool can hold."""

from __future__ import annotations

import itertools
import queue
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar, cast

import msgspec
from msgspec.structs import replace

from sgpu_magic.client.pool_choosing import KINDS
from sgpu_magic.client.pools_file import LOCAL
from sgpu_magic.errors import KeyRefused, PoolError, PoolVersionError, RunCancelled, SerializationError
from sgpu_magic.functions.launch import prepare, submitted
from sgpu_magic.options.option_records import CallOptions
from sgpu_magic.payload.call import FunctionCall, name_of
from sgpu_magic.runs.handle import Run
from sgpu_magic.runs.kernel_context import KernelContext
from sgpu_magic.views.cell_outputs import SweepProgress, SweepView, failure_line
from sgpu_magic.wire.base import RunState, short

T = TypeVar("T")
R = TypeVar("R")
_TICK_S = 0.1
# runs queued beyond those that have devices, so that a freed device gets the next one at once
_AHEAD = 2
# how long an unreachable local pool is retried; a remote one is retried for the setting `link_timeout_s`
_LOCAL_PATIENCE_S = 60.0
_TRY_AGAIN_S = 1.0
# an interrupted sweep returns after this, whatever its ranks do
_CANCEL_PATIENCE_S = 2.5


class Task(msgspec.Struct, Generic[T, R]):
    """One item of a sweep, with its run and its outcome."""

    index: int
    item: T
    run: Run[R] | None = None
    value: R | None = None
    error: BaseException | None = None

    def outcome(self, return_exceptions: bool) -> R:
        if self.error is None:
            return cast("R", self.value)
        if return_exceptions:
            return cast("R", self.error)
        raise self.error

    def store_result(self, run: Run[R]) -> None:
        """Store the result or the exception of the item's run."""
        try:
            self.value = run.result(0)[0]
        except CancelledError:
            self.error = CancelledError(f"run {short(run.run_id)} was cancelled")
        except Exception as error:  # noqa: BLE001  what user code raised, kept beside the results
            self.error = error


class Sweeping(Generic[T, R]):
    """A sweep in progress.

    Attributes:
        late: Tasks that had ended when the sweep was interrupted but were not yielded.
    """

    def __init__(
        self, context: KernelContext, function: Callable[..., object], options: CallOptions, total: int | None
    ) -> None:
        self._context = context
        self._function = function
        self._options = options
        self._total = total
        self._name = options.name or name_of(function)
        self._began = time.monotonic()
        self._ended: queue.SimpleQueue[Run[Any]] = queue.SimpleQueue()
        self._out: dict[str, Task[T, R]] = {}
        self._failures: list[str] = []
        self._done = 0
        self.late: list[Task[T, R]] = []
        # since when the pool has not accepted the next item, when to retry, and the reason
        self._unreached_since = self._try_at = 0.0
        self._unreached = ""

    def tasks(self, items: Iterable[T], at_once: int | None) -> Generator[Task[T, R]]:
        """Yield each item's task when it ends."""
        bound = at_once or self._bound()
        progress = SweepProgress(sys.stdout, is_notebook=self._context.is_notebook, ui=self._options.ui)
        waiting: Iterator[Task[T, R]] = (Task(*numbered) for numbered in enumerate(items))
        ending = "stopped"
        try:
            more = True
            while more or self._out:
                while more and len(self._out) < bound and time.monotonic() >= self._try_at:
                    task = next(waiting, None)
                    if task is None:
                        more = False
                    elif not self._start(task):
                        waiting = itertools.chain((task,), waiting)
                    elif task.error is not None:
                        yield self._record(task)
                now = time.monotonic()
                if progress.is_due(now):
                    progress.show(self._view(self._unreached), now)
                if (more or self._out) and (task := self._next()) is not None:
                    yield self._record(task)
            ending = ""
        except KeyboardInterrupt as error:
            ending = "interrupted"
            while not self._ended.empty() and (task := self._next()) is not None:
                self.late.append(self._record(task))
            message = (
                f"the sweep was interrupted when {self._done} of its items were done; the other runs are stopped. "
                "The results so far are in the exception's .results, `sys.last_value.results` in the next cell."
            )
            raise RunCancelled(message) from error
        finally:
            if self._out:
                self._cancel_all()
            progress.show(self._view(ending, is_final=True), time.monotonic())

    def _bound(self) -> int:
        """Return the maximum number of runs submitted at the same time."""
        name = self._context.wanted_pool(self._options.pool)
        if name not in KINDS and not (not name and self._context.pools.entries()):
            pool = self._context.pools.get(name or LOCAL)
        else:
            # each item's pool is chosen when the item is submitted; usually it is this one
            pool = self._context.resolve_target(name, self._options.devices).pool
        status = pool.status(recent=0)
        ranks = self._options.ranks or 1
        if status is None:
            return _AHEAD
        wanted = self._options.device_type or "any"
        devices = sum(1 for device in status.inventory.devices if wanted in ("any", device.type))
        if devices:
            return max(1, devices // ranks) + _AHEAD
        # more CPU ranks than cores would slow all of them down
        return max(1, min(status.inventory.cores, status.inventory.cpu_slots) // ranks)

    def _start(self, task: Task[T, R]) -> bool:
        """Submit an item's run, or record why that is impossible. Returns False to try again later."""
        try:
            options = replace(self._options, name=f"{self._name}[{task.index}]")
            call = FunctionCall(self._function, (task.item,), {})
            submission = prepare(self._context, call, options, beside_sessions=False)
            run = task.run = cast("Run[R]", submitted(self._context, submission))
        except SerializationError as error:
            if not self._done and not self._out:
                raise
            # only this item is affected: others can be sent
            task.error = error
            return True
        except PoolError as error:
            self._wait_for_pool(error)
            return False
        self._unreached_since, self._unreached = 0.0, ""
        self._out[run.run_id] = task
        run.add_done_callback(cast("Callable[[object], object]", self._ended.put))
        return True

    def _wait_for_pool(self, error: PoolError) -> None:
        """Set the time of the next attempt: a pool that was reached before may come back.

        Raises:
            PoolError: The pool has been unreachable for too long, or was never reached.
        """
        now = time.monotonic()
        if not (self._done or self._failures or self._out) or isinstance(error, PoolVersionError | KeyRefused):
            raise error
        self._unreached_since = self._unreached_since or now
        is_local = self._context.wanted_pool(self._options.pool) in ("", LOCAL)
        if now - self._unreached_since > (_LOCAL_PATIENCE_S if is_local else self._context.settings.link_timeout_s):
            raise error
        self._try_at = now + _TRY_AGAIN_S
        self._unreached = "the pool does not answer; further items wait"

    def _next(self) -> Task[T, R] | None:
        try:
            run = self._ended.get(timeout=_TICK_S)
        except queue.Empty:
            return None
        task = self._out.pop(run.run_id)
        task.store_result(run)
        return task

    def _record(self, task: Task[T, R]) -> Task[T, R]:
        if task.error is None:
            self._done += 1
        else:
            run = short(task.run.run_id) if task.run is not None else ""
            self._failures.append(failure_line(task.index, run, task.error))
        return task

    def _cancel_all(self) -> None:
        for task in self._out.values():
            if task.run is not None:
                task.run.cancel("its sweep was interrupted")
        until = time.monotonic() + _CANCEL_PATIENCE_S
        while self._out and time.monotonic() < until:
            try:
                self._out.pop(self._ended.get(timeout=max(0.0, until - time.monotonic())).run_id, None)
            except queue.Empty:
                return

    def _view(self, ending: str = "", *, is_final: bool = False) -> SweepView:
        waits = (RunState.QUEUED, RunState.PREPARING, RunState.STARTING)
        running = sum(1 for task in list(self._out.values()) if task.run is not None and task.run.state not in waits)
        return SweepView(
            name=self._name,
            done=self._done,
            running=running,
            failed=len(self._failures),
            total=self._total,
            seconds=time.monotonic() - self._began,
            failures=tuple(self._failures),
            ending=ending,
            is_final=is_final,
        )
